"""Network namespaces of sandboxes, each with a routed veth to the uplink: no bridge, no shared segment.

One end is `eth0` in the sandbox's namespace, with a version 4 and a version 6 address of its own; the other
lies in the uplink's namespace, with a route to these two addresses. Neighbours are entered by hand at both
ends, so that no ARP or neighbour discovery has to pass the fence. A namespace has no name and no mount: a
descriptor holds it until the sandbox's processes do, and when the last of them is gone the kernel removes it
and the veth with it, whatever became of the owner.
"""

import ctypes
import errno
import json
import os
import secrets
import shutil
import socket
import struct
import subprocess
import threading
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from ipaddress import IPv4Network, IPv6Network
from pathlib import Path
from typing import TypeVar

from sandbox.egress.rules import Prefix, prefix_of
from sandbox.errors import CapacityError, StartError, UnsupportedError
from sandbox.processes import ProcessKey, this_process

T = TypeVar("T")

# Of the range for tests between networks (RFC 2544), which nobody routes; and a site of our own (RFC 4193).
POOL_4, POOL_6 = IPv4Network("198.18.0.0/15"), IPv6Network("fd6b:79d0:5bc1::/64")
_NEXT_HOPS = ("169.254.1.1", "fe80::1")  # nobody's address: the neighbour table says where they are
_NAME_START, _ALIAS_START = "dky", "dockyard"
_CLONE_NEWNET = 0x40000000
_NETLINK_ROUTE, _RTM_DELLINK, _REQUEST, _ACKNOWLEDGE = 0, 17, 1, 4
_ATTEMPTS = 8  # to find addresses that no other process has taken
_PATIENCE_S = 20.0


@dataclass(slots=True)
class Link:
    """A namespace with its veth, for one sandbox."""

    name: str  # of the host end
    ifindex: int  # of the host end, in the uplink's namespace
    namespace: int  # descriptor; -1 once it is let go
    addresses: tuple[Prefix, Prefix]  # version 4 and 6

    def let_go(self) -> None:
        """Closes the descriptor: from now on the sandbox's processes hold the namespace. Idempotent."""
        if self.namespace >= 0:
            os.close(self.namespace)
        self.namespace = -1


def open_namespace(path: Path | None = None) -> int:
    """A descriptor of a namespace file, by default of the one that this process is in."""
    return os.open(path or "/proc/self/ns/net", os.O_RDONLY | os.O_CLOEXEC)


def new_namespace() -> int:
    """A descriptor of a fresh namespace, in which nothing is up. OSError."""
    return run_in(None, lambda: os.open("/proc/thread-self/ns/net", os.O_RDONLY | os.O_CLOEXEC))


def configure(namespace: int, lines: list[str]) -> None:
    """Runs lines of `ip -batch` there. StartError when one fails, FileExistsError where it was there."""
    run_in(namespace, lambda: _run_batch(lines))


def run_in(namespace: int | None, action: Callable[[], T]) -> T:
    """Calls `action` on a thread of its own in that network namespace, None being a new one, and returns what
    it returns. The processes that it starts are in it too. OSError when the host has no thread left."""
    results: list[T] = []
    errors: list[BaseException] = []

    def run() -> None:
        try:
            enter(namespace)
            results.append(action())
        except BaseException as error:  # handed to the caller
            errors.append(error)

    thread = threading.Thread(target=run, name="namespace", daemon=True)
    try:
        thread.start()
    except RuntimeError as error:
        raise OSError(errno.EAGAIN, f"{error} for a network namespace") from error
    thread.join()
    if errors:
        raise errors[0]
    return results[0]


def enter(namespace: int | None) -> None:
    """Moves the calling thread, for good, to that network namespace, None being a new one. OSError."""
    libc = ctypes.CDLL(None, use_errno=True)
    done = libc.unshare(_CLONE_NEWNET) if namespace is None else libc.setns(namespace, _CLONE_NEWNET)
    if done != 0:
        number = ctypes.get_errno()
        raise OSError(number, f"enter a network namespace: {os.strerror(number)}")


def make_link(uplink: int, state: str, watch: Callable[[int], None]) -> Link:
    """A fresh namespace and veth, labelled for an audit with the state directory's key and this process.
    `watch` gets the host end's ifindex, in the uplink's namespace, before the
    sandbox's end exists for anyone. CapacityError when no address is free, OSError or StartError when the
    kernel refuses; leaves nothing then. Blocks for some ten milliseconds."""
    for _ in range(_ATTEMPTS):
        number = secrets.randbelow(POOL_4.num_addresses - 2) + 1
        namespace = new_namespace()
        try:
            return _connect(uplink, namespace, number, state, watch)
        except FileExistsError:
            os.close(namespace)
        except BaseException:
            os.close(namespace)
            raise
    raise CapacityError(
        f"no free address in {POOL_4} after {_ATTEMPTS} draws", hint="end other sandboxes of this host"
    )


def _connect(uplink: int, namespace: int, number: int, state: str, watch: Callable[[int], None]) -> Link:
    name = f"{_NAME_START}{secrets.token_hex(5)}"
    addresses = (str(POOL_4[number]), str(POOL_6[number]))

    def make_host_end() -> int:
        _run_batch(_host_end(name, namespace, state), namespace)
        ifindex = socket.if_nametoindex(name)
        try:
            watch(ifindex)
            _run_batch(_host_routes(name, addresses), namespace)
        except BaseException:
            _delete(ifindex)
            raise
        return ifindex

    ifindex = run_in(uplink, make_host_end)
    try:
        run_in(namespace, lambda: _configure_inside(addresses))
    except BaseException:
        run_in(uplink, lambda: _delete(ifindex))
        raise
    return Link(name, ifindex, namespace, (prefix_of(addresses[0]), prefix_of(addresses[1])))


