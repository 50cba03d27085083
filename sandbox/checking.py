"""A command's result, or the error that `run(check=True)` raises for it."""

from sandbox.errors import CommandError, CommandTimeout, OutputLimit, SandboxGone
from sandbox.results import CommandResult

_HOW = {
    "oom": "was ended by the memory limit",
    "timeout": "did not end in its time",
    "killed": "was killed",
    "output_limit": "printed more than it may",
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


def _ended(result: CommandResult) -> str:
    if result.reason == "signal":
        return f"was ended by signal {(result.exit_code or 128) - 128}"
    return f"exited with {result.exit_code}"
