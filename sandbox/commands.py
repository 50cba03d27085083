"""Commands in a sandbox.

A command is its program and everything that the program starts, however it detaches: when the program ends,
or its time is over, or it is killed, all of it is gone before the result is there. What is to outlive one
call (a server) is started as a command of its own with `start`.
"""

import os
from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Protocol

from protocol.clock import Clock
from sandbox.cgroups import Counters
from sandbox.channel import Channel
from sandbox.errors import InvalidArgument, SandboxError, SandboxGone
from sandbox.output import OutputBuffer
from sandbox.policy import Policy
from sandbox.results import CommandResult, Denial, Reason
from sandbox.wire import MAX_CHUNK_BYTES, MAX_INPUT_BYTES, Ending, Frame, Kind, decode_exit, exec_payload

SIGKILL = 9
# How long init may take to end a command's processes before the sandbox as a whole is ended. A fork bomb
# takes milliseconds; only processes stuck in the kernel, or an init starved of CPU, take this long.
KILL_GRACE_NS = 10_000_000_000
_MINDER_DIED_TEXT = (
    b"dockyard: the process that watches over this command was killed or stopped, so the command was ended\n"
)


class Host(Protocol):
    """What a command needs of its sandbox. Thread-safe."""

    def counters(self) -> Counters:
        """How often limits have bitten so far."""
        ...

    def break_off(self) -> None:
        """Ends the sandbox, which did not end a command. Called on the channel's thread; does not block."""
        ...

    def gone(self) -> SandboxGone | None:
        """Why the sandbox has ended, None while it has not."""
        ...

    def begin(self) -> None:
        """A command or file operation starts."""
        ...

    def finish(self) -> None:
        """One that had started has ended."""
        ...


@dataclass(frozen=True, slots=True)
class _Call:
    payload: bytes
    stdin: bytes
    timeout_ns: int
    output_bytes: int
    output_total_bytes: int


