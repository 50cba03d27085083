"""Keeps the head and the tail of a stream in bounded memory."""


class OutputBuffer:
    """Takes any number of bytes, keeps at most `limit_bytes`: the first half and the last half.

    Not thread-safe: the sandbox's loop is its one writer, and it is read after the command has ended.
    """

    def __init__(self, limit_bytes: int) -> None:
        self._head_limit = (limit_bytes + 1) // 2
        self._tail_limit = limit_bytes - self._head_limit
        self._head = bytearray()
        self._tail = bytearray()
        self.total_bytes = 0

    def add(self, data: bytes) -> None:
        """Appends; costs time in the size of `data` only."""
        self.total_bytes += len(data)
        room = self._head_limit - len(self._head)
        if room > 0:
            self._head += data[:room]
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

    def value(self) -> bytes:
        """All of it, or head, a marker that says how many bytes are missing, and tail."""
        self._trim()
        if not self.truncated:
            return bytes(self._head + self._tail)
        dropped = self.total_bytes - len(self._head) - len(self._tail)
        return bytes(self._head + b"\n[... %d bytes dropped ...]\n" % dropped + self._tail)
