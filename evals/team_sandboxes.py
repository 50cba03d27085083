"""Agents' sandboxes, made of the platform's: the workspace at /workspace, no network, limits."""

from collections.abc import Awaitable, Mapping
from pathlib import Path
from typing import Literal, TypeVar

from pydantic import BaseModel, ConfigDict, Field, SecretStr

from sandbox import AsyncSandbox, Policy
from sandbox.errors import FileError, FileMissing
from teams.workspace import AgentSandbox, CommandResult, Tree, WorkspaceError

_WORKDIR = "/workspace"
_Value = TypeVar("_Value")


class BoxConfig(BaseModel):
    """What each agent's sandbox gets."""

    model_config = ConfigDict(extra="forbid", frozen=True)
    substrate: Literal["function", "container"] = "container"
    cpu: float | None = Field(default=None, gt=0)  # cores; None: 1 where the host can enforce a limit
    memory_mb: int | None = Field(default=None, ge=64)  # None: 512, likewise; files count as memory
    pids: int = Field(default=128, ge=8)
    disk_mb: int = Field(default=128, ge=8)
    lifetime_s: float = Field(default=3_600.0, gt=0)  # beyond this a forgotten one ends by itself
    output_bytes: int = Field(default=64_000, ge=1_000)  # kept of each stream; a model sees far less
    tree_bytes: int = Field(default=64_000_000, ge=1_000_000)  # of a workspace that is taken back
    env: Mapping[str, SecretStr] = Field(default_factory=dict[str, SecretStr])  # of every command
    state_dir: Path | None = None
    toolkit: Path | None = None


class Boxes:
    """Makes agents' sandboxes. Any number may be made at once; each is its maker's to kill."""

    def __init__(self, config: BoxConfig | None = None) -> None:
        self._config = config or BoxConfig()

    async def __call__(self, name: str, tree: Tree) -> AgentSandbox:
        """Raises the errors of `Sandbox.create`. Cancelled, it leaves nothing behind."""
        config = self._config
        sandbox = await AsyncSandbox.create(
            substrate=config.substrate,
            policy=Policy(network="none"),
            cpu=config.cpu,
            memory_mb=config.memory_mb,
            pids=config.pids,
            disk_mb=config.disk_mb,
            lifetime_s=config.lifetime_s,
            labels={"agent": name},
            env={name: value.get_secret_value() for name, value in config.env.items()},
            state_dir=config.state_dir,
            toolkit=config.toolkit,
        )
        try:
            for path, data in tree.files.items():
                await sandbox.files.write(f"{_WORKDIR}/{path}", data)
        except BaseException:
            await sandbox.kill()
            raise
        return Box(sandbox, config)


class Box:
    """`AgentSandbox` over a platform sandbox."""

    def __init__(self, sandbox: AsyncSandbox, config: BoxConfig) -> None:
        self._sandbox = sandbox
        self._config = config
        self.shortfalls = sandbox.info.shortfalls

    async def run(self, command: str, *, timeout_s: float) -> CommandResult:
        result = await self._sandbox.commands.run(
            command, timeout_s=timeout_s, cwd=_WORKDIR, output_bytes=self._config.output_bytes
        )
        return CommandResult(result.exit_code, result.stdout + result.stderr, result.reason)

    async def read(self, path: str) -> bytes | None:
        reading = self._sandbox.files.read(f"{_WORKDIR}/{path}", max_bytes=self._config.tree_bytes)
        try:
            return await reading
        except FileMissing:
            return None
        except FileError as error:
            raise WorkspaceError(str(error)) from error

    async def write(self, path: str, data: bytes) -> None:
        await _by_agent(self._sandbox.files.write(f"{_WORKDIR}/{path}", data))

    async def remove(self, path: str) -> None:
        try:
            await self._sandbox.files.remove(f"{_WORKDIR}/{path}")
        except FileMissing:
            return
        except FileError as error:
            raise WorkspaceError(str(error)) from error

    async def snapshot(self) -> Tree:
        taking = self._sandbox.files.download_dir(_WORKDIR, max_bytes=self._config.tree_bytes)
        found = await _by_agent(taking)
        return Tree(found.files, (*found.links, *found.skipped))

    async def kill(self) -> None:
        await self._sandbox.kill()


async def _by_agent(operation: Awaitable[_Value]) -> _Value:
    """What cannot be done with an agent's files is the agent's doing: it may have made them what they are."""
    try:
        return await operation
    except FileError as error:
        raise WorkspaceError(str(error)) from error