class RunningCommand:
    """A command that has been started. `future` holds the CommandResult, or the error that kept it from
    starting; cancelling the future does not end the command, `kill` does. Thread-safe."""

    def __init__(self, call: _Call, channel: Channel, host: Host, clock: Clock) -> None:
        self.future: Future[CommandResult] = Future()
        self._call = call
        self._channel = channel
        self._host = host
        self._clock = clock
        self._stdout = OutputBuffer(call.output_bytes)
        self._stderr = OutputBuffer(call.output_bytes)
        self._input = memoryview(call.stdin)
        self._verdict: Reason | None = None  # why we ended it, where we did
        self._before = host.counters()
        self._started_ns = clock.now_ns()
        self._deadline_ns = self._started_ns + call.timeout_ns
        self._id: int | None = None

    def start(self) -> "RunningCommand":
        """Sends it off. Raises SandboxGone."""
        self._host.begin()
        self._id = self._channel.open(self, Kind.EXEC, self._call.payload)
        if self._id is None:
            self._host.finish()
            raise self._host.gone() or SandboxGone("the sandbox is gone", reason="lost")
        return self

    def wait(self, timeout_s: float | None = None) -> CommandResult:
        """Blocks until the command has ended. TimeoutError after `timeout_s` leaves it running."""
        return self.future.result(timeout_s)

    def kill(self) -> None:
        """Ends the command and all its processes; `wait` then gives reason `killed`. Does not block; nothing
        happens to a command that has ended."""
        self._end("killed")
        self._channel.wake()

    def on_frame(self, frame: Frame) -> bool:
        """Channel thread: output, a wish for input, or the end."""
        match frame.kind:
            case Kind.STDOUT:
                self._take_output(self._stdout, frame.payload)
            case Kind.STDERR:
                self._take_output(self._stderr, frame.payload)
            case Kind.STDIN_WANT:
                self._channel.send(frame.id, Kind.STDIN, bytes(self._input[:MAX_INPUT_BYTES]))
                self._input = self._input[MAX_INPUT_BYTES:]
            case Kind.EXIT:
                self._finish(*decode_exit(frame.payload))
                return True
            case _:
                pass
        return False

    def on_lost(self) -> None:
        """Channel thread: the sandbox is gone. A verdict that ended it (a timeout) still stands."""
        gone = self._host.gone()
        by_owner = gone is not None and gone.reason in ("killed", "expired", "idle")
        reason = self._verdict or ("killed" if by_owner else "lost")
        self._resolve(self._result(None if reason == "lost" else 128 + SIGKILL, reason))

    def deadline_ns(self) -> int | None:
        """The end of its time, then the end of init's grace."""
        return self._deadline_ns

    def on_deadline(self) -> None:
        """Channel thread: its time is over, or init did not manage to end it."""
        if self._verdict is None:
            self._end("timeout")
        else:
            self._deadline_ns = self._clock.now_ns() + KILL_GRACE_NS
            self._host.break_off()

    def _take_output(self, buffer: OutputBuffer, data: bytes) -> None:
        buffer.add(data)
        if self._stdout.total_bytes + self._stderr.total_bytes > self._call.output_total_bytes:
            self._end("output_limit")

    def _end(self, verdict: Reason) -> None:
        if self._verdict is not None or self._id is None or self.future.done():
            return
        self._verdict = verdict
        self._deadline_ns = self._clock.now_ns() + KILL_GRACE_NS
        self._channel.send(self._id, Kind.KILL)

    def _finish(self, ending: int, value: int) -> None:
        if ending == Ending.FAILED_CHDIR:
            self._fail(InvalidArgument(f"cwd: {os.strerror(value)}", hint="name a directory of the sandbox"))
        elif ending == Ending.FAILED_START:
            text = f"the sandbox could not start a process: {os.strerror(value)}"
            self._fail(SandboxError(text, hint="raise pids or memory_mb, or end other commands"))
        elif ending == Ending.FAILED_EXEC:
            # As a shell has it: 127 for a program that is not there, 126 for one that cannot be run.
            self._stderr.add(f"dockyard: cannot run the program: {os.strerror(value)}\n".encode())
            self._resolve(self._result(127 if value == 2 else 126, "exit"))
        else:
            if ending == Ending.MINDER_DIED and self._verdict is None:
                self._stderr.add(_MINDER_DIED_TEXT)
            self._resolve(self._judge(ending, value))

    def _judge(self, ending: int, value: int) -> CommandResult:
        if self._verdict is not None:
            return self._result(128 + SIGKILL, self._verdict)
        reason: Reason = "exit" if ending == Ending.EXIT else "signal"
        # MINDER_DIED: a command that killed or stopped its own minder, and went with it.
        by_signal = value if ending == Ending.SIGNAL else SIGKILL
        exit_code = value if ending == Ending.EXIT else 128 + by_signal
        # A shell reports its child's death by the OOM killer as its own failure, so any failure counts.
        if exit_code != 0 and self._host.counters().oom_kills > self._before.oom_kills:
            return self._result(exit_code, "oom")
        return self._result(exit_code, reason)

    def _result(self, exit_code: int | None, reason: Reason) -> CommandResult:
        return CommandResult(
            exit_code=exit_code,
            reason=reason,
            stdout_bytes=self._stdout.value(),
            stderr_bytes=self._stderr.value(),
            truncated=self._stdout.truncated or self._stderr.truncated,
            duration_ms=(self._clock.now_ns() - self._started_ns) / 1e6,
            denials=self._denials(),
        )

    def _denials(self) -> tuple[Denial, ...]:
        now, denials = self._host.counters(), list[Denial]()
        if (count := now.oom_kills - self._before.oom_kills) > 0:
            denials.append(Denial("memory", count, f"the memory limit killed {count} process(es)"))
        if (count := now.refused_forks - self._before.refused_forks) > 0:
            denials.append(Denial("pids", count, f"the pids limit refused {count} fork(s)"))
        if self._verdict == "output_limit":
            printed = self._stdout.total_bytes + self._stderr.total_bytes
            detail = f"printed {printed} bytes, {self._call.output_total_bytes} are allowed"
            denials.append(Denial("output", 1, detail))
        return tuple(denials)

    def _resolve(self, result: CommandResult) -> None:
        self._host.finish()
        if self.future.set_running_or_notify_cancel():
            self.future.set_result(result)

    def _fail(self, error: SandboxError) -> None:
        self._host.finish()
        if self.future.set_running_or_notify_cancel():
            self.future.set_exception(error)


