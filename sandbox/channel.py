"""The owner's end of the control socket: a poller's thread is its only reader and its clock.

Callers register a Listener under a fresh id and send a message; the thread hands each reply to its listener
and wakes listeners at their deadlines. It also watches other descriptors of theirs, such as a command's
pipes. Listeners run on that thread, which serves other sandboxes too: they must not block, and raise nothing
but ValueError, on a message that breaks the protocol: that ends the channel, as anything else does. Sending
never blocks: what the socket does not take is queued and goes out from the thread, so a sandbox that stops
reading can hold up neither its owner nor its own timeouts.
"""

import errno
import os
import select
import socket
import threading
from array import array
from collections import deque
from collections.abc import Callable, Iterable
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Protocol

from protocol.clock import Clock
from sandbox import poller
from sandbox.forks import leave_in_children
from sandbox.passed import hang_up, is_socket, let_go, receive
from sandbox.wire import FRAME_BYTES, Frame, Kind, decode, encode

_MAX_EVENTS = 64
# A socket whose other end is gone: the thread learns that by reading.
_GONE = frozenset({errno.EPIPE, errno.ECONNRESET, errno.ENOTCONN, errno.ECONNREFUSED})


class Listener(Protocol):
    """Whoever waits for replies. All methods run on the thread of the channel's poller, but for `on_lost`,
    which the channel's end calls."""

    def on_frame(self, frame: Frame) -> bool:
        """Takes one reply; True when no more will come, which frees the id."""
        ...

    def on_lost(self) -> None:
        """The sandbox is gone; nothing more will come."""
        ...

    def deadline_ns(self) -> int | None:
        """When to call `on_deadline` (clock time), None for never. Asked again after every event."""
        ...

    def on_deadline(self) -> None:
        """The deadline has passed; the next `deadline_ns` must be later."""
        ...


@dataclass(frozen=True, slots=True)
class _Outgoing:
    data: bytes
    fds: list[int]  # which are in it for as long as they are open


