"""The one process that an owner starts all of its sandboxes from (the other end: native/nursery.c)."""

import errno
import os
import socket
import struct
import subprocess
import threading
import time
from collections.abc import Sequence
from concurrent.futures import Future
from contextlib import suppress
from enum import IntEnum
from pathlib import Path

from protocol.threads import NoThread, TimelyThread, tell_error
from sandbox.errors import CapacityError, StartError, is_shortage
from sandbox.forks import close_in_children, free, leave_in_children
from sandbox.memory_files import memory_file
from sandbox.passed import receive

_HEAD = struct.Struct("=IIii")  # ticket, verb or answer, and two numbers: struct request, struct said
_NAME = "-" * 40  # room for a sandbox's id, which a launch has in its arguments
_PATIENCE_S = 20.0
_SEND_PATIENCE_S = 5.0  # where as much is under way already as the kernel holds
_AGAIN_S = 0.05  # until memory may be there again
_TIME = struct.Struct("ll")  # struct timeval
# For bubblewrap and the runtimes; a sandbox's commands never see it.
_ENV = {"PATH": "/usr/sbin:/usr/bin:/sbin:/bin"}


class _Verb(IntEnum):
    START = 1
    SETTLE = 2
    END = 3
    LEND = 4


class _Said(IntEnum):
    STARTED = 1
    SETTLED = 2
    ENDED = 3
    LENT = 4


class Launcher:
    """A launch, and what it has left: a sandbox's processes as the nursery sees them. For any one thread at a
    time."""

    def __init__(self, nursery: "Nursery", ticket: int, pid: int, ended: "Future[int]") -> None:
        self._nursery, self._ticket, self._ended = nursery, ticket, ended
        self.pid = pid  # of what launch has become

    def settle(self, number: int = 0, init_pid: int = 0) -> bool:
        """The sandbox runs. The signal `number` says so to the launcher; with `init_pid`, that process is
        what is left when it goes. True where the layer's content was handed in. OSError."""
        return self._nursery.ask(_Verb.SETTLE, self._ticket, _Said.SETTLED, numbers=(number, init_pid)) >= 0

    def open_layer(self) -> int:
        """A descriptor of the layer's content, the caller's. OSError, also where the nursery has ended: what
        has its pid by then is never asked."""
        fd = self._nursery.ask(_Verb.LEND, self._ticket, _Said.LENT)
        if fd < 0:
            raise OSError(-fd, os.strerror(-fd))
        return fd

    def wait(self, timeout_s: float) -> None:
        """Until nothing of it is left. TimeoutError. Where there is no nursery any more, nobody waits."""
        try:
            self._ended.result(timeout_s)
        except TimeoutError as error:
            raise TimeoutError(f"processes of a sandbox did not end within {timeout_s:g} s") from error
        except OSError:
            return

    def kill(self) -> None:
        """Ends what is left. Idempotent; `wait` says when."""
        self._nursery.tell(_Verb.END, self._ticket)


