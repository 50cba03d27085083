"""How a command ended."""

from dataclasses import dataclass
from typing import Literal

Reason = Literal["exit", "signal", "oom", "timeout", "killed", "output_limit", "lost"]


@dataclass(frozen=True, slots=True)
class Denial:
    """A limit that bit while the command ran: the `memory` limit killed `count` processes, the `pids` limit
    refused `count` forks, the `output` limit ended the command, the `network` policy refused `count` attempts
    at `address` (a name where it did not resolve) and `port` over `protocol` (tcp, udp, dns, icmp), the
    node's `guard` refused `count` calls to the kernel. Counted for the sandbox, so a command that ran beside
    others may show theirs."""

    limit: Literal["memory", "pids", "output", "network", "guard"]
    count: int
    detail: str
    address: str = ""
    port: int = 0
    protocol: str = ""


@dataclass(frozen=True, slots=True)
class CommandResult:
    """A finished command. Its processes are all gone.

    exit: it ended by itself. signal: a signal ended it. oom: the memory limit killed it, or one of its
    processes, upon which it failed: with 137 (SIGKILL, as a shell says it too), or anyhow where no other
    command ran beside it. timeout: its time was over. killed: its owner ended it. output_limit: it printed
    too much. lost: the sandbox went away under it.
    """

    exit_code: int | None  # as a shell says it: 128 + signal for a signalled one; None when lost
    reason: Reason
    stdout_bytes: bytes  # at most the output cap, then head, marker and tail
    stderr_bytes: bytes
    truncated: bool  # true when either stream was cut
    duration_ms: float
    denials: tuple[Denial, ...] = ()
    dropped_bytes: int = 0  # of both streams together, which the markers stand for

    @property
    def stdout(self) -> str:
        """The output as text; bytes that are no UTF-8 become U+FFFD (`stdout_bytes` has them as they
        were)."""
        return self.stdout_bytes.decode("utf-8", "replace")

    @property
    def stderr(self) -> str:
        """The error output as text, like `stdout`."""
        return self.stderr_bytes.decode("utf-8", "replace")

    @property
    def ok(self) -> bool:
        """True when the command ended by itself with exit code 0."""
        return self.reason == "exit" and self.exit_code == 0
