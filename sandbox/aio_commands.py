"""`sandbox.commands` and `sandbox.sessions` for asyncio. A command occupies no thread while it runs."""

import asyncio
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, wait
from functools import partial

from sandbox.aio_threads import awaited, in_thread, outlasted, settle, take_error, threaded
from sandbox.checking import checked
from sandbox.feed import OnOutput, check_watcher, give_text
from sandbox.named import Named
from sandbox.results import CommandResult
from sandbox.running import RunningCommand
from sandbox.sandbox import Sandbox
from sandbox.sessions import Session
from sandbox.wire import TerminalSize

_LOOK_AGAIN_S = 1.0  # whether the event loop is still there


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
            await _end(command.command)
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
        """Like `Commands.start`, watchers called in the event loop. When cancelled, ends the command."""
        start = partial(
            self._sandbox.commands.start, cmd, timeout_s=timeout_s, cwd=cwd, env=env,
            output_bytes=output_bytes, stdin=stdin, terminal=terminal,
            on_stdout=_in_loop("on_stdout", on_stdout), on_stderr=_in_loop("on_stderr", on_stderr),
        )  # fmt: skip
        return AsyncRunningCommand(await _begun(start, on_stdout, on_stderr))

    async def list(self) -> "tuple[AsyncRunningCommand, ...]":
        """See `Commands.list`."""
        return tuple(map(AsyncRunningCommand, self._sandbox.commands.list()))

    async def connect(self, id: int) -> "AsyncRunningCommand":
        """See `Commands.connect`."""
        return AsyncRunningCommand(self._sandbox.commands.connect(id))


class AsyncRunningCommand(Named):
    """A command that has been started. To stop waiting for it does not end it; `kill` does."""

    def __init__(self, command: RunningCommand) -> None:
        self.command = command
        self.id = command.id

    @property
    def is_running(self) -> bool:
        """False once its result is there."""
        return self.command.is_running

    async def send_stdin(self, data: bytes | str) -> None:
        """See `RunningCommand.send_stdin`. Does not block the loop, as the next three."""
        self.command.send_stdin(data)

    async def close_stdin(self) -> None:
        """See `RunningCommand.close_stdin`."""
        self.command.close_stdin()

    async def resize(self, terminal: TerminalSize) -> None:
        """See `RunningCommand.resize`."""
        self.command.resize(terminal)

    async def kill(self) -> None:
        """See `RunningCommand.kill`."""
        self.command.kill()

    async def wait(self, timeout_s: float | None = None) -> CommandResult:
        """See `RunningCommand.wait`. When cancelled, leaves the command running."""
        self.command.check_patience(timeout_s)
        ended = asyncio.wrap_future(self.command.future)
        ended.add_done_callback(take_error)  # which nobody may wait for any more
        done, _ = await asyncio.wait((ended,), timeout=timeout_s)
        if not done and not self.command.future.done():
            raise self.command.runs_on(timeout_s)
        return self.command.future.result()


class AsyncSessions:
    """`sandbox.sessions` for asyncio."""

    def __init__(self, sandbox: Sandbox) -> None:
        self._sandbox = sandbox

    async def create(
        self, *, cwd: str = "/workspace", env: Mapping[str, str] | None = None
    ) -> "AsyncSession":
        """See `Sessions.create`."""
        return AsyncSession(await threaded(self._sandbox.sessions.create, cwd=cwd, env=env))


class AsyncSession(Named):
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
            start = partial(
                self._session.start, cmd, timeout_s=self._session.timeout_of_run(timeout_s),
                output_bytes=output_bytes, stdin=stdin, on_stdout=_in_loop("on_stdout", on_stdout),
                on_stderr=_in_loop("on_stderr", on_stderr),
            )  # fmt: skip
            command = await _begun(start, on_stdout, on_stderr)
            try:
                result = await AsyncRunningCommand(command).wait()
            except asyncio.CancelledError:
                await _end(command)
                raise
        return checked(result, self._session.sandbox_id) if check else result

    async def start(
        self,
        cmd: str,
        *,
        timeout_s: float | None = None,
        output_bytes: int | None = None,
        stdin: bytes | str | None = b"",
        on_stdout: OnOutput | None = None,
        on_stderr: OnOutput | None = None,
    ) -> AsyncRunningCommand:
        """Like `Session.start`, watchers called in the event loop. When cancelled, ends the command."""
        start = partial(
            self._session.start, cmd, timeout_s=timeout_s, output_bytes=output_bytes, stdin=stdin,
            on_stdout=_in_loop("on_stdout", on_stdout), on_stderr=_in_loop("on_stderr", on_stderr),
        )  # fmt: skip
        return AsyncRunningCommand(await _begun(start, on_stdout, on_stderr))


async def _begun(start: Callable[[], RunningCommand], *watchers: OnOutput | None) -> RunningCommand:
    """One that is watched has a thread, which may take seconds to come up, or to be given up: it is started
    on another, for which the loop does not stand still. When cancelled, ends it."""
    if all(each is None for each in watchers):
        return start()
    pending = in_thread(start)
    try:
        return await awaited(pending)
    except asyncio.CancelledError:
        await outlasted(pending)
        if pending.exception() is None:
            await _end(pending.result())
        raise


async def _end(command: RunningCommand) -> None:
    """With all its processes, whatever is cancelled meanwhile. Needs no thread."""
    command.kill()
    await outlasted(command.future)


def _in_loop(field: str, watcher: OnOutput | None) -> OnOutput | None:
    """The watcher, called in this task's event loop and in order with the command's result. The command's
    thread waits for each call, so that what the watcher raises ends the command, and a slow loop gets no more
    than it can take."""
    if watcher is None:
        return None
    check_watcher(field, watcher)
    loop = asyncio.get_running_loop()

    def call(text: str) -> None:
        taken: Future[None] = Future()
        loop.call_soon_threadsafe(settle, taken, partial(give_text, watcher, text))
        while not wait((taken,), _LOOK_AGAIN_S).done:
            if loop.is_closed():
                raise RuntimeError("the event loop was closed before it took all of a command's output")
        taken.result()

    return call
