"""A command that runs: its output, its input, its deadline and its end."""

import os
import threading
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from functools import partial

from protocol.clock import Clock
from sandbox.arguments import check_seconds
from sandbox.audit_log import SandboxLog
from sandbox.cgroups import Counters
from sandbox.channel import Channel
from sandbox.checking import not_started
from sandbox.errors import (
    InvalidArgument,
    RequestTimeout,
    SandboxError,
    SandboxGone,
    translated,
)
from sandbox.feed import Feed, Watchers
from sandbox.feeding import Input
from sandbox.host import Host
from sandbox.named import Named
from sandbox.output import OutputBuffer
from sandbox.plumbing import Plumbing
from sandbox.refusals import denials_since
from sandbox.results import CommandResult, Denial, Reason
from sandbox.texts import utf8
from sandbox.undisturbed import undisturbed, undisturbed_call
from sandbox.wire import Ending, Frame, Kind, TerminalSize, check_size, decode_exit, pack_size

LONGEST_S = 1e9  # that anybody waits
SIGKILL = 9
# How long init may take to end a command's processes before the sandbox as a whole is ended. A fork bomb
# takes milliseconds; only processes stuck in the kernel, or an init starved of CPU, take this long.
KILL_GRACE_NS = 10_000_000_000
_MOST_SHOWN = 200  # characters of a name
_MINDER_DIED_TEXT = (
    b"dockyard: the process that watches over this command was killed or stopped, so the command was ended\n"
)


@dataclass(frozen=True, slots=True)
class Call:
    """What to run, checked. `stdin_stays_open`: more input may follow what is there."""

    words: bytes = field(repr=False)  # see `wire.exec_words`
    program: str = field(repr=False)  # the first of them
    about: Mapping[str, object]  # what the audit log says of them
    terminal: TerminalSize | None
    stdin: bytes = field(repr=False)
    stdin_stays_open: bool
    watchers: Watchers
    timeout_ns: int | None  # None: until it is killed
    output_bytes: int
    output_total_bytes: int


