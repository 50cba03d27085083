"""The same sandbox for asyncio code.

Creating and killing run in a thread each; a command does not occupy one while it runs. Every call may be
cancelled, and then frees what it had started before the cancellation goes on: a create leaves no sandbox, a
run leaves no process.
"""

import asyncio
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, wait
from functools import partial
from pathlib import Path
from threading import Thread
from types import TracebackType
from typing import Any, Literal, ParamSpec, Self, TypeVar, overload

from sandbox.checking import checked
from sandbox.download import Download
from sandbox.entries import Entry
from sandbox.errors import CapacityError, SandboxGone
from sandbox.feed import OnOutput
from sandbox.policy import Network
from sandbox.results import CommandResult, Denial
from sandbox.running import RunningCommand
from sandbox.sandbox import Sandbox, SandboxInfo
from sandbox.sessions import Session
from sandbox.snapshots import Snapshot
from sandbox.status import IdleWish, SandboxStatus
from sandbox.wire import TerminalSize

P = ParamSpec("P")
T = TypeVar("T")
_LOOK_AGAIN_S = 1.0  # whether the event loop is still there


class AsyncSandbox:
    """Made by `await AsyncSandbox.create(...)`, ended by `await sandbox.kill()` or `async with`."""

    def __init__(self, sandbox: Sandbox) -> None:
        """Takes over the sandbox."""
        self._sandbox = sandbox
        self.commands = AsyncCommands(sandbox)
        self.files = AsyncFiles(sandbox)
        self.sessions = AsyncSessions(sandbox)

    @classmethod
    async def create(cls, *args: Any, **options: Any) -> "AsyncSandbox":
        """Takes what `Sandbox.create` takes and raises what it raises. When cancelled, waits for the sandbox
        that is on its way and kills it; one with a key it leaves, where the same key finds it."""
        pending = _in_thread(partial(Sandbox.create, *args, **options))
        try:
            return cls(await asyncio.shield(asyncio.wrap_future(pending)))
        except asyncio.CancelledError:
            if options.get("key") is None:
                await _uncancelled(partial(_kill_when_made, pending))
            raise

    @classmethod
    async def connect(cls, id: str, *, state_dir: Path | str | None = None) -> "AsyncSandbox":
        """See `Sandbox.connect`."""
        return cls(await _threaded(Sandbox.connect, id, state_dir=state_dir))

    @staticmethod
    async def list(
        *, labels: Mapping[str, str] | None = None, state_dir: Path | str | None = None
    ) -> tuple[SandboxStatus, ...]:
        """See `Sandbox.list`."""
        return await _threaded(Sandbox.list, labels=labels, state_dir=state_dir)

    async def get_info(self) -> SandboxStatus:
        """See `Sandbox.get_info`."""
        return self._sandbox.get_info()

    async def set_timeout(
        self, lifetime_s: float | None = None, *, idle_s: IdleWish = "keep"
    ) -> SandboxStatus:
        """See `Sandbox.set_timeout`. When cancelled, the timeouts may or may not have changed."""
        return await _threaded(self._sandbox.set_timeout, lifetime_s, idle_s=idle_s)

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
        await _threaded(self._sandbox.pause)

    async def resume(self) -> None:
        """See `Sandbox.resume`."""
        await _threaded(self._sandbox.resume)

    @property
    def is_paused(self) -> bool:
        """See `Sandbox.is_paused`."""
        return self._sandbox.is_paused

    async def snapshot(self, name: str | None = None, *, max_mb: int | None = None) -> Snapshot:
        """See `Sandbox.snapshot`. When cancelled, the snapshot may or may not be kept."""
        return await _threaded(self._sandbox.snapshot, name, max_mb=max_mb)

    @overload
    async def fork_fs(self) -> "AsyncSandbox": ...
    @overload
    async def fork_fs(self, n: int) -> "tuple[AsyncSandbox, ...]": ...
    async def fork_fs(self, n: int | None = None) -> "AsyncSandbox | tuple[AsyncSandbox, ...]":
        """See `Sandbox.fork_fs`. When cancelled, waits for the forks that are on their way and kills them."""
        pending = _in_thread(partial(self._sandbox.fork_fs, 1 if n is None else n))
        try:
            forks = await asyncio.shield(asyncio.wrap_future(pending))
        except asyncio.CancelledError:
            await _uncancelled(partial(_kill_all_when_made, pending))
            raise
        made = tuple(map(AsyncSandbox, forks))
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
        return await _threaded(self._sandbox.set_network, network, expected_version)

    async def enter_phase(self, name: str, expected_version: int) -> int:
        """See `Sandbox.enter_phase`. When cancelled, the policy may or may not have changed."""
        return await _threaded(self._sandbox.enter_phase, name, expected_version)

    async def kill(self) -> None:
        """Ends the sandbox. Idempotent; completes even when cancelled."""
        await _uncancelled(self._sandbox.kill)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        await self.kill()


