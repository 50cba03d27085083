"""Links of sandboxes: a network namespace each, with a routed veth; no bridge, no shared segment.

One end is `eth0` in the sandbox's namespace, with a version 4 and a version 6 address of its own; the other
lies in the uplink's namespace, with a route to the one, and the trunk leads to the other. Neighbours are
entered by hand, so that no ARP or neighbour discovery has to pass the fence. A namespace has no name and no
mount: a descriptor holds it until the sandbox's processes do, and when the last of them is gone the kernel
removes it and the veth with it, whatever became of the owner.
"""

import json
import os
import socket
from collections.abc import Callable
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from pathlib import Path

from sandbox.egress import rtnetlink
from sandbox.egress.namespaces import enter, open_namespace, run_in, run_ip
from sandbox.egress.settings import write_settings
from sandbox.egress.trunk import (
    ALIAS_START,
    HOST_MAC,
    INNER_MAC,
    NAME_START,
    NEXT_HOPS,
    Home,
    Trunk,
    make_device,
    new_name,
)
from sandbox.processes import ProcessKey

# Of a sandbox's namespace. As in native/namespaces.c: least, first, most bytes of one direction of a TCP
# connection.
_SIZES = "4096 16384 65536"
_SETTINGS = {
    **{"ipv4/tcp_rmem": _SIZES, "ipv4/tcp_wmem": _SIZES},
    **{"ipv6/conf/default/accept_ra": "0", "ipv6/conf/eth0/accept_ra": "0"},
    "ipv6/conf/eth0/disable_ipv6": "0",  # also where namespaces begin with what the machine has
}


@dataclass(slots=True)
class Link:
    """A namespace with its veth, for one sandbox."""

    name: str  # of the host end
    ifindex: int  # of the host end, in the uplink's namespace
    namespace: int  # descriptor; -1 once it is let go
    home: Home
    trunk: int = 0  # ifindex of what leads to the host end; 0 where routes do

    def let_go(self) -> None:
        """Closes the descriptor: from now on the sandbox's processes hold the namespace. Idempotent."""
        if self.namespace >= 0:
            os.close(self.namespace)
        self.namespace = -1


def make_link(trunk: Trunk, watch: Callable[[int], None]) -> Link:
    """A fresh namespace and veth behind the trunk. `watch` gets the host end's ifindex, in the uplink's
    namespace, before it carries. CapacityError when no address is free, OSError when the kernel refuses;
    leaves nothing then. Blocks for some milliseconds."""
    home = trunk.take()
    try:
        return run_in(None, lambda: _connect(trunk, home, watch))
    except BaseException:
        trunk.give_back(home)
        raise


def _connect(trunk: Trunk, home: Home, watch: Callable[[int], None]) -> Link:
    """On a thread that is in the fresh namespace, and goes to and fro: a start of one costs more."""
    name, namespace = new_name(), open_namespace(Path("/proc/thread-self/ns/net"))

    def prepare(ifindex: int) -> None:
        trunk.keep_out_of_version6(home, name)
        watch(ifindex)

    with ExitStack() as on_failure:
        on_failure.callback(os.close, namespace)
        enter(trunk.uplink)
        ifindex = make_device(trunk.state, name, "eth0", namespace, prepare)
        on_failure.callback(run_in, trunk.uplink, lambda: rtnetlink.remove(ifindex))
        rtnetlink.carry_out(_host_end(ifindex, home.addresses[0]))
        enter(namespace)
        _configure_inside(home.addresses)
        on_failure.pop_all()
    return Link(name, ifindex, namespace, home, trunk.ifindex)


def remove_link(trunk: Trunk, link: Link) -> None:
    """Removes the veth, both ends. Blocks for some ten milliseconds; idempotent."""
    link.let_go()
    trunk.remove(link.ifindex, link.home)


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
        rtnetlink.remove(socket.if_nametoindex(name))


def _list_host_ends() -> tuple[HostEnd, ...]:
    if not any(name.startswith(NAME_START) for _, name in socket.if_nameindex()):
        return ()
    done = run_ip(["-json", "link", "show", "type", "veth"])
    found: list[HostEnd] = []
    for each in json.loads(done.stdout or "[]"):
        words = str(each.get("ifalias", "")).split("/")
        if len(words) == 4 and words[0] == ALIAS_START:
            with suppress(ValueError):
                found.append(HostEnd(each["ifname"], words[1], ProcessKey(int(words[2]), int(words[3]))))
    return tuple(found)


def _host_end(ifindex: int, address: str) -> list[rtnetlink.Order]:
    return [rtnetlink.add_route(ifindex, address), rtnetlink.put_neighbour(ifindex, address, INNER_MAC)]


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
