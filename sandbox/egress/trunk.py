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
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from ipaddress import IPv6Network

from sandbox.egress import rtnetlink
from sandbox.egress.namespaces import new_namespace, run_in
from sandbox.egress.settings import open_settings, read_setting, write_setting, write_settings
from sandbox.errors import CapacityError
from sandbox.forks import close_left
from sandbox.privileged.denials import NUMBERS, POOL_4, POOL_6
from sandbox.processes import this_process

# Above are those of the helper's links, which have routes of their own. 1,024 owners of an uplink fit.
_NUM_NUMBERS, _BLOCK = NUMBERS.start, 64
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
        self._taken: dict[Home, str] = {}  # and the device of each that has one
        self._free: deque[int] = deque()  # those that were in use last come last
        self._blocks: list[int] = []  # the first number of each
        self._late: dict[Home, int] = {}  # host ends that the kernel did not remove when it was asked
        self._name = new_name()
        with ExitStack() as on_failure:
            self._far = new_namespace()
            on_failure.callback(os.close, self._far)
            self._routing, self._settings = run_in(uplink, _ways)
            on_failure.callback(os.close, self._settings)
            on_failure.callback(self._routing.close)
            self.ifindex = run_in(uplink, lambda: self._make(deliver))
            on_failure.pop_all()

    def take(self) -> Home:
        """Addresses that nobody has. CapacityError when none is left, OSError when the kernel refuses."""
        with self._lock:
            late = tuple(self._late.items())
        for home, ifindex in late:
            self.remove(ifindex, home)
        with self._lock:
            if not self._free:
                self._free.extend(self._add_block())
            home = Home(self._free[0])
            self._taken[home] = ""
            self._free.popleft()  # now that it is somebody's
            return home

    def give_back(self, home: Home) -> None:
        """They are for others now. Idempotent."""
        with self._lock:
            self._late.pop(home, None)
            if home in self._taken:
                self._free.append(home.number)
                del self._taken[home]

    def remove(self, ifindex: int, home: Home) -> None:
        """Removes the host end of a link and gives its addresses back, once that is done. Idempotent, and
        needs no thread. What the kernel refuses, for want of memory say, is tried again at the next link: a
        veth goes by itself with the last process of its namespace."""
        with self._lock:
            if home not in self._taken:
                return
        try:
            self._routing.remove(ifindex)  # for some ten milliseconds, in which others are made and removed
        except (OSError, MemoryError):
            with self._lock:
                self._late[home] = ifindex
        else:
            self.give_back(home)

    def keep_out_of_version6(self, home: Home, name: str) -> None:
        """A sandbox's device in the uplink's namespace, in which the calling thread is: what comes in there
        goes on from the trunk, and the kernel has neither addresses nor routes of version 6 for it."""
        write_setting(self._settings, _switch(name), "1")
        with self._lock:
            self._taken[home] = name

    def renew(self) -> None:
        """On a thread in the uplink's namespace, when its addresses have changed: who turns version 6 off and
        on there takes the trunk's routes, and gives each host end some. OSError when the kernel refuses."""
        with self._lock:
            if self.uplink < 0:
                return
            self._turn_on()
            names = [name for name in self._taken.values() if name]
            with suppress(FileNotFoundError):
                if names and read_setting(self._settings, _switch(names[0])) == "1":
                    return
            for name in names:
                with suppress(FileNotFoundError):  # it has gone with its sandbox
                    write_setting(self._settings, _switch(name), "1")

    def close(self) -> None:
        """Idempotent."""
        with self._lock:
            if self.uplink >= 0:
                self._let_go()  # and the kernel removes it with its other end, if this does not
                for ifindex in (*self._late.values(), self.ifindex):
                    with suppress(OSError, MemoryError):
                        self._routing.remove(ifindex)
                self._routing.close()

    def leave(self) -> None:
        """In a child of a fork: it is the parent's."""
        self._lock = threading.Lock()
        self._let_go()
        self._routing.leave()

    def _let_go(self) -> None:
        if self.uplink >= 0:
            close_left(self._far)
            close_left(self._settings)
        self._far = self.uplink = -1

    def _make(self, deliver: Callable[[int], None]) -> int:
        def prepare(ifindex: int) -> None:
            write_setting(self._settings, _switch(self._name), "0")  # whatever the machine's default is
            rtnetlink.carry_out([rtnetlink.without_own_address(ifindex)])
            deliver(ifindex)
            run_in(self._far, _set_up_far)

        self.ifindex = make_device(self.state, self._name, _FAR, self._far, prepare)
        try:
            self._routing.carry_out([self._neighbour()])
        except BaseException:
            rtnetlink.remove(self.ifindex)
            raise
        return self.ifindex

    def _turn_on(self) -> None:
        """As `renew`, for the trunk itself."""
        write_setting(self._settings, _switch(self._name), "0")
        self._routing.carry_out([self._neighbour()])
        for first in self._blocks:
            with suppress(FileExistsError):
                self._routing.carry_out([self._route(first)])

    def _add_block(self) -> range:
        """Numbers of addresses to which a route leads here, and no other owner's."""
        for first in random.sample(range(0, _NUM_NUMBERS, _BLOCK), _NUM_NUMBERS // _BLOCK):
            try:
                self._add_route(first)
            except FileExistsError:
                continue
            self._blocks.append(first)
            return range(max(first, 1), first + _BLOCK)  # 0 is the pool's own address
        raise CapacityError(
            f"no free block of {_BLOCK} addresses in {POOL_4}",
            hint="each process with networked sandboxes has one at least: end some of these",
        )

    def _add_route(self, first: int) -> None:
        try:
            self._routing.carry_out([self._route(first)])
        except FileExistsError:
            raise
        except OSError:  # version 6 has just been turned off
            run_in(self.uplink, self._turn_on)
            self._routing.carry_out([self._route(first)])

    def _route(self, first: int) -> rtnetlink.Order:
        block = IPv6Network((int(POOL_6[first]), POOL_6.max_prefixlen - (_BLOCK - 1).bit_length()))
        return rtnetlink.add_block_route(self.ifindex, block, NEXT_HOPS[1])

    def _neighbour(self) -> rtnetlink.Order:
        return rtnetlink.put_neighbour(self.ifindex, NEXT_HOPS[1], INNER_MAC)


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


def _switch(name: str) -> str:
    """Of version 6 at a device."""
    return f"{name}/disable_ipv6"


def _ways() -> tuple[rtnetlink.Routing, int]:
    """To routing and settings of the calling thread's namespace."""
    routing = rtnetlink.Routing()
    try:
        return routing, open_settings("ipv6/conf")
    except BaseException:
        routing.close()
        raise


def _set_up_far() -> None:
    """It carries, and sends nothing by its own hand."""
    write_settings({f"ipv6/conf/{_FAR}/disable_ipv6": "1"})
    rtnetlink.carry_out([rtnetlink.up(socket.if_nametoindex(_FAR))])
