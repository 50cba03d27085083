"""What is fed to a command as its input."""

import os
import threading

from sandbox.channel import Channel
from sandbox.errors import InvalidArgument
from sandbox.forks import close_left

PIECE_BYTES = 1 << 16


class Input:
    """Thread-safe: pieces are written as they come, and what the program has not read yet is kept here and
    written by the channel's thread. Never blocks. OSError where the host has no room to wait for the program:
    the piece is kept, and goes on with the next call."""

    def __init__(self, data: bytes, *, stays_open: bool, channel: Channel) -> None:
        self.is_wanted = stays_open or data != b""
        self._channel = channel
        self._lock = threading.Lock()  # guards what follows
        self._rest = bytearray(data)
        self._stays_open = stays_open
        self._fd: int | None = None
        self._is_over = self._is_watched = False

    def attach(self, fd: int) -> None:
        """Where it goes; owned from now on."""
        os.set_blocking(fd, False)
        with self._lock:
            self._fd = fd
            self._pump()

    def add(self, data: bytes) -> None:
        """More of it. InvalidArgument when it was closed; nothing when nobody reads it any more."""
        with self._lock:
            if not self._stays_open:
                raise InvalidArgument(
                    "stdin of this command is closed", hint="start it with stdin=None to send input later"
                )
            if not self._is_over:
                self._rest += data
                self._pump()

    def close(self) -> None:
        """The end of it, once all has been read. Idempotent."""
        with self._lock:
            self._stays_open = False
            self._pump()

    def end(self) -> None:
        """Nobody reads it any more. Idempotent."""
        with self._lock:
            self._let_go()

    def leave(self) -> None:
        """In a child of a fork: what is fed is its parent's to feed."""
        self._lock, self._is_over, self._is_watched = threading.Lock(), True, False
        fd, self._fd = self._fd, None
        close_left(fd)

    def _on_ready(self) -> None:
        with self._lock:
            self._pump()

    def _pump(self) -> None:
        if self._fd is None:
            return
        try:
            while self._rest:
                del self._rest[: os.write(self._fd, self._rest[:PIECE_BYTES])]
        except BlockingIOError:
            if not self._is_watched:
                self._channel.watch(self._fd, self._on_ready, writable=True)
                self._is_watched = True  # only now: where that fails, the next call tries it again
            return
        except OSError:  # the program reads no more
            self._let_go()
            return
        self._unwatch()
        if not self._stays_open:
            self._let_go()

    def _unwatch(self) -> None:
        if self._is_watched and self._fd is not None:
            self._is_watched = False
            self._channel.unwatch(self._fd)

    def _let_go(self) -> None:
        self._unwatch()
        self._is_over = True
        self._rest.clear()
        fd, self._fd = self._fd, None
        if fd is not None:
            os.close(fd)
