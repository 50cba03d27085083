"""Servers that stand for the world, in a network of their own: greeters, echoes and a name server.

Runs until it is ended, with nothing but the standard library.
"""

import json
import selectors
import socket
import struct
from collections.abc import Callable
from functools import partial
from pathlib import Path

TCP_PORTS, UDP_PORT, NAME_PORT = (80, 81, 6379), 5000, 53
HEADER = struct.Struct(">HHHHHH")
ANSWERS, NO_SUCH_NAME = 0x8180, 0x8183
TYPE_A, POINTER_TO_NAME = 1, b"\xc0\x0c"


def serve(names: str, nameserver: str, asked: str) -> str:
    """`names` is a JSON object of names and their IPv4 address; each that is asked for is added to the file
    `asked`. Says `ready` when all servers are."""
    selector = selectors.DefaultSelector()
    for port in TCP_PORTS:
        server = socket.create_server(("", port), family=socket.AF_INET6, dualstack_ipv6=True)
        selector.register(server, selectors.EVENT_READ, greet)
    echo = socket.socket(socket.AF_INET6, socket.SOCK_DGRAM)
    echo.bind(("::", UDP_PORT))
    echo.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_RECVPKTINFO, 1)
    selector.register(echo, selectors.EVENT_READ, answer)
    named = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
    named.bind((nameserver, NAME_PORT))
    known: dict[str, str] = json.loads(names)
    selector.register(named, selectors.EVENT_READ, partial(answer_name, known=known, asked=Path(asked)))
    print("ready", flush=True)
    while True:
        for key, _ in selector.select():
            act: Callable[[socket.socket], None] = key.data
            assert isinstance(key.fileobj, socket.socket)
            act(key.fileobj)


def greet(server: socket.socket) -> None:
    """And hangs up."""
    connection, _ = server.accept()
    with connection:
        connection.sendall(b"hello")


def answer(one: socket.socket) -> None:
    """With what it was sent, from where it was sent to."""
    data, asked, _, asker = one.recvmsg(4096, 256)
    one.sendmsg([data], asked, 0, asker)


def answer_name(one: socket.socket, known: dict[str, str], asked: Path) -> None:
    """A records of what is known; what is no question comes back as it is."""
    message, asker = one.recvfrom(4096)
    if len(message) <= HEADER.size:
        one.sendto(message, asker)
        return
    name, end = read_name(message)
    (kind,) = struct.unpack_from(">H", message, end)
    with asked.open("a") as file:
        file.write(f"{name}\n")
    number, question = HEADER.unpack_from(message)[0], message[HEADER.size : end + 4]
    found = [known[name]] if name in known and kind == TYPE_A else []
    records = b"".join(
        POINTER_TO_NAME + struct.pack(">HHIH", TYPE_A, 1, 60, 4) + socket.inet_aton(each) for each in found
    )
    flags = ANSWERS if name in known else NO_SUCH_NAME
    one.sendto(HEADER.pack(number, flags, 1, len(found), 0, 0) + question + records, asker)


def read_name(message: bytes) -> tuple[str, int]:
    """Of the question, and where it ends."""
    labels: list[str] = []
    at = HEADER.size
    while length := message[at]:
        labels.append(message[at + 1 : at + 1 + length].decode("ascii", "replace").lower())
        at += 1 + length
    return ".".join(labels), at + 1