class RunningCommand(Named):
    """A command that has been started. `future` holds the CommandResult, or the error that kept it from
    starting; it cannot be cancelled, `kill` ends the command. What is called when it is done must not block:
    its thread serves other sandboxes too. Thread-safe."""

    def __init__(
        self, call: Call, channel: Channel, host: Host, clock: Clock, log: SandboxLog | None
    ) -> None:
        self.future: Future[CommandResult] = Future()
        self.future.set_running_or_notify_cancel()  # else to cancel it would be an end that nothing has had
        self._call = call
        self._channel = channel
        self._host = host
        self._clock = clock
        self._log = log
        self._outputs = (OutputBuffer(call.output_bytes), OutputBuffer(call.output_bytes))
        self._room = call.output_total_bytes  # for more of it
        self._input = Input(call.stdin, stays_open=call.stdin_stays_open, channel=channel)
        self._feed = Feed(call.watchers, self.kill) if call.watchers.any() else None
        self._verdict: Reason | None = None  # why we ended it, where we did
        self._before = Counters()
        self.is_alone = True  # no other ran beside it so far
        self._started_ns = clock.now_ns()
        self._deadline_ns = None if call.timeout_ns is None else self._started_ns + call.timeout_ns
        self._paused_before_ns = 0
        self._plumbing: Plumbing | None = None
        self._has_ended = self._is_over = False
        self._fault: SandboxError | None = None  # of the owner's, which ends the command
        self._id = channel.new_id()

    def start(self) -> "RunningCommand":
        """Sends it off. Raises SandboxGone, and CapacityError where the host is out of descriptors."""
        self._before = self._host.counters_before()
        self._host.begin()
        self._paused_before_ns = self._host.paused_ns()
        try:
            with translated("starting a command", sandbox_id=self._channel.name), self._logged():
                if not self._send_off():
                    raise self._gone()
        except BaseException:
            self._drop()
            raise
        return self

    def _logged(self) -> AbstractContextManager[None]:
        if self._log is None:
            return nullcontext()
        return self._log.before("exec", command=self._id, **self._call.about)

    def _send_off(self) -> bool:
        """False when the sandbox is gone."""
        size = self._call.terminal
        self._plumbing = plumbing = Plumbing(
            self._call.words,
            terminal=size,
            input=self._input,
            channel=self._channel,
            take=self._take_output,
            ended=self._on_report,
            failed=self._on_fault,
        )
        second = 0 if size is None else pack_size(size)
        handed = plumbing.hand_over()
        return self._channel.open(self._id, self, Kind.EXEC, first=plumbing.flags, second=second, fds=handed)

    def _gone(self) -> SandboxGone:
        return self._host.gone() or SandboxGone(
            "the sandbox is gone", reason="lost", sandbox_id=self._channel.name
        )

    def _drop(self) -> None:
        """It has not been started."""
        self._host.drop()
        if self._plumbing is not None:
            self._plumbing.close()
        if self._feed is not None:
            self._feed.finish(lambda _: None)

    @property
    def id(self) -> int:
        """Unique in its sandbox; what `commands.connect` finds it by while it runs."""
        return self._id

    @property
    def is_running(self) -> bool:
        """False once its result is there."""
        return not self._is_over

    @undisturbed_call
    def send_stdin(self, data: bytes | str) -> None:
        """More input, for a command started with `stdin=None`. Does not block: what the program does not read
        yet is kept. Raises InvalidArgument after `close_stdin`; nothing happens to a command that has ended.
        CapacityError where the host has no room to wait for the program: `data` is kept and not to be sent
        again, and the next piece, which may be empty, has it go on.
        """
        with translated("sending input", sandbox_id=self._channel.name):
            self._input.add(utf8("data", data))
        self._host.touch()

    @undisturbed_call
    def close_stdin(self) -> None:
        """The end of the input. Idempotent. A terminal's line ends by `send_stdin("\x04")` instead.
        CapacityError as of `send_stdin`: call it again."""
        with translated("closing the input", sandbox_id=self._channel.name):
            self._input.close()
        self._host.touch()

    @undisturbed_call
    def resize(self, terminal: TerminalSize) -> None:
        """A new size for its terminal. Nothing happens to a command without one. InvalidArgument for what no
        terminal has."""
        check_size(terminal)
        if self._plumbing is not None:
            self._plumbing.resize(terminal)

    def wait(self, timeout_s: float | None = None) -> CommandResult:
        """Blocks until the command has ended. RequestTimeout after `timeout_s`, or an interrupt, leaves it
        running."""
        self.check_patience(timeout_s)
        return undisturbed(partial(self._wait, timeout_s), patience_s=0)

    def _wait(self, timeout_s: float | None) -> CommandResult:
        try:
            return self.future.result(timeout_s)
        except TimeoutError as error:
            if self.future.done():  # just now, or a watcher has raised it
                return self.future.result()
            raise self.runs_on(timeout_s) from error

    def check_patience(self, timeout_s: float | None) -> None:
        """InvalidArgument for what nobody can wait."""
        check_seconds("timeout_s", timeout_s, LONGEST_S, or_zero=True)

    def runs_on(self, timeout_s: float | None) -> RequestTimeout:
        """What to tell whoever does not want to wait any longer."""
        words = f"command {self.id} has not ended within {timeout_s} s, and runs on"
        return RequestTimeout(words, hint="wait again, or kill it", sandbox_id=self._channel.name)

    def end(self) -> None:
        """Ends it with all its processes, and blocks until it has. An interrupt goes on at once."""
        undisturbed(self._end_and_wait, patience_s=0)

    def _end_and_wait(self) -> None:
        self.kill()
        self.future.exception()

    @undisturbed_call
    def kill(self) -> None:
        """Ends the command and all its processes; `wait` then gives reason `killed`. Does not block; nothing
        happens to a command that has ended."""
        if self._log is not None and self._verdict is None and not self.future.done():
            self._log.note("kill", command=self._id)
        self._end("killed")
        self._channel.wake()

    def leave(self) -> None:
        """In a child of a fork: nobody there would wait for its end in vain."""
        self.future, self._is_over = Future(), True
        self.future.set_exception(self._gone())
        self._input.leave()
        if self._plumbing is not None:
            self._plumbing.leave()

    def on_frame(self, frame: Frame) -> bool:
        """Channel thread: the end of a command whose minder could not report it, or had not even begun."""
        if frame.kind == Kind.EXIT:
            self._finish(*decode_exit(frame))
        return self._has_ended

    def on_lost(self) -> None:
        """Channel thread: the sandbox is gone. A verdict that ended it (a timeout) still stands."""
        self._collect()
        gone = self._host.gone()
        by_owner = gone is not None and gone.reason in ("killed", "expired", "idle")
        reason = self._verdict or ("killed" if by_owner else "lost")
        self._resolve(self._result(None if reason == "lost" else 128 + SIGKILL, reason))

    def deadline_ns(self) -> int | None:
        """The end of its time, then the end of init's grace. Time stands still for a paused sandbox."""
        if self._deadline_ns is None or self._host.is_paused():
            return None
        return self._deadline_ns + self._host.paused_ns() - self._paused_before_ns

    def on_deadline(self) -> None:
        """Channel thread: its time is over, or init did not manage to end it."""
        if self._verdict is None:
            self._end("timeout")
        else:
            self._give_grace()
            self._host.break_off()

    def _on_report(self, frame: Frame) -> None:
        self._finish(*decode_exit(frame))
        self._channel.forget(self._id)

    def _on_fault(self, error: Exception) -> None:
        """Its owner could not do its part, such as take a terminal when no descriptor is free."""
        if self._has_ended:
            raise error
        try:
            with translated("serving a command", sandbox_id=self._channel.name):
                raise error
        except SandboxError as fault:
            self._fault = self._fault or fault
        except Exception:
            text = f"serving a command failed: {type(error).__name__}"
            self._fault = self._fault or SandboxError(text, sandbox_id=self._channel.name)
        self._end("killed")

    def _take_output(self, stream: int, data: memoryview) -> None:
        """What is beyond the limit counts for nothing: how much more came before the end is chance."""
        piece = data[: self._room]
        self._room -= len(piece)
        self._outputs[stream].add(piece)
        if self._feed is not None and piece:
            self._feed.add(stream, bytes(piece))
        if len(piece) < len(data):
            self._end("output_limit")

    def _collect(self) -> None:
        """All of its processes are dead; what they wrote is in the pipes."""
        if self._plumbing is not None:
            self._plumbing.drain()
            self._plumbing.close()

    def _end(self, verdict: Reason) -> None:
        if self._verdict is not None or self.future.done():
            return
        self._host.touch()
        self._verdict = verdict
        self._give_grace()
        self._channel.send(self._id, Kind.KILL)

    def _give_grace(self) -> None:
        self._paused_before_ns = self._host.paused_ns()
        self._deadline_ns = self._clock.now_ns() + KILL_GRACE_NS

    def _finish(self, ending: int, value: int) -> None:
        if self._has_ended:
            return
        self._has_ended = True
        self._collect()
        if ending == Ending.FAILED_CHDIR:
            self._fail(InvalidArgument(f"cwd: {os.strerror(value)}", hint="name a directory of the sandbox"))
        elif ending == Ending.FAILED_START:
            self._fail(not_started(value, self._channel.name))
        elif ending == Ending.FAILED_EXEC:
            # As a shell has it: 127 for a program that is not there, 126 for one that cannot be run.
            program = repr(self._call.program[:_MOST_SHOWN])
            self._tell(f"dockyard: cannot run the program {program}: {os.strerror(value)}\n".encode())
            self._resolve(self._result(127 if value == 2 else 126, "exit"))
        else:
            if ending == Ending.MINDER_DIED and self._verdict is None:
                self._tell(_MINDER_DIED_TEXT)
            self._resolve(self._judge(ending, value))

    def _tell(self, words: bytes) -> None:
        """In its error output, whatever that has room for: behind all that it printed itself."""
        self._outputs[1].add(words)
        if self._feed is not None:
            self._feed.add(1, words)

    def _judge(self, ending: int, value: int) -> CommandResult:
        if self._verdict is not None:
            return self._result(128 + SIGKILL, self._verdict)
        reason: Reason = "exit" if ending == Ending.EXIT else "signal"
        # MINDER_DIED: a command that killed or stopped its own minder, and went with it.
        by_signal = value if ending == Ending.SIGNAL else SIGKILL
        exit_code = value if ending == Ending.EXIT else 128 + by_signal
        return self._result(exit_code, "oom" if self._is_out_of_memory(exit_code) else reason)

    def _is_out_of_memory(self, exit_code: int) -> bool:
        """The kernel counts for the sandbox. What fails alone in it has failed with a process of its own; of
        several, those were killed that say so, also by their shell."""
        has_failed = exit_code != 0 if self.is_alone else exit_code == 128 + SIGKILL
        return has_failed and self._host.counters().oom_kills > self._before.oom_kills

    def _result(self, exit_code: int | None, reason: Reason) -> CommandResult:
        return CommandResult(
            exit_code=exit_code,
            reason=reason,
            stdout_bytes=self._outputs[0].value(),
            stderr_bytes=self._outputs[1].value(),
            truncated=any(each.truncated for each in self._outputs),
            dropped_bytes=sum(each.dropped_bytes for each in self._outputs),
            duration_ms=(self._clock.now_ns() - self._started_ns) / 1e6,
            denials=self._denials(),
        )

    def _denials(self) -> tuple[Denial, ...]:
        now, denials = self._host.counters(), list[Denial]()
        if (count := now.oom_kills - self._before.oom_kills) > 0:
            denials.append(Denial("memory", count, f"the memory limit killed {count} process(es)"))
        if (count := now.refused_forks - self._before.refused_forks) > 0:
            denials.append(Denial("pids", count, f"the pids limit refused {count} fork(s)"))
        denials += denials_since(self._before.refused, now.refused)
        if self._verdict == "output_limit":
            detail = f"printed more than the {self._call.output_total_bytes} bytes that are allowed"
            denials.append(Denial("output", 1, detail))
        return tuple(denials)

    def _resolve(self, result: CommandResult) -> None:
        self._settle(result, None)

    def _fail(self, error: SandboxError) -> None:
        self._settle(None, error)

    def _settle(self, result: CommandResult | None, error: BaseException | None) -> None:
        """After the last piece of output has been taken; what a watcher raised comes first."""
        self._host.finish()

        def settle(raised: BaseException | None) -> None:
            self._is_over = True
            if (failure := raised or self._fault or error) is not None:
                self.future.set_exception(failure)
            elif result is not None:
                self.future.set_result(result)

        if self._feed is not None:
            self._feed.finish(settle)
        else:
            settle(None)


def run_to_end(start: Callable[[], RunningCommand]) -> CommandResult:
    """Starts one and waits for it. An interrupt ends it first, with all its processes; a second goes on at
    once, and it ends all the same."""
    run = _Run(start)
    return undisturbed(run.to_end, stop=run.stop)


class _Run:
    """Of one command. `stop` is for any thread, and may come before the command is there."""

    def __init__(self, start: Callable[[], RunningCommand]) -> None:
        self._start = start
        self._lock = threading.Lock()  # guards what follows
        self._command: RunningCommand | None = None
        self._is_stopped = False

    def to_end(self) -> CommandResult:
        command = self._start()
        try:
            with self._lock:
                self._command, is_stopped = command, self._is_stopped
            if is_stopped:
                command.kill()
            return command.wait()
        except BaseException:  # an interrupt where the host has no other thread, or its own end
            command.end()
            raise

    def stop(self) -> None:
        with self._lock:
            self._is_stopped, command = True, self._command
        if command is not None:
            command.kill()
