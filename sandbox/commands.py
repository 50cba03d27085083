"""Commands in a sandbox.

A command is its program and everything that the program starts, however it detaches: when the program ends,
or its time is over, or it is killed, all of it is gone before the result is there. What is to outlive one
call (a server) is started as a command of its own with `start`.
"""

import posixpath
import threading
from collections.abc import Mapping, Sequence
from functools import partial

from protocol.clock import Clock
from sandbox.arguments import check_seconds, check_type, check_whole
from sandbox.audit_log import SandboxLog, of_argv
from sandbox.channel import Channel
from sandbox.checking import checked
from sandbox.errors import InvalidArgument, PolicyDenied
from sandbox.feed import OnOutput, Watchers
from sandbox.files import WORKDIR
from sandbox.forks import leave_in_children
from sandbox.host import Host
from sandbox.orders import checked_env
from sandbox.policy import Policy
from sandbox.results import CommandResult
from sandbox.running import LONGEST_S, Call, RunningCommand, run_to_end
from sandbox.texts import system_bytes, utf8
from sandbox.undisturbed import undisturbed
from sandbox.wire import MAX_CHUNK_BYTES, TerminalSize, check_size, exec_words


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
        log: SandboxLog | None = None,
    ) -> None:
        self._channel = channel
        self._host = host
        self._clock = clock
        self._policy = policy
        self.shell = shell  # of the image
        self._base_env = dict(base_env)
        self._log = log  # None: nobody wants to know what was run
        self._lock = threading.Lock()  # guards what follows
        self._running: dict[int, RunningCommand] = {}
        self._together: dict[int, RunningCommand] = {}  # these, and those that start
        leave_in_children(self)

    @property
    def sandbox_id(self) -> str:
        """Whose commands they are."""
        return self._channel.name

    def run(
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
        """Runs a command to its end and returns how it ended; a failing command is a result, not an error,
        unless `check` makes it one (see `sandbox.checking`).

        A string goes to the image's shell, a sequence is run as it is. `timeout_s` (seconds, the policy's
        `timeout_s` when left out) ends all its processes with reason `timeout`. A relative `cwd` starts at
        /workspace. `env` is added to the
        sandbox's environment. `output_bytes` is kept of each stream, head and tail. `stdin` is fed as the
        command reads it. `on_stdout` and `on_stderr` take text as it is printed, on a thread of the
        command's; what one raises ends the command and is raised here. Blocks; raises SandboxGone, and
        InvalidArgument for a bad `cmd`, `cwd`, `env` or number, PolicyDenied for more time or output than the
        policy has, QuotaError where the sandbox has no room for one more, CapacityError where this process is
        out of descriptors.
        """
        start = partial(
            self.start, cmd, timeout_s=self.timeout_of_run(timeout_s), cwd=cwd, env=env,
            output_bytes=output_bytes, stdin=stdin, on_stdout=on_stdout, on_stderr=on_stderr,
        )  # fmt: skip
        result = run_to_end(start)
        return checked(result, self._channel.name) if check else result

    def start(
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
    ) -> RunningCommand:
        """Like `run`, without waiting. The command lives until it ends, it is killed, the sandbox ends, or
        `timeout_s` is over: when that is left out, the policy's `max_timeout_s`, if it has one.
        With `stdin=None` input may be sent while it runs. With `terminal` it has one: its output and error
        output are one stream, and it sees what is sent as typed.
        """
        if (gone := self._host.gone()) is not None:
            raise gone
        policy = self._policy
        timeout = policy.max_timeout_s if timeout_s is None else timeout_s
        limit = min(policy.output_bytes, policy.output_total_bytes) if output_bytes is None else output_bytes
        check_seconds("timeout_s", timeout_s, LONGEST_S)
        check_whole("output_bytes", limit, 0, 1 << 28)
        self._check_policy(timeout, limit, with_terminal=terminal is not None)
        if terminal is not None:
            check_size(terminal)
        text = None if stdin is None else utf8("stdin", stdin)
        check_type("cmd", cmd, str, Sequence)
        if isinstance(cmd, str):
            system_bytes("cmd", cmd)
        argv = [self.shell, "-c", cmd] if isinstance(cmd, str) else list(cmd)
        call = Call(
            words=self._words(argv, cwd, env or {}, with_terminal=terminal is not None),
            program=argv[0],
            about={} if self._log is None else of_argv(argv),
            terminal=terminal,
            stdin=text or b"",
            stdin_stays_open=text is None,
            watchers=Watchers(on_stdout, on_stderr),
            timeout_ns=None if timeout is None else int(timeout * 1e9),
            output_bytes=limit,
            output_total_bytes=policy.output_total_bytes,
        )
        return undisturbed(partial(self._begin, call), RunningCommand.end)

    def _begin(self, call: Call) -> RunningCommand:
        command = RunningCommand(call, self._channel, self._host, self._clock, self._log)
        self._meet(command)
        try:
            command.start()
        except BaseException:
            self._forget(command.id, None)
            raise
        with self._lock:
            self._running[command.id] = command
        command.future.add_done_callback(partial(self._forget, command.id))  # which the future keeps
        return command

    def timeout_of_run(self, timeout_s: float | None) -> float:
        """Of a command that is waited for: the policy's where the call does not say."""
        return self._policy.first_timeout_s if timeout_s is None else timeout_s

    def list(self) -> "tuple[RunningCommand, ...]":
        """Those that run, oldest first."""
        with self._lock:
            return tuple(self._running.values())

    def connect(self, id: int) -> RunningCommand:
        """One that runs, by its id. Raises InvalidArgument where none does."""
        with self._lock:
            if (command := self._running.get(id)) is not None:
                return command
            running = ", ".join(map(str, self._running)) or "none"
        raise InvalidArgument(f"id={id}: no such command runs", hint=f"running: {running}")

    def leave(self) -> None:
        """In a child of a fork: what runs is its parent's."""
        self._lock = threading.Lock()
        running, self._running, self._together = self._running, {}, {}
        for command in running.values():
            command.leave()

    def _check_policy(self, timeout_s: float | None, output_bytes: int, *, with_terminal: bool) -> None:
        """A call may ask for less than the policy has, and not for more."""
        policy = self._policy
        if policy.max_timeout_s is not None and timeout_s is not None and timeout_s > policy.max_timeout_s:
            self._refuse(f"timeout_s={timeout_s:g}", "max_timeout_s", f"at most {policy.max_timeout_s:g}")
        if output_bytes > policy.output_total_bytes:
            most = policy.output_total_bytes
            self._refuse(f"output_bytes={output_bytes}", "output_total_bytes", f"at most {most}")
        if with_terminal and "ptmx" not in policy.devices:
            self._refuse("terminal", "devices", "none without `ptmx`")

    def _refuse(self, what: str, field: str, has: str) -> None:
        raise PolicyDenied(
            f"{what} is more than the policy has in `{field}`: {has}",
            field=field, hint="create the sandbox with another policy", sandbox_id=self._channel.name,
        )  # fmt: skip

    def _meet(self, command: RunningCommand) -> None:
        """What the kernel counts of the sandbox may be any of theirs from now on."""
        with self._lock:
            command.is_alone = not self._together
            for other in self._together.values():
                other.is_alone = False
            self._together[command.id] = command

    def _forget(self, id: int, _: object) -> None:
        with self._lock:
            self._together.pop(id, None)
            self._running.pop(id, None)

    def _words(self, argv: Sequence[str], cwd: str, env: Mapping[str, str], *, with_terminal: bool) -> bytes:
        if not argv or not argv[0]:
            raise InvalidArgument("cmd names no program: it has no first word")
        check_type("cwd", cwd, str)
        terminal = {"TERM": "xterm-256color"} if with_terminal else {}
        whole_env = {**self._base_env, **terminal, **dict(checked_env(env))}
        words = exec_words(argv, posixpath.join(WORKDIR, cwd), whole_env)
        if len(words) > MAX_CHUNK_BYTES:
            raise InvalidArgument(
                f"cmd and env take {len(words)} bytes, at most {MAX_CHUNK_BYTES} fit",
                hint="write a file and run it, or use stdin",
            )
        return words
