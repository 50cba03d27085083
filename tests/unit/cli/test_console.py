"""What the command prints of texts that others wrote: agents, tools, models."""

import io

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console

from cli import console


def told(text: str) -> str:
    """The line of progress that the text becomes."""
    stream = io.StringIO()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(console, "progress", Console(file=stream, highlight=False, soft_wrap=True, emoji=False))
        console.step(text)
    return stream.getvalue()


@pytest.mark.parametrize(
    "text", ["lead done: removed the stale path [/etc/hosts]", "wrote [bold]x", "a :smile: [link=x]"]
)
def test_progress_is_no_markup(text: str) -> None:
    assert told(text) == f"· {text}\n"


def test_progress_does_not_steer_the_terminal() -> None:
    assert told("a\x1b]0;x\x07b\nc") == "· a\ufffd]0;x\ufffdb c\n"


@given(st.text())
def test_any_text_is_one_line(text: str) -> None:
    assert told(text).count("\n") == 1


def test_progress_without_a_reader_fails_nobody(monkeypatch: pytest.MonkeyPatch) -> None:
    closed = io.StringIO()
    closed.close()
    monkeypatch.setattr(console, "progress", Console(file=closed))
    console.step("anyone?")
