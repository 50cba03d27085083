"""A command's result, or the error that `run(check=True)` raises for it, or that of one that never ran."""

import errno
import os

from sandbox.errors import CommandError, CommandTimeout, OutputLimit, QuotaError, SandboxError, SandboxGone
from sandbox.results import CommandResult

_HOW = {
    "oom": "was ended by the memory limit",
    "timeout": "did not end in its time",
    "killed": "was killed",
    "output_limit": "printed more than it may",
}
_LIMITS = {
    errno.EBUSY: "commands",  # of init itself: one too many at a time
    errno.EAGAIN: "pids",
    errno.ENOMEM: "memory_mb",
    errno.ENOSPC: "terminals",
    errno.EMFILE: "open files",
    errno.ETOOMANYREFS: "descriptors under way",  # in sockets, by user
}


def checked(result: CommandResult, sandbox_id: str) -> CommandResult:
    """The result of a command that ended by itself with exit code 0.

    Raises CommandTimeout, OutputLimit, CommandError for any other end, SandboxGone for one that was lost. The
    message has nothing of what the command printed, which may be secret: `result` has it.
    """
    if result.ok:
        return result
    if result.reason == "lost":
        raise SandboxGone("the sandbox went away under a command", reason="lost", sandbox_id=sandbox_id)
    kind = {"timeout": CommandTimeout, "output_limit": OutputLimit}.get(result.reason, CommandError)
    raise kind(
        f"a command {_HOW.get(result.reason) or _ended(result)}",
        result=result,
        hint="the error's `result` has what it printed",
        sandbox_id=sandbox_id,
    )


def not_started(number: int, sandbox_id: str) -> SandboxError:
    """Why init could not start a process."""
    text = f"the sandbox could not start a process: {os.strerror(number)}"
    if (limit := _LIMITS.get(number)) is None:
        return SandboxError(text, sandbox_id=sandbox_id)
    hint = "end other commands, or raise pids or memory_mb"
    error = QuotaError(text, limit=limit, hint=hint, sandbox_id=sandbox_id)
    error.blame = "caller" if limit == "commands" else "agent"
    return error


def _ended(result: CommandResult) -> str:
    if result.reason == "signal":
        return f"was ended by signal {(result.exit_code or 128) - 128}"
    return f"exited with {result.exit_code}"
