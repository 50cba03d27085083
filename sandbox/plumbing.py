"""The descriptors of one command: what goes into the sandbox with it, and the owner's ends.

The owner makes the pipes and hands the program's ends over, so what a command prints reaches its owner with
nobody in between, and the kernel charges it to the sandbox until it is read. A terminal is made inside, on
the sandbox's own devpts, and its other end comes back by the report: a socket by which the minder says how
the command ended.
"""

import errno
import fcntl
import os
import socket
import stat
import termios
import threading
from collections import deque
from collections.abc import Callable
from contextlib import ExitStack, suppress
from functools import partial

from sandbox.channel import Channel
from sandbox.feeding import Input
from sandbox.forks import close_left
from sandbox.memory_files import memory_file
from sandbox.passed import hang_up, let_go, receive
from sandbox.wire import FRAME_BYTES, WITH_INPUT, WITH_TERMINAL, Frame, Kind, TerminalSize, decode

PIPE_BYTES = 1 << 18  # of output not read yet; fewer switches than with the kernel's 64 KiB
_SPARE: deque[bytearray] = deque(
    maxlen=4
)  # for reading, of PIPE_BYTES each: new memory costs more than a copy
_TERMINAL_DEVICE = os.makedev(5, 2)  # the owner's end of a terminal, whichever devpts it is of


