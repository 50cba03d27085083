"""A fork by another thread while the process that starts sandboxes is being started."""

import os
import subprocess
from pathlib import Path

import pytest

from sandbox import nursery
from sandbox.nursery import Nursery
from sandbox.places import INIT_BINARY

KEPT, LEFT = 7, 0


def sockets() -> set[int]:
    return {int(each.name) for each in Path("/proc/self/fd").iterdir() if each.is_socket()}


def test_a_child_has_neither_end_of_its_socket(monkeypatch: pytest.MonkeyPatch):
    before, started, codes = sockets(), subprocess.Popen, []

    def fork_first(*words: object, **options: object) -> object:
        if (child := os.fork()) == 0:
            os._exit(KEPT if sockets() - before else LEFT)
        codes.append(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
        return started(*words, **options)  # pyright: ignore

    with monkeypatch.context() as patched:
        patched.setattr(nursery.subprocess, "Popen", fork_first)
        one = Nursery(INIT_BINARY)
    assert codes == [LEFT]
    one.close()
    one._process.wait()
