"""Values of a wrong type or beyond all bounds are the caller's, by name: no thread comes upon them later, and
the sandbox lives."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from sandbox import Sandbox, Snapshots
from sandbox.errors import InvalidArgument
from sandbox.wire import TerminalSize

Ask = Callable[[Sandbox], Any]
CREATES: dict[str, dict[str, Any]] = {
    "policy": {"policy": "offline"},
    "cpu": {"cpu": "1"},
    "memory_mb": {"memory_mb": "256"},
    "pids": {"pids": True},
    "disk_mb": {"disk_mb": b"1"},
    "lifetime_s": {"lifetime_s": None},
    "idle_s": {"idle_s": "60"},
    "labels": {"labels": ["team"]},
    "env": {"env": "A=1"},
    "key": {"key": 5},
    "image": {"image": 1},
    "substrate": {"substrate": None},
    "runtime": {"runtime": 1},
    "snapshot": {"snapshot": 1},
    "toolkit": {"toolkit": 1},
    "state_dir": {"state_dir": 1},
}
ASKED: dict[str, Ask] = {
    "timeout_s": lambda box: box.commands.run("true", timeout_s="5"),  # pyright: ignore
    "timeout_s=nan": lambda box: box.commands.run("true", timeout_s=float("nan")),
    "timeout_s=-1": lambda box: box.commands.start("true", timeout_s=-1),
    "output_bytes": lambda box: box.commands.run("true", output_bytes=1.5),  # pyright: ignore
    "cmd": lambda box: box.commands.run(5),  # pyright: ignore
    "cmd: word 1": lambda box: box.commands.run(["echo", 5]),  # pyright: ignore
    "env": lambda box: box.commands.run("true", env=["A"]),  # pyright: ignore
    "stdin": lambda box: box.commands.run("true", stdin=5),  # pyright: ignore
    "terminal": lambda box: box.commands.start("true", terminal="80x24"),  # pyright: ignore
    "terminal: rows": lambda box: box.commands.start("true", terminal=TerminalSize(rows=-1)),
    "terminal: columns": lambda box: box.commands.start("true", terminal=TerminalSize(columns=1 << 16)),
    "cwd": lambda box: box.commands.run("true", cwd=5),  # pyright: ignore
    "cwd of a session": lambda box: box.sessions.create(cwd=5),  # pyright: ignore
    "env of a session": lambda box: box.sessions.create(env=5),  # pyright: ignore
    "name": lambda box: box.snapshot(5),  # pyright: ignore
    "network": lambda box: box.set_network("open", 1),  # pyright: ignore
    "network of a type": lambda box: box.set_network(5, 1),  # pyright: ignore
    "expected_version": lambda box: box.set_network("none", "1"),  # pyright: ignore
    "id": lambda box: Sandbox.connect(5),  # pyright: ignore
    "labels": lambda box: Sandbox.list(labels=5),  # pyright: ignore
    "name of one": lambda box: Snapshots().get(5),  # pyright: ignore
    "name of another": lambda box: Snapshots().delete(5),  # pyright: ignore
    "path": lambda box: box.files.read(5),  # pyright: ignore
    "max_bytes": lambda box: box.files.read("/etc/passwd", max_bytes=1.5),  # pyright: ignore
    "data": lambda box: box.files.write("a", 5),  # pyright: ignore
    "mode": lambda box: box.files.write("a", "b", mode="rw"),  # pyright: ignore
    "host_dir": lambda box: box.files.upload_dir(5, "a"),  # pyright: ignore
    "n": lambda box: box.fork_fs(1.5),  # pyright: ignore
    "max_mb": lambda box: box.snapshot(max_mb="1"),  # pyright: ignore
}


@pytest.mark.parametrize("field", CREATES)
def test_a_create_names_what_is_of_no_use(state_dir: Path, toolkit: Path, field: str):
    with pytest.raises(InvalidArgument, match=field):
        Sandbox.create(**{"state_dir": state_dir, "toolkit": toolkit, **CREATES[field]})


def test_a_call_names_what_is_of_no_use(create):
    box = create()
    for field, ask in ASKED.items():
        with pytest.raises(InvalidArgument, match=field.split(" of ")[0]):
            ask(box)
    assert box.commands.run("echo alive").stdout == "alive\n"


@pytest.mark.parametrize(
    "size",
    [TerminalSize(rows=1 << 20), TerminalSize(columns=-1), TerminalSize(rows="x"), "x", None],  # pyright: ignore
)
def test_a_size_that_no_terminal_has_is_refused_while_it_runs(create, size: Any):
    box = create()
    command = box.commands.start("cat; stty size", terminal=TerminalSize(), stdin=None)
    with pytest.raises(InvalidArgument, match="terminal"):
        command.resize(size)
    for patience in ("1", float("nan"), -1):
        with pytest.raises(InvalidArgument, match="timeout_s"):
            command.wait(patience)
    command.send_stdin("\x04")
    assert command.wait().stdout.endswith("24 80\r\n")


def test_a_word_that_the_kernel_does_not_take_is_refused_before(create):
    """MAX_ARG_STRLEN: 32 pages with the end of the word."""
    box = create()
    with pytest.raises(InvalidArgument, match="cmd or env"):
        box.commands.run("echo alive #" + "x" * (1 << 17))
    with pytest.raises(InvalidArgument, match="cmd or env"):
        box.commands.run("true", env={"A": "x" * (1 << 17)})
    text = "echo alive #"
    assert box.commands.run(text + "x" * ((1 << 17) - 1 - len(text))).stdout == "alive\n"
