"""Networks of this process's sandboxes: programs, pool of links and resolver, behind one object an uplink."""

import logging
import os
import threading
from collections.abc import Generator, Iterable, Sequence
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path

from protocol.clock import Clock, SystemClock
from sandbox import cgroups
from sandbox.egress import links, namespaces
from sandbox.egress.connection import Connection
from sandbox.egress.fence import Fence
from sandbox.egress.forwarding import lacking_ways, switched_off, versions_beyond
from sandbox.egress.libbpf import load_library
from sandbox.egress.resolver import Resolver
from sandbox.egress.rules import EVERY_PORT, Ports, Rule, own_prefixes, prefix_of
from sandbox.egress.trunk import Trunk
from sandbox.errors import (
    CapacityError,
    InvalidArgument,
    StartError,
    UnsupportedError,
    is_shortage,
    telling_shortage,
)
from sandbox.forks import close_left, free, leave_in_children
from sandbox.places import EGRESS_OBJECT
from sandbox.policy import Network
from sandbox.pool import Pool
from sandbox.privileged.addresses import Addresses
from sandbox.privileged.denials import CONTROL_PORTS, NOWHERE, POOL_4, POOL_6
from sandbox.refusals import Attempt

_RESOLVERS_FILE = Path("/etc/resolv.conf")
_HINT = "use network='none', or see `dockyard doctor`"
_log = logging.getLogger("dockyard.sandbox")


def check() -> None:
    """Raises UnsupportedError where this host cannot enforce a network policy. Milliseconds; starts nothing.
    What only an attempt can show (a kernel that refuses the programs) `Egress` raises."""
    if os.geteuid() != 0:
        raise UnsupportedError(
            "a sandbox with a network needs root, or the helper that root runs",
            capability=namespaces.CAPABILITY,
            hint="use network='none', or have root run `dockyard node helper --user NAME`",
        )
    if not any(each.version == 2 for each in cgroups.find_hierarchies()):
        words = "a sandbox with a network needs cgroups of version 2"
        raise UnsupportedError(words, capability=namespaces.CAPABILITY, hint=_HINT)
    if not EGRESS_OBJECT.is_file():
        hint = "apt-get install clang libbpf-dev, then `python -m sandbox.egress.build`"
        raise UnsupportedError(
            "the egress programs are not built", capability=namespaces.CAPABILITY, hint=hint
        )
    namespaces.check_tools()
    try:
        with telling_shortage("loading libbpf"):
            load_library()
    except OSError as error:
        raise UnsupportedError(
            f"a sandbox with a network needs libbpf: {error}",
            capability=namespaces.CAPABILITY,
            hint="apt-get install libbpf1",
        ) from error


