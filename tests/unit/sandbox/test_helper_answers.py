"""What a helper says too late is nobody's answer, and nobody takes it for the helper's end."""

import json
import os
import socket
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from sandbox import helper
from sandbox.errors import StartError
from sandbox.helper import Helper

STATE = "u1x0123456789ab"


class Slow:
    """The other end of a connection, in the place of root's helper."""

    def __init__(self) -> None:
        self.connection, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        theirs.settimeout(0.1)
        opening = threading.Thread(target=lambda: self.answer(*self.hear()))
        opening.start()
        self.helper = Helper(theirs, STATE)
        opening.join()

    def hear(self) -> list[str | int]:
        return json.loads(self.connection.recv(512))

    def answer(self, verb: str, name: str, number: int, *fds: int, **said: str) -> None:
        packet = json.dumps({**said, "request": number}).encode()
        socket.send_fds(self.connection, [packet], list(fds))


@pytest.fixture
def slow() -> Iterator[Slow]:
    one = Slow()
    yield one
    one.connection.close()
    one.helper.close()


def num_fds() -> int:
    return len(list(Path("/proc/self/fd").iterdir()))


def test_a_late_answer_is_not_the_next_ones(slow: Slow):
    """With what it brings along."""
    with pytest.raises(StartError, match="timed out"):
        slow.helper.adopt("sbx-1", os.getpid())
    before = num_fds()
    with Path("/dev/null").open() as file:
        slow.answer(*slow.hear(), file.fileno())
    answering = threading.Thread(target=lambda: slow.answer(*slow.hear(), refused="failed", words="no"))
    answering.start()
    with pytest.raises(StartError, match="failed: no"):
        slow.helper.join("sbx-1", os.getpid())
    answering.join()
    assert num_fds() == before


def test_who_has_answered_late_has_not_ended(slow: Slow, monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    monkeypatch.setattr(helper.os, "geteuid", lambda: 1)
    monkeypatch.setattr(helper, "_connect", lambda place: None)
    monkeypatch.setitem(helper._shared, helper.cgroups.state_key(tmp_path), slow.helper)
    with pytest.raises(StartError, match="timed out"):
        slow.helper.adopt("sbx-1", os.getpid())
    slow.answer(*slow.hear())
    assert helper.shared_helper(tmp_path) is slow.helper
    slow.connection.close()
    assert helper.shared_helper(tmp_path) is None
