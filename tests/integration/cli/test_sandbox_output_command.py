"""`dockyard sandbox run | exec`: what the command prints is passed on as it comes, all of it, as it was."""

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from sandbox.places import default_home, default_state_dir, default_toolkit

SANDBOX = (sys.executable, "-m", "cli.main", "sandbox")
SIGNALS = [(signal.SIGINT, 130), (signal.SIGTERM, 143), (signal.SIGHUP, 129)]
OWNER = """
import sys
from sandbox import Sandbox
with Sandbox.create(state_dir=f"{sys.argv[1]}/sandbox", toolkit=sys.argv[2]) as box:
    print(box.id, flush=True)
    sys.stdin.readline()
    print(box.commands.run("true", timeout_s=60).ok, len(box.commands.list()), flush=True)
"""


@pytest.fixture(params=["run", "exec"])
def words(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[tuple[str, ...]]:
    """Of a sandbox of its own, or in one of another process, which it does not harm."""
    if request.param == "run":
        yield (*SANDBOX, "run")
        return
    with subprocess.Popen(
        [sys.executable, "-c", OWNER, str(tmp_path), str(default_toolkit(default_state_dir()))], text=True,
        stdin=subprocess.PIPE, stdout=subprocess.PIPE,
    ) as owner:  # fmt: skip
        assert owner.stdout is not None
        yield (*SANDBOX, "exec", owner.stdout.readline().strip())
        assert owner.communicate("\n", timeout=120)[0].startswith("True ")


@pytest.fixture(autouse=True)
def home(words: tuple[str, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DOCKYARD_HOME", str(tmp_path if "exec" in words else default_home()))


def started(words: tuple[str, ...], script: str, *options: str) -> "subprocess.Popen[bytes]":
    return subprocess.Popen(
        [*words, *options, "--", script], stdin=subprocess.PIPE, stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )  # fmt: skip


@pytest.mark.parametrize(("number", "code"), SIGNALS)
def test_what_came_before_an_end_is_there(words: tuple[str, ...], number: signal.Signals, code: int) -> None:
    with started(words, "printf 'first\\n'; exec sleep 100") as command:
        assert command.stdout is not None
        assert command.stdout.readline() == b"first\n"  # while it runs
        command.send_signal(number)
        rest, told = command.communicate(timeout=60)
    assert (command.returncode, rest) == (code, b"")
    assert told.endswith(b"\ninterrupted; everything it started has ended\n")


def test_all_of_it_comes_byte_by_byte_however_slow_the_reader(words: tuple[str, ...]) -> None:
    """More than is kept, and more than all pipes on the way hold; the last line is in the error output."""
    with started(words, "head -c 3000000 /dev/zero; printf 'a\\xff\\xe6'; echo end >&2; exit 5") as command:
        assert command.stderr is not None
        assert command.stdout is not None
        first = os.read(command.stdout.fileno(), 10)
        rest, told = command.communicate(timeout=60)
    assert first + rest == bytes(3_000_000) + b"a\xff\xe6"
    assert (command.returncode, told.endswith(b"end\n"), b"dropped" in told) == (5, True, False)


def test_whoever_reads_no_further_ends_it_without_a_word(words: tuple[str, ...]) -> None:
    with started(words, "yes; true") as command:
        assert command.stdout is not None
        assert command.stdout.readline() == b"y\n"
        command.stdout.close()
        assert command.stderr is not None
        told = command.stderr.read()
        assert command.wait(60) == 128 + signal.SIGPIPE
    assert not [line for line in told.splitlines() if b"sandboxes lack on this host" not in line]


def test_an_interrupt_ends_one_whose_reader_has_stopped(words: tuple[str, ...]) -> None:
    with started(words, "yes & echo going >&2; wait") as command:
        assert command.stderr is not None
        while b"going" not in (line := command.stderr.readline()):
            assert line
        command.send_signal(signal.SIGINT)
        assert command.wait(60) == 130
        assert b"interrupted" in command.stderr.read()


def test_json_says_how_much_is_not_in_it(words: tuple[str, ...]) -> None:
    script = "head -c 2000000 /dev/zero; head -c 1048577 /dev/zero >&2"
    with started(words, script, "--json") as command:
        out, told = command.communicate(timeout=60)
    record = json.loads(out)
    assert (record["truncated"], record["dropped_bytes"]) == (True, 2_000_000 - (1 << 20) + 1)
    assert f"{record['dropped_bytes']} bytes of output are not in the JSON".encode() in told
    with started(words, "echo all", "--json") as command:
        out, told = command.communicate(timeout=60)
    assert (json.loads(out)["dropped_bytes"], b"bytes of output" in told) == (0, False)


def test_a_program_that_is_not_there_is_said(words: tuple[str, ...]) -> None:
    done = subprocess.run([*words, "--", "/no/such", "word"], capture_output=True, timeout=60, check=False)
    assert (done.returncode, done.stdout) == (127, b"")
    assert done.stderr.endswith(b"dockyard: cannot run the program '/no/such': No such file or directory\n")


def test_one_whose_output_is_closed_writes_to_no_other_file(words: tuple[str, ...]) -> None:
    quoted = [*words, "--", "echo out; echo err >&2; exit 6"]
    done = subprocess.run(
        ["sh", "-c", '"$@" >&-', "sh", *quoted], capture_output=True, timeout=60, check=False
    )
    assert (done.returncode, done.stdout, done.stderr.splitlines()[-1]) == (6, b"", b"err")