class Egress:
    """Thread-safe. Close it when no sandbox needs it any more."""

    def __init__(
        self,
        state_dir: Path,
        *,
        uplink: Path | None = None,
        nameserver: tuple[str, int] | None = None,
        control_ports: Sequence[tuple[int, int]] = CONTROL_PORTS,
        num_spare: int = 2,
        clock: Clock | None = None,
    ) -> None:
        """`uplink` is the network namespace that sandboxes are connected to and that routes what they send,
        by default this process's. `nameserver` (address, port) is asked, from there, for allowed names; by
        default the first of /etc/resolv.conf. `control_ports` of the addresses that the uplink has, now and
        later, are denied to all; to these addresses leads what names each by itself, and no wider rule.
        `num_spare` links are kept ready. UnsupportedError where this host cannot enforce a policy,
        CapacityError where it lacks memory, threads or descriptors."""
        check()
        self.clock: Clock = clock or SystemClock()
        self._maker = os.getpid()
        self._lock = threading.Lock()  # guards what follows
        self._connections: dict[int, Connection] = {}
        with ExitStack() as on_failure, _enforcing():
            self._uplink = namespaces.open_namespace(uplink)
            on_failure.callback(os.close, self._uplink)
            self.control_ports = tuple(control_ports)
            self._addresses = namespaces.run_in(self._uplink, Addresses)
            on_failure.callback(self._addresses.close)
            self.fence = Fence(self._look(), self._on_refusal)
            on_failure.callback(self.fence.close)
            self._is_renewed = True  # of the resolver's thread
            self._trunk = Trunk(self._uplink, cgroups.state_key(state_dir), self.fence.lead)
            on_failure.callback(self._trunk.close)
            self.resolver = Resolver(
                lambda: namespaces.enter(self._uplink),
                nameserver or first_nameserver(),
                self.clock,
                self.fence.shut,
            )
            on_failure.callback(self.resolver.close)
            self.resolver.watch(self.fence.log_fileno(), self.fence.drain)
            self.resolver.watch(self._addresses.fileno(), self._on_new_addresses)
            on_failure.pop_all()
        self._pool = Pool(self._make_link, self._discard, num_spare)
        self._pool.fill()
        leave_in_children(self)

    def connect(self, name: str, group: Path, network: Network) -> Connection:
        """Guards a sandbox's version 2 cgroup and gives it a link, before anything is in either: first all is
        refused, then the rules are entered, then the link is opened. `disconnect` undoes it. CapacityError or
        StartError when any of it fails; the sandbox must then not start. InvalidArgument in a fork of the
        process that has made this."""
        check_own(self._maker)
        with ExitStack() as on_failure, refusing("connecting a sandbox to the network", name):
            sandbox = self.fence.guard(group)
            on_failure.callback(self.fence.forget, sandbox)
            link = self._pool.claim()
            on_failure.callback(self._discard, link)
            connection = Connection(self, name, sandbox, link, network)
            with self._lock:
                self._connections[sandbox] = connection
            on_failure.callback(self._forget, sandbox)
            on_failure.callback(connection.close)
            connection.follow()  # addresses that came before it was known here
            connection.start()
            on_failure.pop_all()
        return connection

    def lacking_ways(self, networks: Iterable[Network]) -> tuple[str, ...]:
        """What sandboxes with these lack, since the uplink does not forward: it is looked at each time, since
        the machine may stop, too. OSError, and InvalidArgument as `connect`."""
        check_own(self._maker)
        if versions_beyond(networks, self.own):
            return lacking_ways(networks, self.own, namespaces.run_in(self._uplink, switched_off))
        return ()

    def disconnect(self, connection: Connection) -> None:
        """Refuses everything and removes the link. Idempotent; blocks for some ten milliseconds."""
        try:
            connection.close()
        finally:
            self._forget(connection.id)
            self._discard(connection.link)

    def num_ready(self) -> int:
        """Links in stock."""
        return self._pool.num_ready()

    def num_entries(self) -> int:
        """Entries of rules in the kernel's maps; 0 when no sandbox is connected."""
        return self.fence.num_entries()

    def fill(self) -> None:
        """Blocks until the stock of links is full, or cannot be filled."""
        self._pool.wait()

    def close(self) -> None:
        """Removes the links in stock and lets go of everything. Idempotent."""
        if self._uplink < 0:
            return
        self._pool.close()
        self._trunk.close()
        self.resolver.close()
        self.fence.close()
        self._addresses.close()
        os.close(self._uplink)
        self._uplink = -1

    def leave(self) -> None:
        """In a child of a fork: links, programs and resolver are the parent's."""
        self._lock = threading.Lock()
        for link in (*self._pool.leave(), *(each.link for each in self._connections.values())):
            link.let_go()
        self._connections = {}
        for each in (self._trunk, self.resolver, self.fence, self._addresses):
            each.leave()
        close_left(self._uplink if self._uplink >= 0 else None)
        self._uplink = -1

    def _look(self) -> list[Rule]:
        """Finds out what is the uplink's own. What no policy overrides: nowhere, other sandboxes, this
        machine's control plane. OSError."""
        rules = [Rule(prefix_of(net), EVERY_PORT) for net in (*NOWHERE, POOL_4, POOL_6)]
        addresses = self._addresses.current()
        self.own = own_prefixes(addresses)
        for address in addresses:
            rules += [Rule(prefix_of(address), Ports(*ports, 0)) for ports in self.control_ports]
        return rules

    def _on_new_addresses(self) -> None:
        """On the resolver's thread. Who cannot be told what is this machine's reaches nothing any more."""
        try:
            self.fence.deny(self._look())
            with self._lock:
                connections = list(self._connections.values())
            follow_all(connections)
        except Exception as error:  # whatever it is: who does not know must not be open
            log_shut(error)
            self.fence.shut()
            return
        self._renew()

    def _renew(self) -> None:
        """As `Trunk.renew`; for as long as that fails, for want of descriptors say, it is tried again."""
        try:
            self._trunk.renew()
            self._is_renewed = True
        except Exception as error:
            self.resolver.try_again(self._renew)
            if self._is_renewed:  # one line, whatever number of attempts
                words = "could not be looked at, and is again until it can"
                _log.warning("whether sandboxes still reach anything by version 6 %s: %s", words, error)
            self._is_renewed = False

    def _make_link(self) -> links.Link:
        """On any thread, and on several at a time."""
        return links.make_link(self._trunk, self.fence.watch_link)

    def _discard(self, link: links.Link) -> None:
        links.remove_link(self._trunk, link)

    def _forget(self, sandbox: int) -> None:
        with self._lock:
            self._connections.pop(sandbox, None)

    def _on_refusal(self, sandbox: int, attempt: Attempt) -> None:
        with self._lock:
            connection = self._connections.get(sandbox)
        if connection is not None:
            connection.refusals.add(attempt)


