"""What a command leaves in its owner's process: nothing that waits for the garbage collector, since what that
counts is objects, and one command may hold mebibytes of output."""

import gc
import threading
import weakref
from collections.abc import Iterator, Mapping
from typing import Any

import pytest

from sandbox import Sandbox
from sandbox.wire import TerminalSize


@pytest.fixture(autouse=True)
def no_collector() -> Iterator[None]:
    gc.disable()
    yield
    gc.enable()


@pytest.mark.parametrize(
    "options",
    [{}, {"stdin": "x"}, {"on_stdout": len}, {"timeout_s": 0.2, "stdin": None}, {"terminal": TerminalSize()}],
    ids=["plain", "input", "watched", "late", "terminal"],
)
def test_a_command_goes_with_its_last_reference(box: Sandbox, options: Mapping[str, Any]):
    command = box.commands.start("head -c 3000000 /dev/zero; cat", **{"timeout_s": 1.0, **options})
    gone = threading.Event()
    weakref.finalize(command, gone.set)
    command.wait()
    del command
    assert gone.wait(10), "it is kept by what it keeps"
