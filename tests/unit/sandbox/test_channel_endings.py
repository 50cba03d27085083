"""However a sandbox misbehaves on its socket, all who wait for it are told, and its owner is released."""

import socket
import struct
import threading
from dataclasses import dataclass, field
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from protocol.clock import SystemClock
from sandbox.cgroups import Counters
from sandbox.channel import Channel
from sandbox.commands import Commands
from sandbox.errors import SandboxError, SandboxGone
from sandbox.files import Files
from sandbox.policy import Policy
from sandbox.running import RunningCommand
from sandbox.wire import Frame, Kind, encode

PAYLOADS = st.one_of(
    st.binary(max_size=40),
    st.builds(struct.Struct("=I").pack, st.integers(0, 2**32 - 1)),
    st.builds(struct.Struct("=II").pack, st.integers(0, 6), st.integers(0, 2**32 - 1)),
)
FRAMES = st.builds(Frame, id=st.integers(0, 4), kind=st.sampled_from(list(Kind)), payload=PAYLOADS)


@dataclass
class Owner:
    """Host and supervisor in one: a sandbox of which only the channel is there."""

    lost: bool = False
    released: bool = False
    num_open: int = 0
    num_touched: int = 0
    replies: list[Frame] = field(default_factory=list[Frame])

    def counters(self) -> Counters:
        return Counters()

    def break_off(self) -> None: ...

    def gone(self) -> SandboxGone | None:
        return SandboxGone("it is gone", reason="lost") if self.lost else None

    def begin(self) -> None:
        self.num_open += 1

    def touch(self) -> None:
        self.num_touched += 1

    def paused_ns(self) -> int | None:
        return 0

    def finish(self) -> None:
        self.num_open -= 1

    def on_frame(self, frame: Frame) -> bool:
        self.replies.append(frame)
        return False

    def on_lost(self) -> None:
        self.lost = True

    def deadline_ns(self) -> int | None:
        return None

    def on_deadline(self) -> None: ...

    def release(self) -> None:
        self.released = True


@dataclass
class Harness:
    """A channel with its owner, the sandbox's end of the socket, and one command under way."""

    owner: Owner
    theirs: socket.socket
    channel: Channel
    command: RunningCommand

    def end(self) -> None:
        """What the sandbox's death does; returns when the channel's thread has ended."""
        self.theirs.close()
        self.channel._thread.join()


def count_fds() -> int:
    return len(list(Path("/proc/self/fd").iterdir()))


def connect() -> Harness:
    ours, theirs = socket.socketpair()
    owner, clock = Owner(), SystemClock()
    channel = Channel(ours, clock, name="sbx-test")
    channel.start(owner, owner.release)
    commands = Commands(channel, owner, clock, policy=Policy(), shell="/bin/sh", base_env={})
    return Harness(owner, theirs, channel, commands.start("true", stdin=None))


def ask(harness: Harness) -> tuple[threading.Thread, list[object]]:
    """Asks for a file's entry in another thread; the list gets the answer, or the error."""
    answers: list[object] = []

    def stat() -> None:
        try:
            answers.append(Files(harness.channel, harness.owner).stat("/a"))
        except SandboxError as error:
            answers.append(error)

    thread = threading.Thread(target=stat, daemon=True)  # or a caller left waiting would hold up the exit
    thread.start()
    return thread, answers


@settings(deadline=None)
@given(st.lists(FRAMES, max_size=8), st.binary(max_size=30))
def test_hostile_frames_leave_nobody_waiting(frames: list[Frame], rest: bytes):
    harness = connect()
    thread, answers = ask(harness)
    stream = b"".join(encode(frame.id, Kind(frame.kind), frame.payload) for frame in frames) + rest
    harness.theirs.sendall(stream)
    harness.end()
    thread.join(10)
    assert len(answers) == 1
    assert harness.command.future.done()
    assert harness.owner.lost
    assert harness.owner.released
    assert harness.owner.num_open == 0


@pytest.mark.parametrize(
    ("kind", "payload"),
    [
        (Kind.EXIT, b""),
        (Kind.EXIT, b"\0" * 9),
        (Kind.EXIT, struct.pack("=II", 99, 0)),
        (Kind.EXIT, struct.pack("=II", 2, 2**31)),
    ],
)
def test_an_exit_that_breaks_the_protocol_is_the_end(kind: Kind, payload: bytes):
    harness = connect()
    harness.theirs.sendall(encode(1, kind, payload))
    harness.channel._thread.join(10)  # the sandbox's end of the socket is still open
    assert harness.owner.released
    assert harness.command.wait(0).reason == "lost"
    harness.end()


@pytest.mark.parametrize(
    ("kind", "payload"),
    [(Kind.ENTRY, b"xx"), (Kind.DONE, b""), (Kind.DONE, b"\xff" * 4), (Kind.DONE, b"\xff" * 40)],
)
def test_a_reply_that_breaks_the_protocol_is_the_end(kind: Kind, payload: bytes):
    harness = connect()
    thread, answers = ask(harness)
    received = b""
    while b"/a\0" not in received:  # it is under way, as number 2
        received += harness.theirs.recv(4096)
    harness.theirs.sendall(encode(2, kind, payload))
    thread.join(10)
    assert [type(answer) for answer in answers] == [SandboxGone]
    harness.end()
    assert harness.owner.released


def test_a_stat_without_an_entry_names_what_is_wrong():
    harness = connect()
    thread, answers = ask(harness)
    received = b""
    while b"/a\0" not in received:
        received += harness.theirs.recv(4096)
    harness.theirs.sendall(encode(2, Kind.DONE, struct.pack("=I", 0)))
    thread.join(10)
    assert "0 entries" in str(answers[0])
    harness.end()


def test_a_listener_that_raises_keeps_nobody_from_learning(monkeypatch: pytest.MonkeyPatch):
    seen: list[type[BaseException]] = []
    monkeypatch.setattr(threading, "excepthook", lambda args: seen.append(args.exc_type))
    harness = connect()

    def fail() -> None:
        raise LookupError

    monkeypatch.setattr(harness.owner, "on_lost", fail)
    harness.end()
    assert harness.owner.released
    assert harness.command.wait(0).reason == "lost"
    assert seen == [LookupError]


def test_without_a_thread_the_channel_holds_no_descriptor(monkeypatch: pytest.MonkeyPatch):
    def refuse(thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    ours, theirs = socket.socketpair()
    before = count_fds()
    channel = Channel(ours, SystemClock(), name="sbx-test")
    monkeypatch.setattr(threading.Thread, "start", refuse)
    owner = Owner()
    with pytest.raises(BlockingIOError, match="thread"):
        channel.start(owner, owner.release)
    assert count_fds() == before
    ours.close()
    theirs.close()


def test_input_wakes_a_sandbox_that_has_not_asked_for_it_yet():
    """A paused one could not ask any more."""
    harness = connect()
    harness.command.send_stdin("x")
    harness.command.close_stdin()
    assert harness.owner.num_touched == 2
    harness.end()
