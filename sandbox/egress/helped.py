"""Networks of an ordinary user's sandboxes: the helper makes links and fences, this process fills in the
rules, sets up what is inside of the namespace, which is its own, and resolves names."""

import errno
import os
import shutil
import socket
import threading
from collections.abc import Iterable
from contextlib import ExitStack
from pathlib import Path

from protocol.clock import Clock, SystemClock
from sandbox.egress.connection import Connection
from sandbox.egress.fence import Fence
from sandbox.egress.forwarding import lacking_ways, switched_off, versions_beyond
from sandbox.egress.links import Link
from sandbox.egress.namespaces import CAPABILITY, check_tools
from sandbox.egress.resolver import Resolver
from sandbox.egress.rules import own_prefixes
from sandbox.egress.service import (
    Egress,
    check_own,
    first_nameserver,
    follow_all,
    log_shut,
    refusing,
    shared_egress,
)
from sandbox.egress.trunk import HOST_MAC, NEXT_HOPS, Home
from sandbox.errors import StartError, UnsupportedError
from sandbox.forks import free, leave_in_children
from sandbox.helper import Helper
from sandbox.policy import Network
from sandbox.privileged.addresses import Addresses
from sandbox.privileged.denials import CONTROL_PORTS
from sandbox.programs import run_program
from sandbox.refusals import Attempt
from sandbox.texts import one_line

_PATIENCE_S = 20.0


class HelpedEgress:
    """Thread-safe. Close it when no sandbox needs it any more. The uplink is this process's namespace, which
    has to be the helper's."""

    control_ports = CONTROL_PORTS

    def __init__(
        self, helper: Helper, *, nameserver: tuple[str, int] | None = None, clock: Clock | None = None
    ) -> None:
        """`nameserver` as for `Egress`. UnsupportedError without libbpf or `ip` and `nsenter`."""
        check_tools()
        if shutil.which("nsenter") is None:
            raise UnsupportedError(
                "a sandbox with a network needs `nsenter`",
                capability=CAPABILITY,
                hint="apt-get install util-linux",
            )
        self.helper, self.clock, self._maker = helper, clock or SystemClock(), os.getpid()
        self._making = threading.Lock()  # the fence: nobody has one whose refusals nobody reads
        self._lock = threading.Lock()  # guards what follows
        self._connections: dict[int, Connection] = {}
        self._fence: Fence | None = None
        self._is_shut = False  # for good
        with ExitStack() as on_failure:
            self._addresses = Addresses()
            on_failure.callback(self._addresses.close)
            self.own = own_prefixes(self._addresses.current())
            self.resolver = Resolver(lambda: None, nameserver or first_nameserver(), self.clock, self._shut)
            on_failure.callback(self.resolver.close)
            self.resolver.watch(self._addresses.fileno(), self._on_new_addresses)
            on_failure.pop_all()
        leave_in_children(self)

    @property
    def fence(self) -> Fence:
        """There is one as soon as a sandbox has been connected."""
        assert self._fence is not None, "nothing is connected yet"
        return self._fence

    def connect_process(
        self, name: str, group: Path, network: Network, pid: int, listener: socket.socket
    ) -> Connection:
        """Fences a sandbox's version 2 cgroup and gives the network namespace of a process, which is in a
        user namespace of this user's, a link; names are served on `listener`, a socket of that namespace,
        which is taken over. Blocks for some twenty milliseconds. `disconnect` undoes it. CapacityError,
        StartError, and InvalidArgument as `Egress.connect`."""
        with ExitStack() as on_failure, refusing("connecting a sandbox to the network", name):
            on_failure.callback(listener.close)
            check_own(self._maker)
            linked = self.helper.link(name, pid)
            fence = self._fence_of(linked.maps)
            sandbox = fence.guard(group)
            on_failure.callback(fence.forget, sandbox)
            link = Link("", linked.ifindex, -1, Home(linked.number))
            _set_up_inside(pid, _inside(link.home.addresses))
            connection = Connection(self, name, sandbox, link, network)
            with self._lock:
                self._connections[sandbox] = connection
            on_failure.callback(self._forget, sandbox)
            on_failure.callback(connection.close)
            connection.follow()  # addresses that came before it was known here
            connection.start(listener)
            on_failure.pop_all()
        return connection

    def lacking_ways(self, networks: Iterable[Network]) -> tuple[str, ...]:
        """As `Egress.lacking_ways`."""
        check_own(self._maker)
        if versions_beyond(networks, self.own):
            return lacking_ways(networks, self.own, switched_off())
        return ()

    def disconnect(self, connection: Connection) -> None:
        """Refuses everything; the link goes with what else the helper has for the sandbox. Idempotent."""
        try:
            connection.close()
        finally:
            self._forget(connection.id)

    def close(self) -> None:
        """Idempotent."""
        self.resolver.close()
        self._addresses.close()
        if self._fence is not None:
            self._fence.close()

    def leave(self) -> None:
        """In a child of a fork, whose helper is its parent's too."""
        self._lock, self._connections = threading.Lock(), {}
        for each in (self.resolver, self._addresses, *([] if self._fence is None else [self._fence])):
            each.leave()

    def _on_new_addresses(self) -> None:
        """On the resolver's thread, as `Egress` has it; what is denied to all, the helper sees to."""
        try:
            self.own = own_prefixes(self._addresses.current())
            with self._lock:
                connections = list(self._connections.values())
            follow_all(connections)
        except Exception as error:  # whatever it is: who does not know must not be open
            log_shut(error)
            self._shut()

    def _shut(self) -> None:
        """Nothing is let through any more, nor by a fence that is just being made."""
        with self._lock:
            self._is_shut, fence = True, self._fence
        if fence is not None:  # its lock is taken before this object's elsewhere
            fence.shut()

    def _fence_of(self, maps: dict[str, int]) -> Fence:
        """The maps are the same ones each time, the descriptors are not."""
        with self._making:
            if (fence := self._fence) is None:
                fence = Fence((), self._on_refusal, maps)
                try:
                    self.resolver.watch(fence.log_fileno(), fence.drain)
                except BaseException:
                    fence.close()
                    raise
            else:
                for fd in maps.values():
                    os.close(fd)
            with self._lock:  # which the resolver's thread takes, while it is waited for
                self._fence = fence
                if self._is_shut:
                    raise OSError(errno.EIO, "this machine's addresses are unknown")
        return fence

    def _forget(self, sandbox: int) -> None:
        with self._lock:
            self._connections.pop(sandbox, None)

    def _on_refusal(self, sandbox: int, attempt: Attempt) -> None:
        with self._lock:
            connection = self._connections.get(sandbox)
        if connection is not None:
            connection.refusals.add(attempt)


