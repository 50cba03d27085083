"""Whoever calls himself a sandbox's owner may be any process of any user's, and say anything."""

import socket
import threading
import time
from collections.abc import Callable, Generator
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest
from forked_process import forked

from sandbox import door
from sandbox.attached import AttachedCommands, Line
from sandbox.directory import Directory
from sandbox.door_names import name_of
from sandbox.errors import UnsupportedError
from sandbox.journal import Journal, Record
from sandbox.processes import boot_id, find_process, this_process

ID = "sbx-00000000000000a"
ODD = {
    "deep": b'{"ok":' + b"[" * 200_000 + b"]" * 200_000 + b"}\n",
    "number": b"5\n",
    "error of a number": b'{"error": 5}\n',
    "number in place of a status": b'{"ok": 5}\n',
    "status of odd fields": b'{"ok": {"id": 5}}\n',
    "pieces of a command": b'{"piece": 1}\n{"ok": []}\n',
    "no text": b"\xff\n",
    "nothing": b"",
}
Look = Callable[[Directory, Path], object]
LOOKS: dict[str, Look] = {
    "info": lambda known, state: known.info(ID, state_dir=state),
    "kill": lambda known, state: known.kill(ID, state_dir=state),
    "attach": lambda known, state: known.attach(ID, state_dir=state),
}


@pytest.fixture(autouse=True)
def soon_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    """These live on, so nobody need wait for their end."""
    monkeypatch.setattr(door, "_END_PATIENCE_S", 0.01)


@contextmanager
def an_owner(answer: bytes, state_dir: Path, *, drips: bool = False) -> Generator[Line]:
    """Who answers everybody with that, or with spaces without end."""

    def serve() -> None:
        listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        listener.bind(name_of(this_process()))
        listener.listen()
        threading.Thread(target=answer_all, args=(listener,)).start()

    def answer_all(listener: socket.socket) -> None:
        while True:
            with listener.accept()[0] as caller, suppress(OSError):
                caller.recv(1 << 16)
                caller.sendall(answer)
                while drips:
                    caller.sendall(b" ")
                    time.sleep(0.01)

    with forked(serve) as pid:
        key = find_process(pid)
        assert key is not None
        Journal(state_dir).write(Record(ID, key, boot_id(), "function", cgroups=()))
        yield Line(ID, state_dir, key)


@pytest.mark.parametrize("look", LOOKS.values(), ids=LOOKS)
@pytest.mark.parametrize("answer", ODD.values(), ids=ODD)
def test_what_is_no_answer_is_none(tmp_path: Path, answer: bytes, look: Look):
    with an_owner(answer, tmp_path), pytest.raises(UnsupportedError, match="does not answer"):
        look(Directory(), tmp_path)


@pytest.mark.parametrize("answer", ODD.values(), ids=ODD)
def test_a_list_tells_what_it_can(tmp_path: Path, answer: bytes):
    with an_owner(answer, tmp_path):
        found = Directory().list(state_dir=tmp_path)
    assert {(each.id, each.state) for each in found} <= {(ID, "unknown")}


@pytest.mark.parametrize("piece", [b"5", b"[1]", b'[7, ""]', b"[0, 5]", b'["a", ""]', b'[0, "?"]'])
def test_a_piece_of_output_that_is_none_ends_the_call(tmp_path: Path, piece: bytes):
    with an_owner(b'{"piece": ' + piece + b"}\n", tmp_path) as line, pytest.raises(UnsupportedError):
        AttachedCommands(line).run("true", on_stdout=print)


@pytest.mark.parametrize("request_", ["list", "info"])
def test_signs_of_life_prolong_no_look(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, request_: str):
    """What another user's process sends held root's list for as long as it did."""
    with an_owner(b"", tmp_path, drips=True) as line, pytest.raises(UnsupportedError, match="timed out"):
        door.ask(line._owner, {"do": request_}, patience_s=0.2)