_shared: dict[tuple[Path, int], Egress] = {}  # by state directory and user: one that root has made is root's
_shared_lock = threading.Lock()


def _leave() -> None:
    """In a child of a fork, which has none of the threads that serve it."""
    free(_shared_lock)
    _shared.clear()


os.register_at_fork(after_in_child=_leave)


def shared_egress(state_dir: Path) -> Egress:
    """The one of this process and state directory, made at the first use: this process's own namespace is the
    uplink. UnsupportedError where this host cannot enforce a policy."""
    with _shared_lock:
        key = state_dir, os.geteuid()
        if key not in _shared:
            _shared[key] = Egress(state_dir)
        return _shared[key]


def first_nameserver(file: Path = _RESOLVERS_FILE) -> tuple[str, int] | None:
    """Of a resolv.conf; None where it names none. OSError for want of a descriptor: it is read once."""
    try:
        lines = file.read_text().splitlines()
    except OSError as error:
        if is_shortage(error):
            raise
        return None
    found = (line.split() for line in lines)
    return next(((words[1], 53) for words in found if len(words) > 1 and words[0] == "nameserver"), None)


def log_shut(error: Exception) -> None:
    """Says why the uplink's sandboxes are about to be shut off."""
    with suppress(Exception):  # for want of memory, too
        _log.error("sandboxes reach nothing any more, since this machine's addresses are unknown: %s", error)


def follow_all(connections: Iterable[Connection]) -> None:
    """The uplink has other addresses now: one whose rules cannot hold for these reaches nothing any more."""
    for each in connections:
        try:
            each.follow()
        except Exception as error:  # the others are to follow all the same
            _log.error("sandbox %s reaches nothing any more, since addresses changed: %s", each.name, error)


def check_own(maker: int) -> None:
    """InvalidArgument in a fork of that process, which has made an egress."""
    if os.getpid() != maker:
        words = "egress was made by the process that this one is a fork of"
        raise InvalidArgument(words, hint="make one here, or leave it to `Sandbox.create`")


@contextmanager
def _enforcing() -> Generator[None]:
    """An OSError of the block says that there is not enough of something, or that this kernel cannot."""
    try:
        yield
    except OSError as error:
        if is_shortage(error):
            raise CapacityError(f"setting up the network of sandboxes: {error}", hint="try again") from error
        words = f"this kernel does not take what guards sandboxes: {error}"
        raise UnsupportedError(words, capability=namespaces.CAPABILITY, hint=_HINT) from error


@contextmanager
def refusing(doing: str, name: str) -> Generator[None]:
    """An OSError of the block becomes a CapacityError or a StartError of phase `network`."""
    try:
        yield
    except OSError as error:
        words = f"{doing}: {error}"
        if is_shortage(error):
            raise CapacityError(words, hint="end other sandboxes", sandbox_id=name) from error
        raise StartError(words, phase="network", hint=_HINT, sandbox_id=name) from error
