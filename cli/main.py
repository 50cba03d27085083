"""The command's root: subcommands, and how errors become exit codes.

Exit codes: 0 done, 1 it failed, 2 bad input, 3 a tool or feature is missing, 4 not enough of a resource,
130 Ctrl-C, 143 SIGTERM.
"""

import signal
import sys
from typing import Any

import typer
from typer.core import TyperGroup

from cli import chat, demo, doctor, evals, models, sandboxes, serve, teams
from cli.console import fail, print_json_error, progress
from cluster.lifeline import Stopped
from protocol.errors import DockyardError

# Typer carries its own copy of click and does not export the root of its usage errors.
_UsageError: type[Exception] = next(c for c in typer.BadParameter.__mro__ if c.__name__ == "ClickException")


class _Interrupted(BaseException):
    """Ctrl-C, which typer would turn into a command's result of 130."""


class _Commands(TyperGroup):
    def invoke(self, ctx: Any) -> Any:
        try:
            return super().invoke(ctx)
        except KeyboardInterrupt as error:
            raise _Interrupted from error


class SystemFailed(DockyardError):
    """The operating system refused what a command asked of it."""


app = typer.Typer(
    name="dockyard",
    cls=_Commands,
    help="Where teams of coding agents work: serves the model, runs the sandboxes, keeps the clock.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode="markdown",
    epilog="Example: `dockyard demo` runs everything once; `dockyard serve smollm2` serves a model.",
)
app.command()(demo.demo)
app.command()(serve.serve)
app.command()(serve.up)
app.command()(serve.down)
app.command()(serve.status)
app.command()(doctor.doctor)
app.command()(chat.chat)
app.add_typer(evals.app, name="eval")
app.add_typer(models.app, name="model")
app.add_typer(sandboxes.app, name="sandbox")
app.add_typer(teams.app, name="team")


def main() -> None:
    """Entry point of the `dockyard` script."""
    sys.exit(run(sys.argv[1:]))


def run(arguments: list[str]) -> int:
    """Run one command and return its exit code."""
    try:
        result = app(arguments, standalone_mode=False)
    except DockyardError as error:
        fail(error, _wants_json(arguments))
        return error.exit_code
    except _UsageError as error:
        error.show()  # pyright: ignore[reportAttributeAccessIssue, reportUnknownMemberType]
        if _wants_json(arguments):
            print_json_error("UsageError", _message(error), "add --help to see what there is")
        return 2
    except OSError as error:
        refused = _refusal(error)
        fail(refused, _wants_json(arguments))
        return refused.exit_code
    except Stopped as stopped:
        return 128 + stopped.number
    except (_Interrupted, KeyboardInterrupt, typer.Abort):
        progress.print("interrupted; everything it started has ended")
        return 128 + signal.SIGINT
    return result if isinstance(result, int) else 0


def _wants_json(arguments: list[str]) -> bool:
    """What follows `--` is a sandbox's command, with flags of its own."""
    ours = arguments[: arguments.index("--")] if "--" in arguments else arguments
    return "--json" in ours


def _refusal(error: OSError) -> SystemFailed:
    """What the system said, and of which path where it was one."""
    said = error.strerror or str(error) or type(error).__name__
    if error.filename is None:
        return SystemFailed(f"{type(error).__name__}: {said}")
    return SystemFailed(f"{error.filename}: {said}", hint="is the path right, and may you use it?")


def _message(error: Exception) -> str:
    """click's sentence without its frame."""
    return str(getattr(error, "message", "")) or str(error) or type(error).__name__


if __name__ == "__main__":
    main()