class AsyncCommands:
    """`sandbox.commands` for asyncio."""

    def __init__(self, sandbox: Sandbox) -> None:
        self._sandbox = sandbox

    async def run(
        self,
        cmd: str | Sequence[str],
        *,
        timeout_s: float | None = None,
        cwd: str = "/workspace",
        env: Mapping[str, str] | None = None,
        output_bytes: int | None = None,
        stdin: bytes | str = b"",
        on_stdout: OnOutput | None = None,
        on_stderr: OnOutput | None = None,
        check: bool = False,
    ) -> CommandResult:
        """Like `Commands.run`, watchers called in the event loop. When cancelled, ends the command with all
        its processes first."""
        command = await self.start(
            cmd, timeout_s=self._sandbox.commands.timeout_of_run(timeout_s), cwd=cwd, env=env,
            output_bytes=output_bytes, stdin=stdin, on_stdout=on_stdout, on_stderr=on_stderr,
        )  # fmt: skip
        try:
            result = await command.wait()
        except asyncio.CancelledError:
            command.kill()
            await _uncancelled(partial(_wait_for_end, command.command))
            raise
        return checked(result, self._sandbox.id) if check else result

    async def start(
        self,
        cmd: str | Sequence[str],
        *,
        timeout_s: float | None = None,
        cwd: str = "/workspace",
        env: Mapping[str, str] | None = None,
        output_bytes: int | None = None,
        stdin: bytes | str | None = b"",
        on_stdout: OnOutput | None = None,
        on_stderr: OnOutput | None = None,
        terminal: TerminalSize | None = None,
    ) -> "AsyncRunningCommand":
        """Like `Commands.start`, watchers called in the event loop."""
        command = self._sandbox.commands.start(
            cmd, timeout_s=timeout_s, cwd=cwd, env=env, output_bytes=output_bytes, stdin=stdin,
            on_stdout=_in_loop(on_stdout), on_stderr=_in_loop(on_stderr), terminal=terminal,
        )  # fmt: skip
        return AsyncRunningCommand(command)

    def list(self) -> "tuple[AsyncRunningCommand, ...]":
        """See `Commands.list`."""
        return tuple(map(AsyncRunningCommand, self._sandbox.commands.list()))

    def connect(self, id: int) -> "AsyncRunningCommand":
        """See `Commands.connect`."""
        return AsyncRunningCommand(self._sandbox.commands.connect(id))


class AsyncRunningCommand:
    """A command that has been started. To stop waiting for it does not end it; `kill` does."""

    def __init__(self, command: RunningCommand) -> None:
        self.command = command
        self.id = command.id
        self.send_stdin, self.close_stdin = command.send_stdin, command.close_stdin
        self.resize, self.kill = command.resize, command.kill

    @property
    def is_running(self) -> bool:
        """False once its result is there."""
        return self.command.is_running

    async def wait(self) -> CommandResult:
        """Its result."""
        return await asyncio.shield(asyncio.wrap_future(self.command.future))


class AsyncSessions:
    """`sandbox.sessions` for asyncio."""

    def __init__(self, sandbox: Sandbox) -> None:
        self._sandbox = sandbox

    async def create(
        self, *, cwd: str = "/workspace", env: Mapping[str, str] | None = None
    ) -> "AsyncSession":
        """See `Sessions.create`."""
        return AsyncSession(await _threaded(self._sandbox.sessions.create, cwd=cwd, env=env))


class AsyncSession:
    """A shell session; commands come one after another."""

    def __init__(self, session: Session) -> None:
        self._session, self._turn = session, asyncio.Lock()
        self.id = session.id

    async def run(
        self,
        cmd: str,
        *,
        timeout_s: float | None = None,
        output_bytes: int | None = None,
        stdin: bytes | str = b"",
        on_stdout: OnOutput | None = None,
        on_stderr: OnOutput | None = None,
        check: bool = False,
    ) -> CommandResult:
        """See `Session.run`. When cancelled, ends the command first."""
        async with self._turn:
            command = self._session.start(
                cmd, timeout_s=self._session.timeout_of_run(timeout_s), output_bytes=output_bytes,
                stdin=stdin, on_stdout=_in_loop(on_stdout), on_stderr=_in_loop(on_stderr),
            )  # fmt: skip
            try:
                result = await AsyncRunningCommand(command).wait()
            except asyncio.CancelledError:
                command.kill()
                await _uncancelled(partial(_wait_for_end, command))
                raise
        return checked(result, self._session.sandbox_id) if check else result