class Nursery:
    """Thread-safe. Ends with its owner's process, and the sandboxes that it has started."""

    def __init__(self, init: Path) -> None:
        """OSError where it cannot be started."""
        self._socket, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        close_in_children(self._socket)  # also while it is being made: see `forks`
        close_in_children(theirs)
        seconds, part = divmod(_SEND_PATIENCE_S, 1)
        patience = _TIME.pack(int(seconds), int(part * 1e6))
        self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, patience)
        theirs.setsockopt(socket.SOL_SOCKET, socket.SO_PASSCRED, 1)  # the kernel says there who asks
        with theirs:
            words = [str(init), "nursery", str(theirs.fileno()), _NAME]
            nothing = subprocess.DEVNULL
            self._process = subprocess.Popen(
                words, stdin=nothing, stdout=nothing, stderr=nothing, env=_ENV, cwd="/",
                pass_fds=(theirs.fileno(),),
            )  # fmt: skip
        self.pid = self._process.pid
        self._lock = threading.Lock()  # guards what follows
        self._last_ticket, self._is_gone = 0, False
        self._awaited: dict[tuple[int, _Said], Future[int]] = {}
        leave_in_children(self)  # or it would outlive its owner with all that it has started
        try:
            TimelyThread(self._listen, name="sandbox nursery").start()
        except NoThread as error:
            self._socket.close()  # upon which it ends
            self._process.wait()
            raise OSError(errno.EAGAIN, str(error)) from error

    def start(self, sandbox_id: str, words: Sequence[str], fds: Sequence[int], group: int | None) -> Launcher:
        """Launches. `fds` are what the launcher says, then what its words name by their number in `fds`;
        `group` is a cgroup of version 2 to be born in. OSError when the kernel or the nursery cannot."""
        with self._lock:
            self._last_ticket += 1
            ticket = self._last_ticket
        ended = self._await(ticket, _Said.ENDED)
        text = b"".join(word.encode("utf-8", "surrogateescape") + b"\0" for word in (sandbox_id, *words))
        try:
            file = memory_file(text)
            try:
                given = (*fds, file) if group is None else (*fds, file, group)
                numbers = (0 if group is None else len(fds) + 1, len(fds))
                pid = self.ask(_Verb.START, ticket, _Said.STARTED, numbers=numbers, fds=given)
            finally:
                os.close(file)
            if pid < 0:
                raise OSError(-pid, f"start a launcher: {os.strerror(-pid)}")
        except BaseException:
            self.tell(_Verb.END, ticket)
            self._forget(ticket)
            raise
        return Launcher(self, ticket, pid, ended)

    def ask(
        self,
        verb: _Verb,
        ticket: int,
        wanted: _Said,
        *,
        numbers: tuple[int, int] = (0, 0),
        fds: Sequence[int] = (),
    ) -> int:
        """What the nursery answers. OSError, also where it does not, as when somebody has stopped it."""
        answer = self._await(ticket, wanted)
        try:
            socket.send_fds(self._socket, [_HEAD.pack(ticket, verb, *numbers)], fds)
            return answer.result(_PATIENCE_S)
        except (TimeoutError, BlockingIOError) as error:
            words = f"the process that starts sandboxes (pid {self.pid}) does not answer"
            raise OSError(f"{words}; where it was stopped, `kill -CONT {self.pid}` has it go on") from error
        finally:
            with self._lock:  # what comes later is nobody's
                self._awaited.pop((ticket, wanted), None)

    def tell(self, verb: _Verb, ticket: int) -> None:
        """No answer is waited for; one that is gone needs no telling, one that is stopped heeds none."""
        with suppress(OSError):
            self._socket.send(_HEAD.pack(ticket, verb, 0, 0))

    def close(self) -> None:
        """It ends when its sandboxes have. Idempotent."""
        with suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)

    def close_unused(self) -> bool:
        """Closes where no sandbox of its is there any more, and says whether."""
        with self._lock:
            is_used = bool(self._awaited)
        if not is_used:
            self.close()
        return not is_used

    def leave(self) -> None:
        """In a child of a fork: it is the parent's."""
        self._lock = threading.Lock()
        self._is_gone = True
        self._socket.close()

    def is_gone(self) -> bool:
        """Whether somebody has ended it."""
        with self._lock:
            return self._is_gone

    def _await(self, ticket: int, said: _Said) -> "Future[int]":
        answer: Future[int] = Future()
        with self._lock:
            if self._is_gone:
                raise self._has_ended()
            self._awaited[ticket, said] = answer
        return answer

    def _has_ended(self) -> OSError:
        words = "has ended: somebody has killed it, or the kernel for want of memory"
        return OSError(f"the process that starts sandboxes (pid {self.pid}) {words}")

    def _forget(self, ticket: int) -> None:
        with self._lock:
            for said in _Said:
                self._awaited.pop((ticket, said), None)

    def _listen(self) -> None:
        """Whatever ends it, all who wait are told, and whoever wants one starts another."""
        try:
            while self._hear():
                pass
        except Exception:
            tell_error()
        with self._lock:
            self._is_gone = True
            left, self._awaited = self._awaited, {}
        for answer in left.values():
            with suppress(MemoryError):  # the others are to hear of it
                answer.set_exception(self._has_ended())
        self._socket.close()
        self._process.wait()

    def _hear(self) -> bool:
        """One answer, which for want of memory may be lost to whoever waits for it; False at the end."""
        try:
            if (received := self._receive()) is not None:
                self._hand_on(*received)
            return received is not None
        except MemoryError:
            time.sleep(_AGAIN_S)
        except OSError as error:
            if not is_shortage(error):
                raise
            time.sleep(_AGAIN_S)
        return True

    def _hand_on(self, head: tuple[int, int, int, int], fds: list[int]) -> None:
        ticket, said, value, _ = head
        try:
            with self._lock:
                answer = self._awaited.pop((ticket, _Said(said)), None)
            if said == _Said.LENT:  # a descriptor, for which there may be no room here
                value = (
                    fds.pop() if fds and answer is not None else -(errno.ENOENT if value else errno.EMFILE)
                )
            if answer is not None:
                answer.set_result(value)
        finally:
            for fd in fds:
                os.close(fd)

    def _receive(self) -> tuple[tuple[int, int, int, int], list[int]] | None:
        """What is said, and the descriptors that come with it; None at the end."""
        try:
            packet, fds, _ = receive(self._socket, _HEAD.size)
        except ConnectionError:
            return None
        return (_HEAD.unpack(packet), fds) if packet else None


_Version = tuple[int, int]  # inode and time of change of the program
_Who = tuple[tuple[int, ...], tuple[int, ...], tuple[int, ...]]  # ids of user and group, further groups
_shared: dict[tuple[_Version, _Who], Nursery] = {}
_lock = threading.Lock()  # guards it


def _leave() -> None:
    """In a child of a fork, which starts one of its own."""
    free(_lock)
    _shared.clear()


os.register_at_fork(after_in_child=_leave)


def shared_nursery(init: Path) -> Nursery:
    """The one of this process, started at the first use, and anew where it has been killed, its program is
    another, or this process has become another user. CapacityError, StartError."""
    with _lock:
        try:
            info = init.stat()
            who = os.getresuid(), os.getresgid(), tuple(sorted(os.getgroups()))
            key = (info.st_ino, info.st_mtime_ns), who
            if (known := _shared.get(key)) is None or known.is_gone():
                _let_go_of_lost()
                _shared[key] = known = Nursery(init)
        except OSError as error:
            words = f"the process that starts sandboxes: {error}"
            if is_shortage(error):
                raise CapacityError(words, hint="close or end something, and try again") from error
            hint = "`dockyard doctor` says what this host lacks"
            raise StartError(words, phase="launch", hint=hint) from error
        return known


def _let_go_of_lost() -> None:
    """Those of users that this process was and cannot become again: they start nothing for it (see `receive`
    in native/nursery.c)."""
    for key, nursery in list(_shared.items()):
        _, (ids, _, _) = key
        if ids[1] not in os.getresuid() and nursery.close_unused():
            del _shared[key]
