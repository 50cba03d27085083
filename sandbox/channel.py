"""The owner's end of the control socket: one thread a sandbox, which is its only reader and its clock.

Callers register a Listener under a fresh id and send a frame; the thread hands each reply to its listener and
wakes listeners at their deadlines. Listeners run on that thread, must not block, and raise nothing but
ValueError, on a frame that breaks the protocol: that ends the channel, as anything else does. Sending
never blocks: what the socket does not take is queued and goes out from the thread, so a sandbox that stops
reading can hold up neither its owner nor its own timeouts.
"""

import errno
import mmap
import os
import select
import socket
import struct
import threading
from collections import deque
from collections.abc import Callable
from contextlib import ExitStack
from typing import Protocol

from protocol.clock import Clock
from sandbox.wire import Frame, FrameReader, Kind, encode

_RECEIVE_BYTES = 1 << 18


class Listener(Protocol):
    """Whoever waits for replies. All methods run on the channel's thread."""

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


class Channel:
    """Thread-safe. Owns the socket; `close` ends the thread and tells every listener that it is lost."""

    def __init__(self, sock: socket.socket, clock: Clock, *, name: str) -> None:
        self._socket = sock
        self._clock = clock
        self._lock = threading.Lock()  # guards what follows, and writes to `_wake`
        self._listeners: dict[int, Listener] = {}
        self._outgoing: deque[memoryview] = deque()
        self._last_id = 0
        self._lost = False
        self._closing = False
        self._polls_until: int | None = 0  # when the thread wakes by itself; None = never
        self._wake = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._on_end: Callable[[], None] = lambda: None

    def start(self, supervisor: Listener, on_end: Callable[[], None]) -> None:
        """Starts the thread. `supervisor` is a listener for the sandbox as a whole and the first to learn of
        its end; `on_end` is the thread's last call, when all listeners know, and may block. OSError when the
        host has no thread left; the socket is then the caller's to close."""
        self._listeners[0] = supervisor
        self._on_end = on_end
        try:
            self._thread.start()
        except RuntimeError as error:
            os.close(self._wake)
            raise OSError(errno.EAGAIN, f"{error} for {self._thread.name}") from error

    def open(self, listener: Listener, kind: Kind, payload: bytes) -> int | None:
        """Registers `listener`, sends the first frame, returns the id; None when the sandbox is gone."""
        with self._lock:
            if self._lost:
                return None
            self._last_id += 1
            self._listeners[self._last_id] = listener
            self._send(encode(self._last_id, kind, payload))
            deadline = listener.deadline_ns()
            if deadline is not None and (self._polls_until is None or deadline < self._polls_until):
                self._kick()
            return self._last_id

    def send(self, id: int, kind: Kind, payload: bytes = b"") -> None:
        """Sends one more frame under an open id. Silently nothing when the sandbox is gone: the listener
        hears that from `on_lost`."""
        with self._lock:
            if not self._lost:
                self._send(encode(id, kind, payload))

    def wake(self) -> None:
        """Makes the thread ask for deadlines again."""
        with self._lock:
            self._kick()

    def close(self) -> None:
        """Ends the channel. Idempotent; waits for the thread unless called on it."""
        with self._lock:
            self._closing = True
            self._kick()
        if self._thread.ident is not None and self._thread is not threading.current_thread():
            self._thread.join()

    def _send(self, frame: bytes) -> None:
        view = memoryview(frame)
        if not self._outgoing:
            view = view[self._send_now(view) :]
        if view:
            self._outgoing.append(view)
            self._kick()

    def _send_now(self, view: memoryview) -> int:
        try:
            return self._socket.send(view, socket.MSG_DONTWAIT | socket.MSG_NOSIGNAL)
        except BlockingIOError:
            return 0
        except OSError:
            return len(view)  # gone: the thread reads the end of the stream and says so

    def _kick(self) -> None:
        if not self._lost:  # afterwards the descriptor is closed, or someone else's
            os.eventfd_write(self._wake, 1)

    def _run(self) -> None:
        try:
            self._serve()
        finally:
            self._end()

    def _serve(self) -> None:
        poll = select.poll()
        poll.register(self._wake, select.POLLIN)
        reader = FrameReader()
        buffer = mmap.mmap(-1, _RECEIVE_BYTES)  # which takes no memory until something is received
        while not self._closing and self._turn(poll, reader, buffer):
            pass

    def _end(self) -> None:
        with self._lock:
            self._lost = True
            listeners = list(self._listeners.values())
            self._listeners.clear()
            self._outgoing.clear()
        with ExitStack() as steps:  # last in, first out; each is taken even when the one before it fails
            steps.callback(self._on_end)
            steps.callback(os.close, self._wake)
            steps.callback(self._socket.close)
            for listener in reversed(listeners):
                steps.callback(listener.on_lost)

    def _turn(self, poll: select.poll, reader: FrameReader, buffer: mmap.mmap) -> bool:
        """One round: wait, send, receive, deadlines. False at the end of the stream."""
        poll.register(self._socket, select.POLLIN | (select.POLLOUT if self._outgoing else 0))
        for fd, _ in poll.poll(self._timeout_ms()):
            if fd == self._wake:
                os.eventfd_read(fd)
        self._flush()
        alive = self._receive(reader, buffer)
        self._fire_deadlines()
        return alive

    def _timeout_ms(self) -> int | None:
        with self._lock:
            listeners = list(self._listeners.values())
            deadlines = [deadline for each in listeners if (deadline := each.deadline_ns()) is not None]
            self._polls_until = min(deadlines, default=None)
        if self._polls_until is None:
            return None
        return max(0, -((self._clock.now_ns() - self._polls_until) // 1_000_000))

    def _flush(self) -> None:
        with self._lock:
            while self._outgoing:
                rest = self._outgoing[0][self._send_now(self._outgoing[0]) :]
                if rest:
                    self._outgoing[0] = rest
                    return
                self._outgoing.popleft()

    def _receive(self, reader: FrameReader, buffer: mmap.mmap) -> bool:
        try:
            length = self._socket.recv_into(buffer, flags=socket.MSG_DONTWAIT)
        except BlockingIOError:
            return True
        except OSError:
            return False
        try:
            for frame in reader.feed(memoryview(buffer)[:length]):
                self._dispatch(frame)
        except (ValueError, OverflowError, struct.error):
            return False  # a sandbox that breaks the protocol is no longer ours to talk to
        return length > 0

    def _dispatch(self, frame: Frame) -> None:
        with self._lock:
            listener = self._listeners.get(frame.id)
        if listener is not None and listener.on_frame(frame):
            with self._lock:
                self._listeners.pop(frame.id, None)

    def _fire_deadlines(self) -> None:
        now = self._clock.now_ns()
        with self._lock:
            listeners = list(self._listeners.values())
        for listener in listeners:
            deadline = listener.deadline_ns()
            if deadline is not None and deadline <= now:
                listener.on_deadline()
