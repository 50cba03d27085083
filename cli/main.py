"""The command's root: subcommands, and how errors become exit codes.

Exit codes: 0 done, 1 it failed, 2 bad input, 3 a tool or feature is missing, 4 not enough of a resource,
130 Ctrl-C, 143 SIGTERM.
"""

import signal
import sys

import typer

from cli import chat, demo, doctor, evals, models, sandboxes, serve, teams
from cli.console import fail, print_json_error, progress
from cluster.lifeline import Stopped
from protocol.errors import DockyardError

# Typer carries its own copy of click and does not export the root of its usage errors.
_UsageError: type[Exception] = next(c for c in typer.BadParameter.__mro__ if c.__name__ == "ClickException")

_INTERRUPTED = 128 + signal.SIGINT

app = typer.Typer(
    name="dockyard",
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
    except Stopped as stopped:
        return 128 + stopped.number
    except (KeyboardInterrupt, typer.Abort):
        result = _INTERRUPTED  # which is also what typer makes of Ctrl-C in most places
    if result == _INTERRUPTED:
        progress.print("interrupted; everything it started has ended")
    return result if isinstance(result, int) else 0


def _wants_json(arguments: list[str]) -> bool:
    """What follows `--` is a sandbox's command, with flags of its own."""
    ours = arguments[: arguments.index("--")] if "--" in arguments else arguments
    return "--json" in ours


def _message(error: Exception) -> str:
    """click's sentence without its frame."""
    return str(getattr(error, "message", "")) or str(error) or type(error).__name__


if __name__ == "__main__":
    main()
