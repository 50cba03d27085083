"""How a program of the host's has ended is known, or that it is not."""

import os
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from sandbox.errors import UnsupportedError
from sandbox.programs import run_program


@pytest.fixture
def ignores_children() -> Iterator[None]:
    before = signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    yield
    signal.signal(signal.SIGCHLD, before)


def num_fds() -> int:
    return len(list(Path("/proc/self/fd").iterdir()))


def test_what_it_says_and_how_it_ends():
    before = num_fds()
    done = run_program(["sh", "-c", "cat; echo oh >&2; exit 3"], given="é" * 100_000)
    assert (done.returncode, done.stdout, done.stderr) == (3, "é" * 100_000, "oh\n")
    assert run_program(["cat"]).stdout == ""
    assert run_program(["printf", r"\377"]).stdout == "\ufffd"
    with pytest.raises(FileNotFoundError):
        run_program(["/nothing/there"])
    assert num_fds() == before


def test_descriptors_go_along():
    reader, writer = os.pipe()
    run_program(["sh", "-c", f"echo here >/proc/self/fd/{writer}"], fds=(writer,))
    assert os.read(reader, 10) == b"here\n"
    os.close(reader)
    os.close(writer)


def test_one_that_takes_too_long_is_killed():
    with pytest.raises(TimeoutError, match=r"sleep has not ended in 0\.05 s"):
        run_program(["sleep", "60"], patience_s=0.05)


@pytest.mark.parametrize("words", ["true", "exit 3", "sleep 0.1; exit 3"])
@pytest.mark.usefixtures("ignores_children")
def test_nobody_takes_it_for_a_success_whose_end_is_not_known(words: str):
    with pytest.raises(UnsupportedError, match="sh ended") as caught:
        run_program(["sh", "-c", words])
    assert "SIGCHLD" in caught.value.hint
