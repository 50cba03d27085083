"""A command whose output finds no room, or no stream at all, says so once, without a traceback."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

LIST = ("sandbox", "list")
WRONG = ("sandbox", "info", "no-id")
UNKNOWN = ("sandbox", "list", "--nope")
NO_ROOM = "dockyard: SystemFailed: standard output: No space left on device (is there room where it goes?)\n"


def run(words: tuple[str, ...], home: Path, *, stdout: str = "", stderr: str = "") -> tuple[int, str]:
    """How it ended, and what the stream has that is not led elsewhere; `-` closes one."""
    lead = " ".join(f"{at}>{'&' if to == '-' else ''}{to}" for at, to in ((1, stdout), (2, stderr)) if to)
    done = subprocess.run(
        ["sh", "-c", f'exec "$@" {lead}', "sh", sys.executable, "-m", "cli.main", *words],
        env={**os.environ, "DOCKYARD_HOME": str(home)}, capture_output=True, text=True, check=False,
    )  # fmt: skip
    return done.returncode, done.stderr if stdout else done.stdout


@pytest.mark.parametrize("words", [LIST, (*LIST, "--json")])
def test_a_result_without_room_is_one_line_of_error(words: tuple[str, ...], tmp_path: Path) -> None:
    assert run(words, tmp_path, stdout="/dev/full") == (1, NO_ROOM)


@pytest.mark.parametrize("words", [LIST, (*LIST, "--json")])
def test_a_result_for_nobody_is_none(words: tuple[str, ...], tmp_path: Path) -> None:
    assert run(words, tmp_path, stdout="-") == (0, "")


@pytest.mark.parametrize(("words", "says"), [(WRONG, "InvalidArgument"), (UNKNOWN, "No such option")])
@pytest.mark.parametrize("stdout", ["/dev/full", "-"])
def test_an_error_keeps_its_line_and_its_code(
    words: tuple[str, ...], says: str, stdout: str, tmp_path: Path
) -> None:
    code, said = run((*words, "--json"), tmp_path, stdout=stdout)
    assert (code, says in said, "Traceback" in said) == (2, True, False)


@pytest.mark.parametrize(("words", "kind"), [(WRONG, "InvalidArgument"), (UNKNOWN, "UsageError")])
def test_an_error_is_in_the_json_where_stderr_has_no_room(
    words: tuple[str, ...], kind: str, tmp_path: Path
) -> None:
    code, said = run((*words, "--json"), tmp_path, stderr="/dev/full")
    assert (code, json.loads(said)["error"]["type"]) == (2, kind)