def remove_link(uplink: int, link: Link) -> None:
    """Removes the veth, both ends. Blocks for some ten milliseconds; idempotent."""
    link.let_go()
    run_in(uplink, lambda: _delete(link.ifindex))


@dataclass(frozen=True, slots=True)
class HostEnd:
    """A host end that is there, and the process that made it."""

    name: str
    state: str  # of the state directory; cgroups.state_key
    owner: ProcessKey


def host_ends(uplink: int | None = None) -> tuple[HostEnd, ...]:
    """Host ends in this process's namespace, or in another. Milliseconds where there are any."""
    return _list_host_ends() if uplink is None else run_in(uplink, _list_host_ends)


def delete_host_end(name: str) -> None:
    """Removes one of this process's namespace. Idempotent."""
    with suppress(OSError):  # it is gone already
        _delete(socket.if_nametoindex(name))


def _list_host_ends() -> tuple[HostEnd, ...]:
    if not any(name.startswith(_NAME_START) for _, name in socket.if_nameindex()):
        return ()
    done = _run_ip(["-json", "link", "show", "type", "veth"])
    found: list[HostEnd] = []
    for each in json.loads(done.stdout or "[]"):
        words = str(each.get("ifalias", "")).split("/")
        if len(words) == 4 and words[0] == _ALIAS_START:
            with suppress(ValueError):
                found.append(HostEnd(each["ifname"], words[1], ProcessKey(int(words[2]), int(words[3]))))
    return tuple(found)


def check_tools() -> None:
    """UnsupportedError where there is nothing to make veths with."""
    if shutil.which("ip") is None:
        raise UnsupportedError("a sandbox with a network needs `ip`", hint="apt-get install iproute2")


_HOST_MAC, _INNER_MAC = "02:64:6b:79:00:01", "02:64:6b:79:00:02"  # each veth is a segment of its own


def _host_end(name: str, namespace: int, state: str) -> list[str]:
    owner = this_process()
    peer = f"peer name eth0 address {_INNER_MAC} netns /proc/self/fd/{namespace}"
    return [
        f"link add {name} address {_HOST_MAC} type veth {peer}",
        f"link set {name} alias {_ALIAS_START}/{state}/{owner.pid}/{owner.start_ticks}",
    ]


def _host_routes(name: str, addresses: tuple[str, str]) -> list[str]:
    # Without an address of its own by the kernel's hand: nothing is announced there.
    lines = [f"link set {name} addrgenmode none", f"link set {name} up"]
    for address in addresses:
        lines.append(f"route add {address} dev {name}")
        lines.append(f"neigh replace {address} lladdr {_INNER_MAC} dev {name} nud permanent")
    return lines


def inside_lines(addresses: tuple[str, str]) -> list[str]:
    """For `ip -batch` in a namespace that has got `eth0`: its addresses and its way out."""
    lines = ["link set lo up", "link set eth0 addrgenmode none", "link set eth0 up"]
    lines += [f"addr add {addresses[0]}/32 dev eth0", f"addr add {addresses[1]}/128 dev eth0 nodad"]
    for hop in _NEXT_HOPS:
        lines.append(f"neigh replace {hop} lladdr {_HOST_MAC} dev eth0 nud permanent")
        lines.append(f"route add default via {hop} dev eth0 onlink")
    return lines


def _configure_inside(addresses: tuple[str, str]) -> None:
    Path("/proc/sys/net/ipv6/conf/default/accept_ra").write_text("0")
    Path("/proc/sys/net/ipv6/conf/eth0/accept_ra").write_text("0")
    _run_batch(inside_lines(addresses))


def _delete(ifindex: int) -> None:
    """By a message of our own: every kill waits for this, and starting `ip` would take longer than it."""
    body = struct.pack("=BxHiII", socket.AF_UNSPEC, 0, ifindex, 0, 0)
    head = struct.pack("=IHHII", 16 + len(body), _RTM_DELLINK, _REQUEST | _ACKNOWLEDGE, 1, 0)
    with socket.socket(socket.AF_NETLINK, socket.SOCK_RAW, _NETLINK_ROUTE) as kernel:
        kernel.send(head + body)
        (error,) = struct.unpack_from("=i", kernel.recv(4096), 16)
    if error not in (0, -errno.ENODEV):
        raise OSError(-error, f"remove a veth: {os.strerror(-error)}")


def _run_batch(lines: list[str], *fds: int) -> None:
    """FileExistsError where an address is another's; StartError for anything else that `ip` refuses."""
    done = _run_ip(["-batch", "-"], "\n".join(lines), fds)
    if done.returncode == 0:
        return
    if "File exists" in done.stderr:
        raise FileExistsError(done.stderr.strip())
    reason = "; ".join(line.strip() for line in done.stderr.splitlines())
    raise StartError(f"making a sandbox's network: ip: {reason}", phase="network")


def _run_ip(
    words: list[str], lines: str = "", fds: tuple[int, ...] = ()
) -> "subprocess.CompletedProcess[str]":
    return subprocess.run(
        ["ip", *words], input=lines, pass_fds=fds, capture_output=True, text=True, check=False,
        timeout=_PATIENCE_S,
    )  # fmt: skip
