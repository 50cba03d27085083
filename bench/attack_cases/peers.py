"""Servers of ours on the host, which no sandbox may reach. Loopback and the host's own addresses alone."""

import os
import socket
import threading
from collections.abc import Callable, Generator
from contextlib import AbstractContextManager, contextmanager, suppress

from bench.attack_cases.arena import Arena
from bench.attack_cases.model import Deed, Probe, Seen, Shown

Peer = Callable[[Arena], AbstractContextManager[str]]


def sought_inside(peer: Peer, probe: Callable[[str], Probe]) -> Deed:
    """Tries to reach a peer on the host from a sandbox; `probe` is made for what the peer is found by."""

    def deed(arena: Arena) -> Seen:
        with peer(arena) as address:
            return arena.inside(probe(address))

    return deed


def sought_outside(peer: Peer, probe: Callable[[str], Probe]) -> Shown:
    """Reaches the same peer as an ordinary user of the host."""

    def deed(arena: Arena) -> Seen:
        with peer(arena) as address:
            return arena.outside(probe(address), "user")

    return Shown(deed, "outside, as an ordinary user")


@contextmanager
def listening(family: socket.AddressFamily, address: object) -> Generator[socket.socket]:
    """Takes connections and closes them, until the block ends."""
    with socket.socket(family, socket.SOCK_STREAM) as server:
        server.bind(address)  # pyright: ignore[reportArgumentType]  its form is the family's
        server.listen(16)
        with _served(server, _take):
            yield server


def echoing(host: str) -> Peer:
    """Answers datagrams at this address, until the block ends; found by its port."""

    @contextmanager
    def peer(arena: Arena) -> Generator[str]:
        del arena
        with socket.socket(_family(host), socket.SOCK_DGRAM) as server:
            server.bind((host, 0))
            with _served(server, _answer):
                yield str(server.getsockname()[1])

    return peer


def tcp(host: str) -> Peer:
    """Takes connections at this address; found by its port."""

    @contextmanager
    def peer(arena: Arena) -> Generator[str]:
        del arena
        with listening(_family(host), (host, 0)) as server:
            yield str(server.getsockname()[1])

    return peer


@contextmanager
def abstract(arena: Arena) -> Generator[str]:
    """A Unix socket by an abstract name; `@` stands for its first byte."""
    del arena
    with listening(socket.AF_UNIX, f"\0dockyard-attack-{os.getpid()}") as server:
        yield "@" + server.getsockname()[1:].decode()


@contextmanager
def by_path(arena: Arena) -> Generator[str]:
    """A Unix socket that every user of the host may connect to."""
    path = arena.open_place / "peer.sock"
    with listening(socket.AF_UNIX, str(path)):
        path.chmod(0o777)
        try:
            yield str(path)
        finally:
            path.unlink()


def own_address(family: socket.AddressFamily) -> str:
    """An address of this host that is not its loopback, empty where there is none. Sends nothing."""
    target = {socket.AF_INET: "192.0.2.1", socket.AF_INET6: "2001:db8::1"}[family]
    with suppress(OSError), socket.socket(family, socket.SOCK_DGRAM) as any_socket:
        any_socket.connect((target, 9))
        return str(any_socket.getsockname()[0])
    return ""


def _family(host: str) -> socket.AddressFamily:
    return socket.AF_INET6 if ":" in host else socket.AF_INET


def _take(server: socket.socket) -> None:
    server.accept()[0].close()


def _answer(server: socket.socket) -> None:
    data, sender = server.recvfrom(64)
    server.sendto(data, sender)


@contextmanager
def _served(server: socket.socket, once: Callable[[socket.socket], None]) -> Generator[None]:
    ended = threading.Event()
    server.settimeout(0.05)

    def serve() -> None:
        while not ended.is_set():
            with suppress(OSError):
                once(server)

    thread = threading.Thread(target=serve)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()
