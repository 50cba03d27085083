"""Peers that a program might talk to, and what it might do to a network.

Runs in a sandbox, or outside of one for the control, with nothing but the standard library. What opens a door
returns words; what finds it shut raises OSError or LookupError.
"""

# Names in /proc and numbers of descriptors are what it is about:
# ruff: noqa: PTH208
import errno
import fcntl
import os
import socket
import struct
import subprocess
import time
from contextlib import suppress
from pathlib import Path

PATIENCE_S = 15.0
# All of them 127.0.0.1 to somebody.
SPELLINGS = (
    *("127.0.0.1", "127.1", "2130706433", "0x7f000001", "0177.0.0.1", "127.255.255.254", "0.0.0.0", "0"),
    *("localhost", "::ffff:127.0.0.1", "::ffff:7f00:1"),
)


def reach(host: str, port: str, serve: str = "") -> str:
    """A TCP connection. `serve`: puts the address on the loopback and listens there first, as only the owner
    of a network can."""
    kept = _serve(host, int(port)) if serve else None
    with socket.create_connection((host, int(port)), PATIENCE_S) as peer:
        found = f"talked to {peer.getpeername()[0]}"
    if kept is not None:
        kept.close()
    return found


def reach_any(port: str, *hosts: str) -> str:
    """A TCP connection to the first of these, or of all spellings of the loopback, that takes one."""
    failures: set[str] = set()
    for host in hosts or SPELLINGS:
        try:
            return reach(host, port)
        except OSError as error:
            failures.add(errno.errorcode.get(error.errno or 0, type(error).__name__))
    raise LookupError(" ".join(sorted(failures)))


def fast_open(host: str, port: str) -> str:
    """A TCP connection that begins with data instead of with connect()."""
    with socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET) as one:
        one.sendto(b"x", socket.MSG_FASTOPEN, (host, int(port)))
        return f"heard {one.recv(16)!r}"


def own_address(towards: str) -> str:
    """The address that it would talk from; nothing is sent."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as one:
        one.connect((towards, 5000))
        return str(one.getsockname()[0])


def resolve_any(*names: str) -> str:
    """The first of these names that resolves."""
    for name in names:
        try:
            return f"{name} {resolve(name)}"
        except LookupError:
            continue
    raise LookupError("does not resolve")


def ask(host: str, port: str) -> str:
    """A datagram, and the answer to it."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(family, socket.SOCK_DGRAM) as peer:
        peer.settimeout(PATIENCE_S)
        peer.connect((host, int(port)))
        peer.send(b"ping")
        return f"heard {peer.recv(64)!r}"


def unix(address: str) -> str:
    """A Unix socket by its path, or by its abstract name after an `@`."""
    with socket.socket(socket.AF_UNIX) as peer:
        peer.settimeout(PATIENCE_S)
        peer.connect(f"\0{address[1:]}" if address.startswith("@") else address)
    return f"talked to {address}"


def resolve(name: str) -> str:
    """A name, by whatever this process is told to ask."""
    try:
        return f"is {socket.getaddrinfo(name, 80)[0][4][0]}"
    except socket.gaierror as error:
        raise LookupError("does not resolve") from error


def promiscuous(interface: str) -> str:
    """Has an interface hand over packets that are for others."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as any_socket:
        name = interface.encode().ljust(16, b"\0")
        (flags,) = struct.unpack_from("=h", fcntl.ioctl(any_socket, 0x8913, name + bytes(16)), 16)
        fcntl.ioctl(any_socket, 0x8914, name + struct.pack("=h", flags | 0x100) + bytes(14))
    return f"{interface} listens to everything"


def raw_socket(family: str, kind: str, protocol: str) -> str:
    """One that writes its own headers."""
    socket.socket(int(family), int(kind), int(protocol)).close()
    return "there is one"


def ping_socket(allow: str = "") -> str:
    """Echo requests without a right of its own. `allow`: has the network permit them first, as only its owner
    can."""
    if allow:
        Path("/proc/sys/net/ipv4/ping_group_range").write_text("0 0")
    socket.socket(socket.AF_INET, socket.SOCK_DGRAM, socket.IPPROTO_ICMP).close()
    return "there is one"


def flows(host: str, first: str, count: str) -> str:
    """A datagram to so many ports, each of which is a flow to who counts them."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as one:
        for port in range(int(first), int(first) + int(count)):
            with suppress(ConnectionRefusedError):
                one.sendto(b"x", (host, port))
    return f"sent {count}"


def change_cgroup() -> str:
    """Finds a group whose list of processes it may write to; writes nothing."""
    for folder, _, names in os.walk("/sys/fs/cgroup"):
        if "cgroup.procs" in names and os.access(f"{folder}/cgroup.procs", os.W_OK):
            os.close(os.open(f"{folder}/cgroup.procs", os.O_WRONLY))
            return "could join a cgroup"
    raise LookupError("no cgroup is in sight" if not os.listdir("/sys") else "none that it may join")


def serve(ready: str) -> str:
    """Listens on all addresses, writes the port to a file, and takes connections until it is ended."""
    with socket.create_server(("", 0), family=socket.AF_INET6, dualstack_ipv6=True) as server:
        Path(f"{ready}.new").write_text(str(server.getsockname()[1]))
        Path(f"{ready}.new").rename(ready)
        while True:
            server.accept()[0].close()


def _serve(host: str, port: int) -> socket.socket:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    place = (f"{host}/128", "dev", "lo", "nodad") if ":" in host else (f"{host}/32", "dev", "lo")
    for words in (("link", "set", "lo", "up"), ("addr", "add", *place)):
        subprocess.run(["ip", *words], check=True, capture_output=True)
    server = socket.create_server((host, port), family=family)
    _wait_until_reached(server, host, port)
    return server


def _wait_until_reached(server: socket.socket, host: str, port: int) -> None:
    """The kernel makes the route to an IPv6 address a moment after the address."""
    give_up = time.monotonic() + PATIENCE_S
    while True:
        try:
            with socket.create_connection((host, port), PATIENCE_S), server.accept()[0]:
                return
        except OSError:
            if time.monotonic() > give_up:
                raise
        time.sleep(0.01)
