"""What the command prints: text for people, and for machines one JSON object on the last line of stdout."""

import json
import sys
from collections.abc import Callable, Generator
from contextlib import contextmanager, suppress
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.text import Text

from cluster.lifeline import PROGRESS
from protocol.errors import DockyardError
from protocol.visible_text import visible

JsonFlag = Annotated[bool, typer.Option("--json", help="Print one JSON object on the last line of stdout.")]
UrlOption = Annotated[
    str | None,
    typer.Option(
        "--url",
        help="An OpenAI-compatible endpoint, as http://127.0.0.1:8000. Default: the running deployment.",
    ),
]


STREAMS = ("standard output", "standard error")


@contextmanager
def writing_to(stream: str) -> Generator[None]:
    """One of STREAMS, which an error of the system's then has for the path that it lacks."""
    try:
        yield
    except BrokenPipeError:
        raise
    except OSError as error:
        error.filename = error.filename or stream
        raise


class _Output(Console):
    def print(self, *objects: Any, **options: Any) -> None:
        with writing_to(STREAMS[0]):
            super().print(*objects, **options)

    def on_broken_pipe(self) -> None:
        raise BrokenPipeError  # as of all else that is printed (`cli.root`)


# Progress never mixes with results. Without `emoji`, a `:name:` in a model's text stays what it is.
progress = Console(stderr=True, highlight=False, soft_wrap=True, emoji=False)
output = _Output(highlight=False, soft_wrap=True, emoji=False)


def step(text: str) -> None:
    """One line of progress, of any text. Never fails: what reports here must not die of a closed terminal."""
    with suppress(OSError, ValueError):
        progress.print(Text.assemble((PROGRESS.strip(), "dim"), " ", " ".join(visible(text).split())))


def print_json(value: Any) -> None:
    """The machine's answer: exactly one line. Nothing where nobody reads any more, as after `dockyard up`, or
    stdout was closed from the start. OSError where there is no room for it."""
    with suppress(BrokenPipeError):
        if sys.stdout is None:
            return
        with writing_to(STREAMS[0]):
            sys.stdout.write(json.dumps(value, default=str) + "\n")
            sys.stdout.flush()


def show(value: Any, as_json: bool, text: Callable[[], str]) -> None:
    """Print a result for whoever asked."""
    if as_json:
        print_json(value)
    else:
        output.print(visible(text()), markup=False)


def fail(error: DockyardError, as_json: bool) -> None:
    """One line that names the thing and the way out. Never fails: where stdout or stderr takes nothing, which
    may be the error itself, the other has it, and the exit code."""
    record = error.record()
    with suppress(OSError):
        progress.print(f"[red]dockyard:[/red] {record['type']}: ", end="")
        progress.print(visible(str(error)), markup=False)
    if as_json:
        with suppress(OSError):
            print_json({"error": record})


def print_json_error(kind: str, code: str, message: str, hint: str) -> None:
    """The machine's answer where there is no result. Never fails, as `fail`."""
    with suppress(OSError):
        print_json({"error": {"type": kind, "code": code, "message": message, "hint": hint}})