class Commands:
    """`sandbox.commands`. Thread-safe; up to 64 commands run at a time."""

    def __init__(
        self,
        channel: Channel,
        host: Host,
        clock: Clock,
        *,
        policy: Policy,
        shell: str,
        base_env: Mapping[str, str],
    ) -> None:
        self._channel = channel
        self._host = host
        self._clock = clock
        self._policy = policy
        self._shell = shell
        self._base_env = dict(base_env)

    def run(
        self,
        cmd: str | Sequence[str],
        *,
        timeout_s: float | None = None,
        cwd: str = "/workspace",
        env: Mapping[str, str] | None = None,
        output_bytes: int | None = None,
        stdin: bytes | str = b"",
    ) -> CommandResult:
        """Runs a command to its end and returns how it ended; a failing command is a result, not an error.

        A string goes to the image's shell, a sequence is run as it is. `timeout_s` (seconds, the policy's
        when left out) ends all its processes with reason `timeout`. `env` is added to the sandbox's
        environment. `output_bytes` is kept of each stream, head and tail. `stdin` is fed as the command
        reads it. Blocks; raises SandboxGone, and InvalidArgument for a bad `cmd`, `cwd`, `env` or number.
        """
        return self.start(
            cmd, timeout_s=timeout_s, cwd=cwd, env=env, output_bytes=output_bytes, stdin=stdin
        ).wait()

    def start(
        self,
        cmd: str | Sequence[str],
        *,
        timeout_s: float | None = None,
        cwd: str = "/workspace",
        env: Mapping[str, str] | None = None,
        output_bytes: int | None = None,
        stdin: bytes | str = b"",
    ) -> RunningCommand:
        """Like `run`, without waiting. The command lives until it ends, `timeout_s` is over, it is killed, or
        the sandbox ends."""
        if (gone := self._host.gone()) is not None:
            raise gone
        timeout = self._policy.timeout_s if timeout_s is None else timeout_s
        limit = self._policy.output_bytes if output_bytes is None else output_bytes
        _check(0 < timeout < 1e9, "timeout_s", timeout)
        _check(0 <= limit <= 1 << 28, "output_bytes", limit)
        text = stdin.encode() if isinstance(stdin, str) else stdin
        call = _Call(
            payload=self._payload(cmd, cwd, env or {}, with_input=bool(text)),
            stdin=text,
            timeout_ns=int(timeout * 1e9),
            output_bytes=limit,
            output_total_bytes=max(self._policy.output_total_bytes, limit),
        )
        return RunningCommand(call, self._channel, self._host, self._clock).start()

    def _payload(
        self, cmd: str | Sequence[str], cwd: str, env: Mapping[str, str], *, with_input: bool
    ) -> bytes:
        argv = [self._shell, "-c", cmd] if isinstance(cmd, str) else list(cmd)
        _check(len(argv) > 0 and argv[0] != "", "cmd", cmd)
        for name in env:
            _check(name != "" and "=" not in name, "env", name)
        strings = [*argv, cwd, *env, *env.values()]
        _check(not any("\0" in string for string in strings), "cmd, cwd or env", "text with a NUL")
        payload = exec_payload(argv, cwd or "/", {**self._base_env, **env}, with_input=with_input)
        if len(payload) > MAX_CHUNK_BYTES:
            raise InvalidArgument(
                f"cmd and env take {len(payload)} bytes, at most {MAX_CHUNK_BYTES} fit",
                hint="write a file and run it, or use stdin",
            )
        return payload


def _check(holds: bool, field: str, value: object) -> None:
    if not holds:
        raise InvalidArgument(f"{field}={value!r} is not usable")