def _inside(addresses: tuple[str, str]) -> list[str]:
    """For `ip -batch`: what links.py asks of the kernel by itself, where it may."""
    lines = ["link set lo up", "link set eth0 addrgenmode none", "link set eth0 up"]
    lines += [f"addr add {addresses[0]}/32 dev eth0", f"addr add {addresses[1]}/128 dev eth0 nodad"]
    for hop in NEXT_HOPS:
        lines.append(f"neigh replace {hop} lladdr {HOST_MAC} dev eth0 nud permanent")
        lines.append(f"route add default via {hop} dev eth0 onlink")
    return lines


def _set_up_inside(pid: int, lines: list[str]) -> None:
    """As the root that this user is in the process's user namespace."""
    words = [
        "nsenter",
        "--target",
        str(pid),
        "--user",
        "--net",
        "--preserve-credentials",
        "ip",
        "-batch",
        "-",
    ]
    done = run_program(words, given="\n".join(lines), patience_s=_PATIENCE_S)
    if done.returncode != 0:
        raise StartError(f"setting up a sandbox's network: {one_line(done.stderr)}", phase="network")


Uplink = Egress | HelpedEgress
_shared: dict[Helper, HelpedEgress] = {}
_lock = threading.Lock()  # guards it


def _leave() -> None:
    """In a child of a fork, which makes its own."""
    free(_lock)
    _shared.clear()


os.register_at_fork(after_in_child=_leave)


def shared_uplink(state_dir: Path, helper: Helper | None) -> Uplink:
    """The one of this process and state directory, made at the first use: by the helper's hands where there
    is one. UnsupportedError where this host cannot enforce a policy."""
    with _lock:
        for gone in [each for each in _shared if each.has_ended()]:  # and its sandboxes with it
            _shared.pop(gone).close()
    if helper is None:
        return shared_egress(state_dir)
    with _lock:
        if helper not in _shared:
            _shared[helper] = HelpedEgress(helper)
        return _shared[helper]
