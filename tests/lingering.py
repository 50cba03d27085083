"""A socket whose last owner waits for ten minutes as he closes it, unless its other end goes."""

import socket
import struct
from contextlib import suppress


def lingering(listener: socket.socket) -> socket.socket:
    """To one who does not read."""
    slow = socket.create_connection(listener.getsockname())
    slow.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("=ii", 1, 600))
    slow.setblocking(False)
    with suppress(BlockingIOError):
        while True:
            slow.send(bytes(1 << 20))
    return slow
