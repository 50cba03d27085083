"""The tree of commands, made of the modules that one call needs, and an exit code for each way it can end."""

import os
import signal
import sys
from contextlib import suppress
from importlib import import_module, metadata
from pathlib import Path
from typing import Annotated, Any, TextIO

import typer
from typer.core import TyperGroup

from cli.console import STREAMS, fail, print_json_error, progress
from cli.ending import Ending
from cluster.lifeline import Stopped
from protocol.errors import DockyardError, InvalidInput
from protocol.home import default_home

# Typer carries its own copy of click and does not export the root of its usage errors.
_UsageError: type[Exception] = next(c for c in typer.BadParameter.__mro__ if c.__name__ == "ClickException")

_SERVERS = (["serve"], ["up"])
# In the order of `--help`: the module and the name in it, of a function or of a group's `app`.
_COMMANDS = {
    "demo": "cli.demo:demo",
    "serve": "cli.serve:serve",
    "up": "cli.serve:up",
    "down": "cli.serve:down",
    "status": "cli.serve:status",
    "doctor": "cli.doctor:app",
    "chat": "cli.chat:chat",
    "eval": "cli.evals:app",
    "model": "cli.models:app",
    "sandbox": "cli.sandboxes:app",
    "node": "cli.node:app",
    "team": "cli.teams:app",
}


class _Interrupted(BaseException):
    """Ctrl-C, which typer would turn into a command's result of 130."""


class _Commands(TyperGroup):
    def invoke(self, ctx: Any) -> Any:
        try:
            return super().invoke(ctx)
        except KeyboardInterrupt as error:
            raise _Interrupted from error
        except BrokenPipeError as error:  # typer would exit with 1; other tools die of the signal
            _print_no_more()
            raise Stopped(signal.SIGPIPE) from error


class SystemFailed(DockyardError):
    """The operating system refused what a command asked of it."""

    code = "system_failed"


def invoke(arguments: list[str], ending: Ending | None) -> int:
    """Run one command and return its exit code. `ending` is told when the command's modules are loaded."""
    as_json = _wants_json(arguments)
    try:
        app = _tree(arguments)
        if ending is not None:
            ending.in_order(is_server=arguments[:1] in _SERVERS)
        result = app(arguments, standalone_mode=False)
    except DockyardError as error:
        fail(error, as_json)
        return error.exit_code
    except _UsageError as error:
        with suppress(OSError):  # of a stderr that takes nothing; the exit code says as much
            error.show()  # pyright: ignore[reportAttributeAccessIssue, reportUnknownMemberType]
        if as_json:
            said = str(error.format_message())  # pyright: ignore[reportAttributeAccessIssue, reportUnknownMemberType, reportUnknownArgumentType]
            print_json_error("UsageError", "usage", said, "add --help to see what there is")
        return 2
    except OSError as error:
        refused = _refusal(error)
        fail(refused, as_json)
        return refused.exit_code
    except Stopped as stopped:
        return 128 + stopped.number
    except (_Interrupted, KeyboardInterrupt, typer.Abort):
        if ending is not None:
            ending.no_more()
        said = "interrupted; everything it started has ended"
        with suppress(OSError):  # the terminal has gone, if that was the signal
            progress.print(f"\n{said}")
        if as_json:
            print_json_error("Interrupted", "interrupted", said, "run it again")
        return ending.code if ending else 128 + signal.SIGINT
    finally:
        if ending is not None:
            ending.no_more()
        _drop_what_cannot_be_written()
    return result if isinstance(result, int) else 0


def _tree(arguments: list[str]) -> typer.Typer:
    """Every command, or only the one that the first argument names."""
    app = typer.Typer(
        name="dockyard",
        cls=_Commands,
        help="Where teams of coding agents work: serves the model, runs the sandboxes, keeps the clock.",
        no_args_is_help=True,
        pretty_exceptions_enable=False,
        rich_markup_mode="markdown",
        epilog="Example: `dockyard demo` runs everything once; `dockyard serve smollm2` serves a model.",
    )
    app.callback()(_root)
    named = arguments[0] if arguments else ""
    for name in [named] if named in _COMMANDS else _COMMANDS:
        module, _, attribute = _COMMANDS[name].partition(":")
        command = getattr(import_module(module), attribute)
        if isinstance(command, typer.Typer):
            app.add_typer(command, name=name)
        else:
            app.command(name)(command)
    return app


def _print_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"dockyard {metadata.version('dockyard')}")
        raise typer.Exit


def _root(
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version.")
    ] = False,
) -> None:
    """Where teams of coding agents work: serves the model, runs the sandboxes, keeps the clock."""


def _print_no_more() -> None:
    """Or the interpreter, which writes at its end what is left, would complain."""
    for stream in (sys.stdout, sys.stderr):
        _point_nowhere(stream)


def _drop_what_cannot_be_written() -> None:
    """For the same reason: of a full disk, which has been told."""
    for stream in (sys.stdout, sys.stderr):
        try:
            if stream is not None:
                stream.flush()
        except (OSError, ValueError):  # as of one that is closed
            _point_nowhere(stream)


def _point_nowhere(stream: TextIO | Any) -> None:
    nowhere = os.open(os.devnull, os.O_WRONLY)
    with suppress(OSError, AttributeError, ValueError):  # closed, from the start or by now
        os.dup2(nowhere, stream.fileno())
    os.close(nowhere)


def _wants_json(arguments: list[str]) -> bool:
    """What follows `--` is a sandbox's command, with flags of its own."""
    ours = arguments[: arguments.index("--")] if "--" in arguments else arguments
    return "--json" in ours


def _refusal(error: OSError) -> SystemFailed:
    """What the system said, and of which path where it was one."""
    said = error.strerror or str(error) or type(error).__name__
    if error.filename is None:
        return SystemFailed(f"{type(error).__name__}: {said}")
    hint = "is the path right, and may you use it?"
    if error.filename in STREAMS:
        hint = "is there room where it goes?"
    elif _is_state(error.filename):
        hint = f"state lies below {default_home()}, to be a folder of yours: DOCKYARD_HOME names another"
    return SystemFailed(f"{error.filename}: {said}", hint=hint)


def _is_state(path: object) -> bool:
    try:
        return isinstance(path, str) and Path(path).is_relative_to(default_home())
    except InvalidInput:  # no home, which is another matter
        return False
