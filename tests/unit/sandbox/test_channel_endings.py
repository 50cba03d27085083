"""However a sandbox misbehaves on its socket, all who wait for it are told, and its owner is released."""

import array
import fcntl
import os
import resource
import socket
import struct
import threading
import time
from collections.abc import Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from tempfile import TemporaryFile

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from lingering import lingering

from protocol.clock import SystemClock
from sandbox.cgroups import Counters
from sandbox.channel import Channel
from sandbox.commands import Commands
from sandbox.errors import FileMissing, SandboxError, SandboxGone
from sandbox.files import Files, _Reply
from sandbox.policy import Policy
from sandbox.poller import Poller, Served
from sandbox.running import RunningCommand
from sandbox.wire import FRAME_BYTES, Ending, Frame, Kind, TerminalSize, encode

NUMBERS = st.one_of(st.integers(0, 7), st.integers(0, 2**32 - 1))
KINDS = st.sampled_from([*Kind, 0, 2**31])
PACKETS = st.one_of(
    st.builds(struct.Struct("=IIII").pack, st.integers(0, 4), KINDS, NUMBERS, NUMBERS),
    st.binary(min_size=1, max_size=40),
)


@dataclass
class Owner:
    """Host and supervisor in one: a sandbox of which only the channel is there."""

    lost: bool = False
    released: bool = False
    num_open: int = 0
    num_touched: int = 0
    replies: list[Frame] = field(default_factory=list[Frame])

    def counters_before(self) -> Counters:
        return Counters()

    def counters(self) -> Counters:
        return Counters()

    def room(self, num_bytes: int) -> AbstractContextManager[bool]:
        return nullcontext(num_bytes >= 0)

    def break_off(self) -> None: ...

    def gone(self) -> SandboxGone | None:
        return SandboxGone("it is gone", reason="lost") if self.lost else None

    def begin(self) -> None:
        self.num_open += 1

    def touch(self) -> None:
        self.num_touched += 1

    def is_paused(self) -> bool:
        return False

    def paused_ns(self) -> int:
        return 0

    def finish(self) -> None:
        self.num_open -= 1

    def drop(self) -> None:
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
    """A channel with its owner, the sandbox's end of the socket, and one command under way: its report, and
    the program's ends of its output and error output."""

    owner: Owner
    theirs: socket.socket
    channel: Channel
    command: RunningCommand
    report: socket.socket
    output: int
    errors: int

    def end(self) -> None:
        """What the sandbox's death does; returns when the channel's thread has ended."""
        for fd in (self.output, self.errors):
            os.close(fd)
        self.report.close()
        self.theirs.close()
        self.channel.join()


def count_fds() -> int:
    return len(list(Path("/proc/self/fd").iterdir()))


def take(theirs: socket.socket) -> tuple[bytes, list[int]]:
    """The next message to init."""
    data, fds, _, _ = socket.recv_fds(theirs, 8192, 5)
    return data, list(fds)


@contextmanager
def connect(watchers: dict[str, object] | None = None) -> Iterator[Harness]:
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    owner, clock = Owner(), SystemClock()
    channel = Channel(ours, clock, name="sbx-test")
    channel.start(owner, owner.release)
    commands = Commands(channel, owner, clock, policy=Policy(), shell="/bin/sh", base_env={})
    command = commands.start("true", stdin=None, **(watchers or {}))  # pyright: ignore[reportArgumentType]
    data, (words, report, output, errors, input) = take(theirs)
    assert data == encode(1, Kind.EXEC, 1)
    os.close(words)
    os.close(input)
    harness = Harness(owner, theirs, channel, command, socket.socket(fileno=report), output, errors)
    try:
        yield harness
    finally:
        harness.end()


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


def send(sock: socket.socket, packet: bytes, fds: tuple[int, ...] = ()) -> None:
    rights = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", fds))] if fds else []
    try:
        sock.sendmsg([packet], rights)
    except (BrokenPipeError, ConnectionResetError):
        return  # the owner has had enough


@settings(deadline=None)
@given(st.lists(st.tuples(st.booleans(), PACKETS, st.integers(0, 2)), max_size=8))
def test_hostile_messages_leave_nobody_waiting_and_no_descriptor(packets: list[tuple[bool, bytes, int]]):
    before = count_fds()
    with connect() as harness:
        thread, answers = ask(harness)
        for to_report, packet, num_fds in packets:
            send(harness.report if to_report else harness.theirs, packet, (0,) * num_fds)
    thread.join(10)
    assert len(answers) == 1
    assert harness.command.future.done()
    assert harness.owner.lost
    assert harness.owner.released
    assert harness.owner.num_open == 0
    give_up_s = time.monotonic() + 10  # of what was unread, which a thread of its own closes
    while count_fds() > before and time.monotonic() < give_up_s:
        time.sleep(0.001)
    assert count_fds() == before


