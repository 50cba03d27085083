"""Keeps the head and the tail of a stream in bounded memory."""

from collections import deque

_BLOCK_BYTES = 1 << 20
_SMALL_BYTES = 1 << 16
# Blocks that were given back, for the next command: to touch new memory costs more than to copy into it.
_SPARE: deque[bytearray] = deque(maxlen=2)


class OutputBuffer:
    """Takes any number of bytes, keeps at most `limit_bytes`: the first half and the last half.

    Not thread-safe: the sandbox's loop is its one writer. `value` ends it.
    """

    def __init__(self, limit_bytes: int) -> None:
        self._head_limit = (limit_bytes + 1) // 2
        self._tail_limit = limit_bytes - self._head_limit
        self._head = _Head()
        self._tail = bytearray()
        self._value: bytes | None = None
        self.total_bytes = 0

    def add(self, data: bytes | memoryview) -> None:
        """Appends a copy; costs time in the size of `data` only."""
        self.total_bytes += len(data)
        room = self._head_limit - self._head.num_bytes
        if room > 0:
            self._head.add(data[:room])
            data = data[room:]
        self._tail += data
        # Trimming at twice the limit moves each byte once on average instead of once a chunk.
        if len(self._tail) > 2 * self._tail_limit:
            self._trim()

    def _trim(self) -> None:
        del self._tail[: max(0, len(self._tail) - self._tail_limit)]

    @property
    def truncated(self) -> bool:
        """True when bytes were dropped."""
        return self.total_bytes > self._head_limit + self._tail_limit

    @property
    def dropped_bytes(self) -> int:
        """How many those are."""
        return max(0, self.total_bytes - self._head_limit - self._tail_limit)

    def value(self) -> bytes:
        """All of it, or head, a marker that says how many bytes are missing, and tail. Nothing is to be added
        afterwards."""
        if self._value is None:
            self._trim()
            marker = b"\n[... %d bytes dropped ...]\n" % self.dropped_bytes if self.truncated else b""
            with self._head.content() as head:
                self._value = b"".join((head, marker, self._tail))
            self._head.give_back()
            self._tail = bytearray()
        return self._value


class _Head:
    """Bytes that grow, up to a block's size in memory that is kept."""

    def __init__(self) -> None:
        self._block = bytearray()
        self.num_bytes = 0

    def add(self, data: bytes | memoryview) -> None:
        start, self.num_bytes = self.num_bytes, self.num_bytes + len(data)
        if self.num_bytes > len(self._block):
            self._grow()
        self._block[start : self.num_bytes] = data

    def content(self) -> memoryview:
        return memoryview(self._block)[: self.num_bytes]

    def give_back(self) -> None:
        block, self._block, self.num_bytes = self._block, bytearray(), 0
        if len(block) == _BLOCK_BYTES:
            _SPARE.append(block)

    def _grow(self) -> None:
        before = self._block
        if self.num_bytes <= _SMALL_BYTES:
            self._block = before + bytes(min(2 * self.num_bytes, _SMALL_BYTES) - len(before))
        elif self.num_bytes <= _BLOCK_BYTES:
            self._block = _spare_block()
            self._block[: len(before)] = before
        else:
            self._block = before + bytes(2 * self.num_bytes - len(before))


def _spare_block() -> bytearray:
    try:
        return _SPARE.pop()
    except IndexError:
        return bytearray(_BLOCK_BYTES)