class Channel:
    """Thread-safe. Owns the socket; `close` ends it and tells every listener that it is lost."""

    def __init__(self, sock: socket.socket, clock: Clock, *, name: str) -> None:
        self._socket = sock
        self._clock = clock
        self._lock = threading.Lock()  # guards what follows
        self._listeners: dict[int, Listener] = {}
        self._watched: dict[int, Callable[[], None]] = {}
        self._outgoing: deque[_Outgoing] = deque()
        self._last_id = 0
        self._lost = False
        self._closing = False
        self._polls_until: int | None = 0  # when there is a turn whatever comes; None = never
        self._epoll = select.epoll()
        self._epoll.register(sock, select.EPOLLIN)
        self._name = name
        self._poller: poller.Poller | None = None
        self._ender: threading.Thread | None = None
        self._is_over = threading.Event()
        self._on_end: Callable[[], None] = lambda: None
        leave_in_children(self)

    @property
    def name(self) -> str:
        """Of the sandbox."""
        return self._name

    def start(self, supervisor: Listener, on_end: Callable[[], None]) -> None:
        """Has it served. `supervisor` is a listener for the sandbox as a whole and the first to learn of its
        end; `on_end` is the last call, when all listeners know, and may block. OSError when the host has no
        thread or descriptor left; the socket is then the caller's to close."""
        self._listeners[0] = supervisor
        self._on_end = on_end
        # Before it is served: turns begin at once, and what they ask for has to find its bell.
        self._poller = poller.least_busy()
        try:
            self._poller.serve(self)
        except BaseException:
            self._poller = None
            self._is_over.set()
            self._epoll.close()
            raise

    def new_id(self) -> int:
        """One that no listener has had."""
        with self._lock:
            self._last_id += 1
            return self._last_id

    def open(
        self,
        id: int,
        listener: Listener,
        kind: Kind,
        *,
        first: int = 0,
        second: int = 0,
        path: str = "",
        fds: Iterable[int] = (),
    ) -> bool:
        """Registers `listener` under `id` and sends the first message; False when the sandbox is gone. `fds`
        go along, and are closed however this ends. OSError when the host has no room for more of them."""
        handed = list(fds)
        with self._lock, ExitStack() as on_failure:
            on_failure.callback(_close_all, handed)
            if self._lost:
                return False
            self._listeners[id] = listener
            on_failure.callback(self._listeners.pop, id)
            self._send(_Outgoing(encode(id, kind, first, second, path), handed))
            on_failure.pop_all()
            deadline = listener.deadline_ns()
            if deadline is not None and (self._polls_until is None or deadline < self._polls_until):
                self._kick()
        return True

    def send(self, id: int, kind: Kind) -> None:
        """Sends one more message under an open id. Silently nothing when the sandbox is gone: the listener
        hears that from `on_lost`."""
        with self._lock:
            if not self._lost:
                self._send(_Outgoing(encode(id, kind), []))

    def forget(self, id: int) -> None:
        """Frees an id whose listener has heard elsewhere that it is over."""
        with self._lock:
            self._listeners.pop(id, None)

    def watch(self, fd: int, on_ready: Callable[[], None], *, writable: bool = False) -> None:
        """Calls `on_ready` whenever `fd` can be read, or written. It may be called once more than that. Does
        nothing when the sandbox is gone. OSError when the host has no room for it."""
        with self._lock:
            if not self._lost:
                self._epoll.register(fd, select.EPOLLOUT if writable else select.EPOLLIN)
                self._watched[fd] = on_ready  # of what has no room there, nobody is to let go

    def unwatch(self, fd: int) -> None:
        """To be called before `fd` is closed. Nothing happens when it is not watched."""
        with self._lock:
            if self._watched.pop(fd, None) is not None and not self._lost:
                self._epoll.unregister(fd)

    def wake(self) -> None:
        """Makes the thread ask for deadlines again."""
        with self._lock:
            self._kick()

    def hang_up(self) -> None:
        """Has it end, and does not wait for that."""
        with self._lock:
            self._closing = True
            self._kick()

    def close(self) -> None:
        """Ends the channel. Idempotent; waits until it is over, unless called on a thread that has to see to
        that."""
        self.hang_up()
        if self._poller is None or self._poller.is_this_thread():
            return
        if self._ender is not threading.current_thread():
            self._is_over.wait()

    def join(self, timeout_s: float | None = None) -> bool:
        """Whether it is over, and all that its end calls has been; waits for that."""
        return self._is_over.wait(timeout_s)

    def leave(self) -> None:
        """In a child of a fork: the sandbox is its parent's, and ends with that."""
        self._lock, self._lost, self._poller = threading.Lock(), True, None
        self._is_over = threading.Event()
        self._is_over.set()
        self._listeners.clear()
        self._watched.clear()
        self._epoll.close()
        self._socket.close()

    def _send(self, message: _Outgoing) -> None:
        if not self._outgoing and self._send_now(message):
            return
        self._outgoing.append(message)
        self._epoll.modify(self._socket, select.EPOLLIN | select.EPOLLOUT)

    def _send_now(self, message: _Outgoing) -> bool:
        """False when the socket is full. A message goes out whole or not at all."""
        try:
            flags = socket.MSG_DONTWAIT | socket.MSG_NOSIGNAL
            self._socket.sendmsg([message.data], _rights(message.fds), flags)
        except BlockingIOError:
            return False
        except OSError as error:
            if error.errno not in _GONE:
                raise
        _close_all(message.fds)
        return True

    def _kick(self) -> None:
        if self._poller is not None and not self._lost:  # afterwards it is closed
            self._poller.ring(self._epoll.fileno())

    def fileno(self) -> int:
        """For the poller, as what follows."""
        return self._epoll.fileno()

    def end(self) -> None:
        self._ender = threading.current_thread()
        with self._lock:
            self._lost = True
            listeners = list(self._listeners.values())
            self._listeners.clear()
            self._watched.clear()
            for message in self._outgoing:
                _close_all(message.fds)
            self._outgoing.clear()
        with ExitStack() as steps:  # last in, first out; each is taken even when the one before it fails
            steps.callback(self._is_over.set)
            steps.callback(self._on_end)
            steps.callback(self._epoll.close)
            steps.callback(hang_up, self._socket)
            for listener in reversed(listeners):
                steps.callback(listener.on_lost)

    def turn(self) -> bool:
        """Send, receive, deadlines. False at the end of the stream."""
        alive = not self._closing
        for fd, events in self._epoll.poll(0, _MAX_EVENTS) if alive else ():
            if fd == self._socket.fileno():
                alive = self._serve_socket(events) and alive
            elif (on_ready := self._watched.get(fd)) is not None:
                alive = _is_honest(on_ready) and alive
        self._fire_deadlines()
        return alive

    def wait_s(self) -> float | None:
        with self._lock:
            listeners = list(self._listeners.values())
            deadlines = [deadline for each in listeners if (deadline := each.deadline_ns()) is not None]
            self._polls_until = min(deadlines, default=None)
        if self._polls_until is None:
            return None
        return max(0, self._polls_until - self._clock.now_ns()) / 1e9

    def _serve_socket(self, events: int) -> bool:
        if events & select.EPOLLOUT and not self._flush():
            return False
        return self._receive()

    def _flush(self) -> bool:
        with self._lock:
            try:
                while self._outgoing and self._send_now(self._outgoing[0]):
                    self._outgoing.popleft()
            except OSError:
                return False  # no room for descriptors under way, for as long as the sandbox takes none
            if not self._outgoing:
                self._epoll.modify(self._socket, select.EPOLLIN)
        return True

    def _receive(self) -> bool:
        """What is there, up to a bound; False at the end, and where the protocol is broken: such a sandbox is
        no longer ours to talk to."""
        for _ in range(_MAX_EVENTS):
            try:
                data, fds, is_cut = receive(self._socket, FRAME_BYTES + 1, flags=socket.MSG_DONTWAIT)
            except BlockingIOError:
                return True
            except OSError:
                return False
            try:
                if not data or any(map(is_socket, fds)):  # which no honest init sends
                    return False
                self._dispatch(decode(data, fds, is_cut))
            except (ValueError, OverflowError):
                return False
            finally:
                let_go(fds)
        return True

    def _dispatch(self, frame: Frame) -> None:
        with self._lock:
            listener = self._listeners.get(frame.id)
        if listener is not None and listener.on_frame(frame):
            self.forget(frame.id)

    def _fire_deadlines(self) -> None:
        now = self._clock.now_ns()
        with self._lock:
            listeners = list(self._listeners.values())
        for listener in listeners:
            deadline = listener.deadline_ns()
            if deadline is not None and deadline <= now:
                listener.on_deadline()


def _rights(fds: list[int]) -> list[tuple[int, int, bytes]]:
    return [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array("i", fds).tobytes())] if fds else []


def _is_honest(step: Callable[[], None]) -> bool:
    try:
        step()
    except (ValueError, OverflowError):
        return False
    return True


def _close_all(fds: list[int]) -> None:
    """Our own, each once, whatever comes between: its number may be a stranger's next."""
    while fds:
        os.close(fds.pop())
