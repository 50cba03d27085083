"""The same sandbox for asyncio code.

What blocks runs in a thread of its own; a command does not occupy one while it runs. Every call may be
cancelled. What would then be left behind is taken back before the cancellation goes on: a create leaves no
sandbox, `fork_fs` no fork, `snapshot` no snapshot, a run or a start no process. Any other call goes on to its
end: what it was to change (a file, a timeout, the network) may have changed or may yet. Where the machine has
no thread left, calls raise CapacityError; a kill, and what is taken back, are done all the same, and the
event loop stands still meanwhile.
"""

import asyncio
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, Literal, Self, TypeVar, overload

from sandbox.aio_arrival import Arrival
from sandbox.aio_commands import AsyncCommands, AsyncSessions
from sandbox.aio_files import AsyncFiles
from sandbox.aio_threads import awaited, in_thread, outlasted, threaded, uncancelled
from sandbox.errors import SandboxGone
from sandbox.named import Named
from sandbox.policy import Network
from sandbox.results import Denial
from sandbox.sandbox import Sandbox, SandboxInfo, kill_all
from sandbox.snapshots import Snapshot
from sandbox.status import IdleWish, SandboxStatus

if TYPE_CHECKING:
    from sandbox.doctor import Capability

T = TypeVar("T")


class AsyncSandbox(Named):
    """Made by `await AsyncSandbox.create(...)` and ended by `await sandbox.kill()`, or both by `async with
    AsyncSandbox.create(...) as sandbox`. Every call is awaited; only what is known already (`info`, `id`,
    `denials`, ...) is a plain property."""

    def __init__(self, sandbox: Sandbox) -> None:
        """Takes over the sandbox."""
        self._sandbox = sandbox
        self.commands = AsyncCommands(sandbox)
        self.files = AsyncFiles(sandbox)
        self.sessions = AsyncSessions(sandbox)

    @classmethod
    def create(cls, *args: Any, **options: Any) -> "Arrival[AsyncSandbox]":
        """To be awaited, or for `async with`. Takes what `Sandbox.create` takes and raises what it raises.
        When cancelled, waits for the sandbox that is on its way and kills it; one with a key it leaves, where
        the same key finds it."""
        return Arrival(cls._create(*args, **options))

    @classmethod
    async def _create(cls, *args: Any, **options: Any) -> "AsyncSandbox":
        pending = in_thread(partial(Sandbox.create, *args, **options))
        return cls(await _made_or_undone(pending, Sandbox.kill if options.get("key") is None else _leave))

    @classmethod
    def connect(cls, id: str, *, state_dir: Path | str | None = None) -> "Arrival[AsyncSandbox]":
        """To be awaited, or for `async with`, which ends the sandbox. See `Sandbox.connect`."""
        return Arrival(cls._connect(id, state_dir))

    @classmethod
    async def _connect(cls, id: str, state_dir: Path | str | None) -> "AsyncSandbox":
        return cls(await threaded(Sandbox.connect, id, state_dir=state_dir))

    @staticmethod
    async def list(
        *, labels: Mapping[str, str] | None = None, state_dir: Path | str | None = None
    ) -> tuple[SandboxStatus, ...]:
        """See `Sandbox.list`."""
        return await threaded(Sandbox.list, labels=labels, state_dir=state_dir)

    @staticmethod
    async def capabilities(
        *, state_dir: Path | str | None = None, toolkit: Path | str | None = None
    ) -> "tuple[Capability, ...]":
        """See `Sandbox.capabilities`."""
        return await threaded(Sandbox.capabilities, state_dir=state_dir, toolkit=toolkit)

    async def get_info(self) -> SandboxStatus:
        """See `Sandbox.get_info`."""
        return self._sandbox.get_info()

    async def set_timeout(
        self, lifetime_s: float | None = None, *, idle_s: IdleWish = "keep"
    ) -> SandboxStatus:
        """See `Sandbox.set_timeout`. When cancelled, the timeouts may or may not have changed."""
        return await threaded(self._sandbox.set_timeout, lifetime_s, idle_s=idle_s)

    @property
    def id(self) -> str:
        """Its id."""
        return self._sandbox.id

    @property
    def info(self) -> SandboxInfo:
        """Effective values."""
        return self._sandbox.info

    @property
    def is_running(self) -> bool:
        """False once it has ended, for whatever reason."""
        return self._sandbox.is_running

    async def pause(self) -> None:
        """See `Sandbox.pause`."""
        await threaded(self._sandbox.pause)

    async def resume(self) -> None:
        """See `Sandbox.resume`."""
        await threaded(self._sandbox.resume)

    @property
    def is_paused(self) -> bool:
        """See `Sandbox.is_paused`."""
        return self._sandbox.is_paused

    async def snapshot(self, name: str | None = None, *, max_mb: int | None = None) -> Snapshot:
        """See `Sandbox.snapshot`. When cancelled, waits for the one that is on its way and deletes it."""
        pending = in_thread(partial(self._sandbox.snapshot, name, max_mb=max_mb))
        return await _made_or_undone(pending, Snapshot.delete)

    @overload
    async def fork_fs(self) -> "AsyncSandbox": ...
    @overload
    async def fork_fs(self, n: int) -> "tuple[AsyncSandbox, ...]": ...
    async def fork_fs(self, n: int | None = None) -> "AsyncSandbox | tuple[AsyncSandbox, ...]":
        """See `Sandbox.fork_fs`. When cancelled, waits for the forks that are on their way and kills them."""
        pending = in_thread(partial(self._sandbox.fork_fs, 1 if n is None else n))
        made = tuple(map(AsyncSandbox, await _made_or_undone(pending, kill_all)))
        return made[0] if n is None else made

    @property
    def ended(self) -> SandboxGone | None:
        """See `Sandbox.ended`."""
        return self._sandbox.ended

    @property
    def denials(self) -> tuple[Denial, ...]:
        """See `Sandbox.denials`."""
        return self._sandbox.denials

    @property
    def network_version(self) -> int:
        """See `Sandbox.network_version`."""
        return self._sandbox.network_version

    async def set_network(self, network: Network | Literal["none"], expected_version: int) -> int:
        """See `Sandbox.set_network`. When cancelled, the policy may or may not have changed."""
        return await threaded(self._sandbox.set_network, network, expected_version)

    async def enter_phase(self, name: str, expected_version: int) -> int:
        """See `Sandbox.enter_phase`. When cancelled, the policy may or may not have changed."""
        return await threaded(self._sandbox.enter_phase, name, expected_version)

    async def kill(self) -> None:
        """Ends the sandbox. Idempotent; completes even when cancelled, or where no thread can be had."""
        await uncancelled(self._sandbox.kill)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        await self.kill()


async def _made_or_undone(pending: "Future[T]", undo: Callable[[T], object]) -> T:
    """Its result; when cancelled, that is undone as soon as it is there."""
    try:
        return await awaited(pending)
    except asyncio.CancelledError as cancelled:
        await outlasted(pending)
        if pending.exception() is None:
            await uncancelled(partial(undo, pending.result()), cancelled)
        raise


def _leave(sandbox: Sandbox) -> None:
    """To whoever has its key."""
