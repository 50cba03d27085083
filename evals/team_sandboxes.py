"""Agents' sandboxes, made of the platform's: the workspace at /workspace, no network, limits."""

import asyncio
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Literal, TypeVar

from pydantic import BaseModel, ConfigDict, Field

from protocol.errors import DockyardError
from sandbox import Policy, Sandbox
from sandbox.errors import FileError, FileMissing
from teams.workspace import AgentSandbox, CommandResult, Tree, WorkspaceError

_WORKDIR = "/workspace"
_Made = TypeVar("_Made")


class BoxConfig(BaseModel):
    """What each agent's sandbox gets."""

    model_config = ConfigDict(extra="forbid", frozen=True)
    substrate: Literal["function", "container"] = "container"
    cpu: float = Field(default=1.0, gt=0)  # cores
    memory_mb: int = Field(default=512, ge=64)  # the writable layer lies in it too
    pids: int = Field(default=128, ge=8)
    disk_mb: int = Field(default=128, ge=8)
    lifetime_s: float = Field(default=3_600.0, gt=0)  # beyond this a forgotten one ends by itself
    output_bytes: int = Field(default=64_000, ge=1_000)  # kept of each stream; a model sees far less
    tree_bytes: int = Field(default=64_000_000, ge=1_000_000)  # of a workspace that is taken back
    state_dir: Path | None = None
    toolkit: Path | None = None


class Boxes:
    """Makes agents' sandboxes. Any number may be made at once; each is its maker's to kill."""

    def __init__(self, config: BoxConfig | None = None) -> None:
        self._config = config or BoxConfig()

    async def __call__(self, name: str, tree: Tree) -> AgentSandbox:
        """Raises the errors of `Sandbox.create`. Cancelled, it leaves nothing behind."""
        return await _owned(lambda: self._make(name, tree))

    def _make(self, name: str, tree: Tree) -> "Box":
        config = self._config
        sandbox = Sandbox.create(
            substrate=config.substrate,
            policy=Policy(network="none"),
            cpu=config.cpu,
            memory_mb=config.memory_mb,
            pids=config.pids,
            disk_mb=config.disk_mb,
            lifetime_s=config.lifetime_s,
            labels={"agent": name},
            state_dir=config.state_dir,
            toolkit=config.toolkit,
        )
        try:
            for path, data in tree.files.items():
                sandbox.files.write(f"{_WORKDIR}/{path}", data)
        except BaseException:
            sandbox.kill()
            raise
        return Box(sandbox, config)


class Box:
    """`AgentSandbox` over a platform sandbox."""

    def __init__(self, sandbox: Sandbox, config: BoxConfig) -> None:
        self._sandbox = sandbox
        self._config = config

    async def run(self, command: str, *, timeout_s: float) -> CommandResult:
        running = self._sandbox.commands.start(
            command, timeout_s=timeout_s, cwd=_WORKDIR, output_bytes=self._config.output_bytes
        )
        try:
            # Shielded: cancelling the wrapper must not cancel the future that the sandbox's thread resolves.
            result = await asyncio.shield(asyncio.wrap_future(running.future))
        except asyncio.CancelledError:
            running.kill()
            raise
        return CommandResult(result.exit_code, result.stdout + result.stderr, result.reason)

    async def read(self, path: str) -> bytes | None:
        def read() -> bytes | None:
            try:
                return self._sandbox.files.read(f"{_WORKDIR}/{path}", max_bytes=self._config.tree_bytes)
            except FileMissing:
                return None

        return await self._files(read)

    async def write(self, path: str, data: bytes) -> None:
        await self._files(lambda: self._sandbox.files.write(f"{_WORKDIR}/{path}", data))

    async def remove(self, path: str) -> None:
        def remove() -> None:
            if self._sandbox.files.exists(f"{_WORKDIR}/{path}"):
                self._sandbox.files.remove(f"{_WORKDIR}/{path}")

        await self._files(remove)

    async def snapshot(self) -> Tree:
        limit = self._config.tree_bytes
        found = await self._files(lambda: self._sandbox.files.download_dir(_WORKDIR, max_bytes=limit))
        return Tree(found.files, (*found.links, *found.skipped))

    async def kill(self) -> None:
        await asyncio.to_thread(self._sandbox.kill)

    async def _files(self, operation: Callable[[], _Made]) -> _Made:
        """File operations answer in milliseconds; what an agent did to its own files is its own fault."""
        try:
            return await asyncio.to_thread(operation)
        except FileError as error:
            raise WorkspaceError(str(error)) from error


async def _owned(make: Callable[[], Box]) -> Box:
    """Makes a box in a thread; cancelled meanwhile, the box is killed as soon as it is there."""
    making = asyncio.ensure_future(asyncio.to_thread(make))
    try:
        return await asyncio.shield(making)
    except asyncio.CancelledError:
        with suppress(DockyardError):  # then there is none, and the cancellation is what matters
            await (await making).kill()
        raise
