"""The one device of the uplink's namespace that routes of version 6 lead to, for all sandboxes of an owner.

With such a route to each sandbox, the kernel would go through those of all whenever a link begins to carry or
ends, under the one lock of its routing (version 4 finds those of a device without that). So these routes
lead, a block of addresses each, to one veth, where a program hands a packet to the host end that its
destination lies behind; and what the fence lets pass at a host end goes on as if it had come in here. The
other end is in a namespace that only this process holds: with the owner the trunk goes, whatever became of
it.
"""

import os
import random
import secrets
import socket
import threading
from collections import deque
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from ipaddress import IPv4Network, IPv6Network

from sandbox.egress import rtnetlink
from sandbox.egress.namespaces import new_namespace, run_in
from sandbox.egress.settings import open_settings, write_setting, write_settings
from sandbox.errors import CapacityError
from sandbox.processes import this_process

# Of the range for tests between networks (RFC 2544), which nobody routes; and a site of our own (RFC 4193).
POOL_4, POOL_6 = IPv4Network("198.18.0.0/15"), IPv6Network("fd6b:79d0:5bc1::/64")
# The second half is for links of the helper's, which have routes of their own (privileged/networks.py).
_NUM_NUMBERS, _BLOCK = 1 << 16, 256
NEXT_HOPS = ("169.254.1.1", "fe80::1")  # nobody's address: the neighbour table says where they are
HOST_MAC, INNER_MAC = "02:64:6b:79:00:01", "02:64:6b:79:00:02"  # each veth is a segment of its own
NAME_START, ALIAS_START = "dky", "dockyard"
_FAR = "trunk"


@dataclass(frozen=True, slots=True, eq=False)
class Home:
    """Where one sandbox is, for as long as it is there."""

    number: int  # in both pools

    @property
    def addresses(self) -> tuple[str, str]:
        """Version 4 and 6."""
        return str(POOL_4[self.number]), str(POOL_6[self.number])


class Trunk:
    """Thread-safe. Close it when no link needs it any more."""

    def __init__(self, uplink: int, state: str, deliver: Callable[[int], None]) -> None:
        """In the uplink's namespace, a descriptor that has to stay open. `state`: the key of the state
        directory, for audits. `deliver` puts the program at a device, by ifindex, of the namespace that it
        is called in. OSError when the kernel refuses; leaves nothing then."""
        self.uplink, self.state = uplink, state
        self._lock = threading.Lock()  # guards what follows
        self._taken: set[Home] = set()
        self._free: deque[int] = deque()  # those that were in use last come last
        with ExitStack() as on_failure:
            self._far = new_namespace()
            on_failure.callback(os.close, self._far)
            self._settings = run_in(uplink, lambda: open_settings("ipv6/conf"))
            on_failure.callback(os.close, self._settings)
            self.ifindex = run_in(uplink, lambda: self._make(deliver))
            on_failure.pop_all()

    def take(self) -> Home:
        """Addresses that nobody has. CapacityError when none is left, OSError when the kernel refuses."""
        with self._lock:
            if not self._free:
                self._free.extend(self._add_block())
            home = Home(self._free.popleft())
            self._taken.add(home)
            return home

    def give_back(self, home: Home) -> None:
        """They are for others now. Idempotent."""
        with self._lock:
            if home in self._taken:
                self._taken.remove(home)
                self._free.append(home.number)

    def keep_out_of_version6(self, name: str) -> None:
        """A device of the uplink's namespace, in which the calling thread is: what comes in there goes on
        from the trunk, and the kernel has neither addresses nor routes of version 6 for it."""
        write_setting(self._settings, f"{name}/disable_ipv6", "1")

    def close(self) -> None:
        """Idempotent."""
        if self._far >= 0:
            run_in(self.uplink, lambda: rtnetlink.remove(self.ifindex))
            os.close(self._far)
            os.close(self._settings)
        self._far = self.uplink = -1

    def _make(self, deliver: Callable[[int], None]) -> int:
        name = new_name()

        def prepare(ifindex: int) -> None:
            write_setting(self._settings, f"{name}/disable_ipv6", "0")  # whatever the machine's default is
            rtnetlink.carry_out([rtnetlink.without_own_address(ifindex)])
            deliver(ifindex)
            run_in(self._far, _set_up_far)

        ifindex = make_device(self.state, name, _FAR, self._far, prepare)
        try:
            rtnetlink.carry_out([rtnetlink.put_neighbour(ifindex, NEXT_HOPS[1], INNER_MAC)])
        except BaseException:
            rtnetlink.remove(ifindex)
            raise
        return ifindex

    def _add_block(self) -> range:
        """Numbers of addresses to which a route leads here, and no other owner's."""
        for first in random.sample(range(0, _NUM_NUMBERS, _BLOCK), _NUM_NUMBERS // _BLOCK):
            block = IPv6Network((int(POOL_6[first]), POOL_6.max_prefixlen - (_BLOCK - 1).bit_length()))
            order = rtnetlink.add_block_route(self.ifindex, block, NEXT_HOPS[1])
            try:
                run_in(self.uplink, lambda order=order: rtnetlink.carry_out([order]))
            except FileExistsError:
                continue
            return range(max(first, 1), first + _BLOCK)  # 0 is the pool's own address
        raise CapacityError(
            f"no free block of addresses in {POOL_4}", hint="end other sandboxes of this host"
        )


def make_device(state: str, name: str, peer: str, namespace: int, prepare: Callable[[int], None]) -> int:
    """A veth with one end in the calling thread's namespace, labelled for an audit with the state directory's
    key and this process, and the other in `namespace`: the ifindex of the one here. `prepare` gets that
    before the other is set up and before it carries. OSError, and what `prepare` raises; leaves nothing
    then."""
    rtnetlink.carry_out([rtnetlink.new_veth(name, HOST_MAC, peer, INNER_MAC, namespace)])
    ifindex = socket.if_nametoindex(name)
    try:
        owner = this_process()
        alias = f"{ALIAS_START}/{state}/{owner.pid}/{owner.start_ticks}"
        rtnetlink.carry_out([rtnetlink.label(ifindex, alias)])
        prepare(ifindex)
        rtnetlink.carry_out([rtnetlink.up(ifindex)])
    except BaseException:
        rtnetlink.remove(ifindex)
        raise
    return ifindex


def new_name() -> str:
    """Of a host end."""
    return f"{NAME_START}{secrets.token_hex(5)}"


def _set_up_far() -> None:
    """It carries, and sends nothing by its own hand."""
    write_settings({f"ipv6/conf/{_FAR}/disable_ipv6": "1"})
    rtnetlink.carry_out([rtnetlink.up(socket.if_nametoindex(_FAR))])
