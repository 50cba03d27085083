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
import subprocess
import threading
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from ipaddress import IPv4Network, IPv6Network
from pathlib import Path
from typing import TypeVar

from sandbox.egress import rtnetlink
from sandbox.egress.rules import Prefix, prefix_of
from sandbox.egress.settings import write_settings
from sandbox.errors import CapacityError, StartError, UnsupportedError
from sandbox.processes import ProcessKey, this_process
from sandbox.programs import run_program

T = TypeVar("T")

# Of the range for tests between networks (RFC 2544), which nobody routes; and a site of our own (RFC 4193).
POOL_4, POOL_6 = IPv4Network("198.18.0.0/15"), IPv6Network("fd6b:79d0:5bc1::/64")
NEXT_HOPS = ("169.254.1.1", "fe80::1")  # nobody's address: the neighbour table says where they are
HOST_MAC, _INNER_MAC = "02:64:6b:79:00:01", "02:64:6b:79:00:02"  # each veth is a segment of its own
# Of a sandbox's namespace. As in native/namespaces.c: least, first, most bytes of one direction of a TCP
# connection.
_SIZES = "4096 16384 65536"
_SETTINGS = {
    **{"ipv4/tcp_rmem": _SIZES, "ipv4/tcp_wmem": _SIZES},
    **{"ipv6/conf/default/accept_ra": "0", "ipv6/conf/eth0/accept_ra": "0"},
}
_NAME_START, _ALIAS_START = "dky", "dockyard"
_CLONE_NEWNET = 0x40000000
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
    """Runs lines of `ip -batch` there: for worlds of tests, and trials. StartError when one fails."""
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
    `watch` gets the host end's ifindex, in the uplink's namespace, before the sandbox's end exists for
    anyone and before it carries. CapacityError when no address is free, OSError when the kernel refuses;
    leaves nothing then. Blocks for some milliseconds."""
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
        rtnetlink.carry_out([rtnetlink.new_veth(name, HOST_MAC, "eth0", _INNER_MAC, namespace)])
        ifindex = socket.if_nametoindex(name)
        try:
            owner = this_process()
            alias = f"{_ALIAS_START}/{state}/{owner.pid}/{owner.start_ticks}"
            rtnetlink.carry_out([rtnetlink.label(ifindex, alias)])
            watch(ifindex)
            rtnetlink.carry_out(_host_end(ifindex, addresses))
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


def remove_groups(ifindex: int) -> bool:
    """Removes the route to groups (multicast) of a host end in the calling thread's namespace. The kernel
    adds it some time after the link is up, and looks through those of all at each that begins to carry.
    False where it has not come yet, or the kernel refuses; True also where the link is gone."""
    try:
        rtnetlink.carry_out([rtnetlink.remove_groups(ifindex)])
    except OSError:
        return not _is_there(ifindex)
    return True


def _is_there(ifindex: int) -> bool:
    try:
        socket.if_indextoname(ifindex)
    except OSError:
        return False
    return True


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


def _host_end(ifindex: int, addresses: tuple[str, str]) -> list[rtnetlink.Order]:
    orders = [rtnetlink.without_own_address(ifindex), rtnetlink.up(ifindex)]
    for address in addresses:
        orders.append(rtnetlink.add_route(ifindex, address))
        orders.append(rtnetlink.put_neighbour(ifindex, address, _INNER_MAC))
    return orders


def _inner_end(lo: int, eth0: int, addresses: tuple[str, str]) -> list[rtnetlink.Order]:
    orders = [rtnetlink.up(lo), rtnetlink.without_own_address(eth0), rtnetlink.up(eth0)]
    orders += [rtnetlink.add_address(eth0, address) for address in addresses]
    for hop in NEXT_HOPS:
        orders.append(rtnetlink.put_neighbour(eth0, hop, HOST_MAC))
        orders.append(rtnetlink.add_default_route(eth0, hop))
    return orders


def _configure_inside(addresses: tuple[str, str]) -> None:
    write_settings(_SETTINGS)
    lo, eth0 = map(socket.if_nametoindex, ("lo", "eth0"))
    rtnetlink.carry_out(_inner_end(lo, eth0, addresses))


def _delete(ifindex: int) -> None:
    try:
        rtnetlink.carry_out([rtnetlink.delete(ifindex)])
    except OSError as error:
        if error.errno != errno.ENODEV:
            raise


def _run_batch(lines: list[str]) -> None:
    done = _run_ip(["-batch", "-"], "\n".join(lines))
    if done.returncode != 0:
        reason = "; ".join(line.strip() for line in done.stderr.splitlines())
        raise StartError(f"making a sandbox's network: ip: {reason}", phase="network")


def _run_ip(words: list[str], lines: str = "") -> "subprocess.CompletedProcess[str]":
    return run_program(["ip", *words], given=lines, patience_s=_PATIENCE_S)
