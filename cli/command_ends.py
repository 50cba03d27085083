"""How long a command may take beside its sandbox's own time, and how it ended, told."""

from dataclasses import asdict

import typer

from cli.console import print_json
from sandbox import CommandResult, Policy
from sandbox.arguments import check_seconds
from sandbox.errors import SandboxGone
from sandbox.limits import MAX_LIFETIME_S, Asked

_SPARE_S = 600.0  # of the sandbox's lifetime: a pause counts in it, and what is kept is copied afterwards


def check_timeout(timeout_s: float | None) -> None:
    """InvalidArgument for more than any sandbox lives, before one is made."""
    check_seconds("--timeout", timeout_s, MAX_LIFETIME_S)


def lifetime_for(timeout_s: float | None, policy: Policy) -> float:
    """Seconds that a sandbox for one command lives at most: no less than by default."""
    longest_s = policy.first_timeout_s if timeout_s is None else timeout_s
    return max(Asked().lifetime_s, min(longest_s + _SPARE_S, MAX_LIFETIME_S))


def told(result: CommandResult, ended: SandboxGone | None, as_json: bool) -> int:
    """Prints how a command ended, and returns what to exit with. Its output is there already, but in JSON.
    `ended` is why its sandbox has, where it has."""
    if as_json:
        texts = {"stdout": result.stdout, "stderr": result.stderr}
        rest = {k: v for k, v in asdict(result).items() if k not in ("stdout_bytes", "stderr_bytes")}
        print_json({**rest, **texts, "sandbox_ended": ended.reason if ended else None})
        if result.dropped_bytes:
            typer.echo(
                f"dockyard: {result.dropped_bytes} bytes of output are not in the JSON, beyond the policy's "
                "`output_bytes` of each stream; without --json all of it is passed on",
                err=True,
            )
    else:
        if result.reason != "exit":
            after = f"ended by {result.reason} after {result.duration_ms:.0f} ms"
            typer.echo(f"dockyard: {after}{_why(result, ended)}", err=True)
        for denial in result.denials:
            typer.echo(f"dockyard: {denial.limit} limit: {denial.detail}", err=True)
    return result.exit_code if result.exit_code is not None else 1


def _why(result: CommandResult, ended: SandboxGone | None) -> str:
    if result.reason == "timeout":
        return " (--timeout gives it more)"
    if ended is None:
        return ""
    more = " (while it lives, `dockyard sandbox set-timeout ID SECONDS` gives it more)"
    return f": {ended.message}{more if ended.reason in ('expired', 'idle') else ''}"