class AsyncFiles:
    """`sandbox.files` for asyncio: each call runs in a thread, and goes on there when cancelled."""

    def __init__(self, sandbox: Sandbox) -> None:
        self._files = sandbox.files

    async def read(self, path: str, *, max_bytes: int = 64 << 20) -> bytes:
        """See `Files.read`."""
        return await _threaded(self._files.read, path, max_bytes=max_bytes)

    async def write(self, path: str, data: bytes | str, *, mode: int = 0o644) -> None:
        """See `Files.write`."""
        await _threaded(self._files.write, path, data, mode=mode)

    async def list(self, path: str = "/workspace") -> tuple[Entry, ...]:
        """See `Files.list`."""
        return await _threaded(self._files.list, path)

    async def exists(self, path: str) -> bool:
        """See `Files.exists`."""
        return await _threaded(self._files.exists, path)

    async def make_dir(self, path: str) -> None:
        """See `Files.make_dir`."""
        await _threaded(self._files.make_dir, path)

    async def remove(self, path: str) -> None:
        """See `Files.remove`."""
        await _threaded(self._files.remove, path)

    async def rename(self, path: str, to: str) -> None:
        """See `Files.rename`."""
        await _threaded(self._files.rename, path, to)

    async def upload_dir(self, host_dir: Path | str, path: str, *, max_bytes: int = 256 << 20) -> int:
        """See `Files.upload_dir`."""
        return await _threaded(self._files.upload_dir, host_dir, path, max_bytes=max_bytes)

    async def download_dir(self, path: str, *, max_bytes: int = 64 << 20) -> Download:
        """See `Files.download_dir`."""
        return await _threaded(self._files.download_dir, path, max_bytes=max_bytes)


def _in_loop(watcher: OnOutput | None) -> OnOutput | None:
    """The watcher, called in this task's event loop and in order with the command's result. The command's
    thread waits for each call, so that what the watcher raises ends the command, and a slow loop gets no more
    than it can take."""
    if watcher is None:
        return None
    loop = asyncio.get_running_loop()

    def call(text: str) -> None:
        taken: Future[None] = Future()
        loop.call_soon_threadsafe(_settle, taken, partial(watcher, text))
        while not wait((taken,), _LOOK_AGAIN_S).done:
            if loop.is_closed():
                raise RuntimeError("the event loop was closed before it took all of a command's output")
        taken.result()

    return call


def _in_thread(call: Callable[[], T]) -> "Future[T]":
    """A thread of its own instead of the loop's pool: that has few threads, and a sandbox that is to be
    killed must not wait for others that are being made."""
    future: Future[T] = Future()
    try:
        Thread(target=_settle, args=(future, call), name="dockyard-sandbox", daemon=True).start()
    except RuntimeError as error:
        raise CapacityError(f"sandbox: {error}", hint="raise `ulimit -u`, or end something") from error
    return future


def _settle(future: "Future[T]", call: Callable[[], T]) -> None:
    try:
        future.set_result(call())
    except BaseException as error:  # handed to whoever waits, the reader of the future
        future.set_exception(error)


async def _threaded(call: Callable[P, T], *args: P.args, **options: P.kwargs) -> T:
    return await asyncio.shield(asyncio.wrap_future(_in_thread(partial(call, *args, **options))))


async def _uncancelled(call: Callable[[], T]) -> T:
    """Runs a clean-up to its end even when the task is cancelled (again) meanwhile; the cancellation
    follows."""
    work = asyncio.ensure_future(_threaded(call))
    cancelled: asyncio.CancelledError | None = None
    while not work.done():
        try:
            await asyncio.shield(work)
        except asyncio.CancelledError as error:
            cancelled = error
    if cancelled is not None:
        raise cancelled
    return work.result()


def _kill_when_made(pending: "Future[Sandbox]") -> None:
    if pending.exception() is None:
        pending.result().kill()


def _kill_all_when_made(pending: "Future[tuple[Sandbox, ...]]") -> None:
    if pending.exception() is None:
        for sandbox in pending.result():
            sandbox.kill()


def _wait_for_end(command: RunningCommand) -> None:
    command.future.exception()