def test_a_descriptor_that_nobody_asked_for_is_closed():
    before = count_fds()
    with connect() as harness:
        files = Files(harness.channel, harness.owner)
        thread = threading.Thread(target=files.make_dir, args=("/a",), daemon=True)
        thread.start()
        take(harness.theirs)
        send(harness.theirs, struct.pack("=IIII", 2, Kind.DONE, 0, 0), (0,))
        thread.join(10)
    assert count_fds() == before


@pytest.mark.parametrize("to_report", [False, True], ids=["init", "minder"])
def test_a_socket_that_lingers_is_the_end_and_holds_up_nobody(to_report: bool):
    """Whoever closes it waits for ten minutes: the thread that serves other sandboxes too would."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        with connect() as harness:
            with lingering(listener) as slow:
                packet = struct.pack("=IIII", 2, Kind.DONE, 0, 0)
                for _ in range(3):
                    send(harness.report if to_report else harness.theirs, packet, (slow.fileno(),))
            if not to_report:  # a minder's is that command's alone
                assert harness.channel.join(30)
        assert harness.owner.lost
        assert harness.owner.released


@pytest.mark.parametrize(("ending", "value"), [(99, 0), (2, 2**31)])
@pytest.mark.parametrize("by_report", [True, False])
def test_an_exit_that_breaks_the_protocol_is_the_end(ending: int, value: int, by_report: bool):
    with connect() as harness:
        packet = struct.pack("=IIII", 1, Kind.EXIT, ending, value)
        send(harness.report if by_report else harness.theirs, packet)
        harness.channel.join(10)  # the sandbox's end of the socket is still open
        assert harness.owner.released
        assert harness.command.wait(0).reason == "lost"


@pytest.mark.parametrize("packet", [b"xx", struct.pack("=IIII", 2, Kind.DONE, 2**32 - 1, 0)])
def test_a_reply_that_breaks_the_protocol_is_the_end(packet: bytes):
    with connect() as harness:
        thread, answers = ask(harness)
        assert take(harness.theirs)[0].endswith(b"/a")  # it is under way, as number 2
        send(harness.theirs, packet)
        thread.join(10)
        assert [type(answer) for answer in answers] == [SandboxGone]
    assert harness.owner.released


def test_an_open_that_hands_nothing_over_names_what_is_wrong():
    with connect() as harness:
        thread, answers = ask(harness)
        take(harness.theirs)
        send(harness.theirs, encode(2, Kind.DONE))
        thread.join(10)
        assert "handed nothing over" in str(answers[0])


def test_a_file_that_comes_with_another_answer_is_closed():
    with connect() as harness:
        before = count_fds()
        send(harness.theirs, encode(0, Kind.DONE), (0,))
        send(harness.theirs, encode(77, Kind.DONE), (0,))
        thread, answers = ask(harness)
        take(harness.theirs)
        send(harness.theirs, encode(2, Kind.DONE, 2), (0,))
        thread.join(10)
        assert [type(answer) for answer in answers] == [FileMissing]
        assert count_fds() == before


@pytest.mark.parametrize("path", ["/dev/zero", "/proc/self/fd/0", "/etc/passwd"])
def test_a_terminal_that_is_none_is_the_end(path: str):
    with connect() as harness:
        command = Commands(
            harness.channel, harness.owner, SystemClock(), policy=Policy(), shell="/bin/sh", base_env={}
        ).start("true", terminal=TerminalSize())
        _, (words, report) = take(harness.theirs)
        with socket.socket(fileno=report) as theirs, Path(path).open("rb") as file:
            send(theirs, encode(0, Kind.TERMINAL), (file.fileno(),))
            harness.channel.join(10)
        assert command.wait(0).reason == "lost"
        os.close(words)


def test_what_was_printed_before_the_end_is_there():
    with connect() as harness:
        os.write(harness.output, b"x" * 100_000)
        os.write(harness.errors, b"y")
        send(harness.report, encode(0, Kind.EXIT, Ending.EXIT, 3))
        result = harness.command.wait(10)  # although others hold the pipes open
        assert (result.exit_code, len(result.stdout_bytes), result.stderr_bytes) == (3, 100_000, b"y")


def test_a_minder_that_is_gone_leaves_its_report_to_init():
    with connect() as harness:
        harness.report.close()
        os.write(harness.output, b"x")
        send(harness.theirs, encode(1, Kind.EXIT, Ending.MINDER_DIED))
        result = harness.command.wait(10)
        assert (result.reason, result.exit_code, result.stdout_bytes) == ("signal", 137, b"x")


def test_output_beyond_the_limit_counts_for_nothing():
    with connect() as harness:
        limit = Policy().output_total_bytes
        left = limit + 1
        while left > 0:
            left -= os.write(harness.output, b"x" * min(1 << 16, left))
        assert take(harness.theirs)[0][:FRAME_BYTES] == encode(1, Kind.KILL)
        send(harness.report, encode(0, Kind.EXIT, Ending.EXIT))
        result = harness.command.wait(10)
        assert result.reason == "output_limit"
        assert harness.command._outputs[0].total_bytes == limit


def test_a_listener_that_raises_keeps_nobody_from_learning(monkeypatch: pytest.MonkeyPatch):
    seen: list[type[BaseException]] = []
    monkeypatch.setattr(threading, "excepthook", lambda args: seen.append(args.exc_type))
    with connect() as harness:

        def fail() -> None:
            raise LookupError

        monkeypatch.setattr(harness.owner, "on_lost", fail)
    assert harness.owner.released
    assert harness.command.wait(0).reason == "lost"
    assert seen == [LookupError]


def test_without_a_thread_the_channel_holds_no_descriptor(monkeypatch: pytest.MonkeyPatch):
    def refuse(thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    before = count_fds()
    channel = Channel(ours, SystemClock(), name="sbx-test")
    monkeypatch.setattr(threading.Thread, "start", refuse)
    owner = Owner()
    with pytest.raises(BlockingIOError, match="thread"):
        channel.start(owner, owner.release)
    assert count_fds() == before
    channel.close()  # waits for nothing
    ours.close()
    theirs.close()


@dataclass
class Hasty(Owner):
    """Hangs up at its first turn."""

    channel: Channel | None = None
    hung_up: threading.Event = field(default_factory=threading.Event)

    def deadline_ns(self) -> int | None:
        return None if self.hung_up.is_set() else 0

    def on_deadline(self) -> None:
        assert self.channel is not None
        self.channel.hang_up()
        self.hung_up.set()


def test_one_that_hangs_up_at_its_first_turn_ends_however_late_its_start_returns(
    monkeypatch: pytest.MonkeyPatch,
):
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    owner, serve = Hasty(), Poller.serve

    def serve_late(self: Poller, served: Served) -> None:
        serve(self, served)
        assert owner.hung_up.wait(10)

    monkeypatch.setattr(Poller, "serve", serve_late)
    owner.channel = Channel(ours, SystemClock(), name="sbx-test")
    owner.channel.start(owner, owner.release)
    assert owner.channel.join(10)
    assert (owner.lost, owner.released) == (True, True)
    theirs.close()


def test_a_process_has_more_channels_than_nested_epolls_may_watch_one_file():
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if hard < 8_000:
        pytest.skip(f"at most {hard} descriptors here")
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    try:
        with ExitStack() as all_of_them:
            harnesses = [all_of_them.enter_context(connect()) for _ in range(520)]
            for harness in harnesses[::100]:
                send(harness.report, encode(0, Kind.EXIT, Ending.EXIT))
                assert harness.command.wait(10).ok
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def test_input_wakes_a_sandbox_that_is_paused():
    with connect() as harness:
        harness.command.send_stdin("x")
        harness.command.close_stdin()
        assert harness.owner.num_touched == 2


def test_a_descriptor_that_finds_no_room_among_those_watched_is_nobodys_to_let_go():
    """A file is none that can be watched: the kernel says so where it would say that it has no memory."""
    with connect() as harness, TemporaryFile() as file:
        with pytest.raises(PermissionError):
            harness.channel.watch(file.fileno(), lambda: None)
        harness.channel.unwatch(file.fileno())


def test_all_that_a_program_has_left_in_its_pipe_is_taken():
    """Whoever may can make one larger than the 1 MiB that hosts have as a bound for others."""
    taken: list[int] = []
    with connect() as harness:
        plumbing = harness.command._plumbing
        assert plumbing is not None
        fd = plumbing._outputs[0]
        assert fd is not None
        harness.channel.unwatch(fd)
        plumbing._take = lambda _, data: taken.append(len(data))
        try:
            fcntl.fcntl(fd, fcntl.F_SETPIPE_SZ, 4 << 20)
        except PermissionError:
            pytest.skip("a pipe of 4 MiB needs CAP_SYS_RESOURCE")
        writer = os.open(f"/proc/self/fd/{fd}", os.O_WRONLY)
        os.write(writer, bytes(3 << 20))
        plumbing.drain()
        os.close(writer)
    assert sum(taken) == 3 << 20


def test_an_answer_to_what_nobody_waits_for_any_more_harms_nothing():
    owner = Owner(num_open=1)
    reply = _Reply(owner)
    reply.on_lost()
    frame = Frame(1, Kind.DONE, 0, 0, [7])
    assert reply.on_frame(frame)
    assert frame.fds == [7]  # still its giver's to close
    reply.on_lost()
    assert owner.num_open == 0


def test_a_descriptor_is_closed_once_whatever_comes_between(monkeypatch: pytest.MonkeyPatch):
    """Its number may be a stranger's by the second time."""
    closed, close = list[int](), os.close
    with connect() as harness:

        def close_and_raise(fd: int) -> None:
            close(fd)
            closed.append(fd)
            if len(closed) == 1:
                raise KeyboardInterrupt

        given = [os.memfd_create("given") for _ in range(3)]
        with monkeypatch.context() as patches:
            patches.setattr(os, "close", close_and_raise)
            with pytest.raises(KeyboardInterrupt):
                harness.channel.open(harness.channel.new_id(), harness.owner, Kind.WRITE, fds=given)
        assert sorted(closed) == sorted(given)