class Plumbing:
    """Owner's side of one command. `take` gets each piece of output with 0, or 1 for error output, and the
    piece is gone when it returns; `ended` gets the last report, and `failed` what went wrong with one of the
    command's descriptors; all on the channel's thread. `resize` is for any thread, `drain` and `close` for
    the channel's, or for one that has not handed anything over yet."""

    def __init__(
        self,
        words: bytes,
        *,
        terminal: TerminalSize | None,
        input: Input,
        channel: Channel,
        take: Callable[[int, memoryview], None],
        ended: Callable[[Frame], None],
        failed: Callable[[Exception], None],
    ) -> None:
        """Makes the pipes and watches them. OSError when there is no descriptor left; none is held then."""
        self.flags = (WITH_INPUT if input.is_wanted else 0) | (WITH_TERMINAL if terminal is not None else 0)
        self._size, self._input, self._channel = terminal, input, channel
        self._take, self._ended, self._failed = take, ended, failed
        self._lock = threading.Lock()  # guards `_size`, and a terminal against its close
        self._outputs: list[int | None] = [None, None]
        self._report: socket.socket | None = None
        self._handed: list[int] = []
        with ExitStack() as on_failure:
            on_failure.callback(self.close)
            self._handed.append(memory_file(words))
            self._report, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
            self._handed.append(theirs.detach())
            if terminal is None:
                self._make_pipes()
            channel.watch(self._report.fileno(), partial(self._on_own, self._on_report))
            on_failure.pop_all()

    def hand_over(self) -> list[int]:
        """What goes to init, in the order of `struct exec` in dockyard.h; the caller's from now on."""
        handed, self._handed = self._handed, []
        return handed

    def resize(self, size: TerminalSize) -> None:
        """Nothing happens to a command without a terminal."""
        with self._lock:
            if self._size is not None:
                self._size = size
                self._show_size()

    def drain(self) -> None:
        """Takes what is in the pipes. Nobody who could write belongs to the command any more, and whoever has
        been handed an end of it by another way does not hold this up."""
        for number in range(2):
            left = self._most_bytes(number)
            while left > 0 and (length := self._read(number)):
                left -= length

    def leave(self) -> None:
        """In a child of a fork: lets go of descriptors, and of nothing that its parent waits at."""
        self._lock = threading.Lock()
        for fd in (*self._outputs, *self.hand_over()):
            close_left(fd)
        self._outputs = [None, None]
        if self._report is not None:
            self._report.close()

    def close(self) -> None:
        """Lets go of all, whoever takes the output too: what belongs to a command that has ended goes with
        it, and not when cycles are next looked for, which may be many mebibytes later. Idempotent."""
        for fd in self.hand_over():
            os.close(fd)
        self._input.end()
        for number in range(2):
            self._close_output(number)
        self._close_report()
        self._take, self._ended, self._failed = _take_nothing, _take_nothing, _take_nothing

    def _most_bytes(self, number: int) -> int:
        """Of a stream now. A program may make its pipe larger, by what the host has as a bound."""
        fd = self._outputs[number]
        try:
            return 0 if fd is None else fcntl.fcntl(fd, fcntl.F_GETPIPE_SZ)
        except OSError:
            return PIPE_BYTES  # a terminal, whose buffers are smaller

    def _make_pipes(self) -> None:
        for number in range(2):
            ours, theirs = self._pipe()
            self._handed.append(theirs)
            if number == 0:
                with suppress(OSError):  # beyond what this user may have
                    fcntl.fcntl(theirs, fcntl.F_SETPIPE_SZ, PIPE_BYTES)
            self._add_output(number, ours)
        if self._input.is_wanted:
            theirs, ours = self._pipe()
            self._handed.append(theirs)
            self._input.attach(ours)

    @staticmethod
    def _pipe() -> tuple[int, int]:
        """Both ends. It is the owner's, so programs could not open it by /dev/stdout if its mode did not let
        anyone; who has no descriptor of it cannot name it."""
        reading, writing = os.pipe2(os.O_CLOEXEC)
        os.fchmod(writing, 0o666)
        return reading, writing

    def _add_output(self, number: int, fd: int) -> None:
        self._outputs[number] = fd
        os.set_blocking(fd, False)
        self._channel.watch(fd, partial(self._on_own, partial(self._on_output, number)))

    def _on_own(self, step: Callable[[], None]) -> None:
        """A sandbox that breaks the protocol is no longer to be talked to (ValueError). All else that goes
        wrong here is this command's alone."""
        try:
            step()
        except (ValueError, OverflowError):
            raise
        except Exception as error:
            self._failed(error)

    def _on_output(self, number: int) -> None:
        if self._read(number) is None:
            self._close_output(number)

    def _read(self, number: int) -> int | None:
        """Takes one piece; its length, 0 when there is none now, None when there will be none."""
        fd = self._outputs[number]
        if fd is None:
            return None
        buffer = _spare_buffer()
        try:
            length = os.readv(fd, [buffer])
            if length > 0:
                self._take(number, memoryview(buffer)[:length])
            return length or None
        except BlockingIOError:
            return 0
        except OSError:  # a terminal that nobody has open any more
            return None
        finally:
            _SPARE.append(buffer)

    def _on_report(self) -> None:
        """ValueError when it is nothing that a minder says."""
        if self._report is None:
            return
        try:
            data, fds, _ = receive(self._report, FRAME_BYTES + 1, flags=socket.MSG_DONTWAIT)
        except BlockingIOError:
            return
        try:
            if not data:
                self._close_report()  # the minder is gone, and init says so
            elif (frame := decode(data, fds)).kind == Kind.TERMINAL:
                self._take_terminal(fds)
            elif frame.kind == Kind.EXIT:
                self._ended(frame)
        finally:
            let_go(fds)

    def _take_terminal(self, fds: list[int]) -> None:
        """Takes it out of the list. ValueError for anything else, and for one that nobody asked for; OSError
        when no descriptor is free."""
        if self._size is None or self._outputs[0] is not None:
            raise ValueError("a terminal that nobody asked for")
        if not fds:  # the kernel drops what there is no room for
            raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))
        info = os.fstat(fds[0])
        if not stat.S_ISCHR(info.st_mode) or info.st_rdev != _TERMINAL_DEVICE:
            raise ValueError("a terminal that is none")
        with self._lock:
            self._add_output(0, fds.pop())
            self._show_size()
        if self._input.is_wanted and self._outputs[0] is not None:
            self._input.attach(os.dup(self._outputs[0]))

    def _show_size(self) -> None:
        if self._size is not None and self._outputs[0] is not None:
            termios.tcsetwinsize(self._outputs[0], (self._size.rows, self._size.columns))

    def _close_output(self, number: int) -> None:
        with self._lock:
            fd, self._outputs[number] = self._outputs[number], None
        if fd is not None:
            self._channel.unwatch(fd)
            os.close(fd)

    def _close_report(self) -> None:
        report, self._report = self._report, None
        if report is not None:
            self._channel.unwatch(report.fileno())
            hang_up(report)


def _take_nothing(*_: object) -> None:
    """What comes after the end."""


def _spare_buffer() -> bytearray:
    try:
        return _SPARE.pop()
    except IndexError:
        return bytearray(PIPE_BYTES)
