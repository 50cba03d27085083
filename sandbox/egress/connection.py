"""One sandbox's connection: its link, its rules and their version, the names it has resolved, what it was
refused."""

import socket
import threading
from collections.abc import Callable, Mapping, Sequence
from typing import Protocol

from protocol.clock import Clock
from sandbox.egress.fence import Fence
from sandbox.egress.links import Link
from sandbox.egress.messages import Address
from sandbox.egress.namespaces import run_in
from sandbox.egress.resolver import LISTEN_AT, Resolver
from sandbox.egress.rules import (
    Own,
    Ports,
    Prefix,
    Rule,
    Table,
    check_own_ports,
    compile_table,
    entry_at,
    name_ports,
    prefix_of,
    rules_of,
)
from sandbox.errors import InvalidArgument, VersionConflict
from sandbox.forks import leave_in_children
from sandbox.policy import Names, Network
from sandbox.policy.network import ANY_NAME
from sandbox.refusals import Attempt, Counts, Refusals

MAX_LEARNT = 1024  # addresses of one sandbox; beyond them the ones that hold no more go first
MAX_NAMES = 16  # of one address; those that hold longest
GRACE_NS = 30_000_000_000  # beyond an answer's time, for whoever has it and has not connected yet


class Services(Protocol):
    """What connections share."""

    resolver: Resolver
    clock: Clock

    @property
    def fence(self) -> Fence: ...

    @property
    def own(self) -> Own:
        """The uplink's addresses, as far as they are known by now."""
        ...

    @property
    def control_ports(self) -> Sequence[tuple[int, int]]:
        """Of these addresses, which no policy opens."""
        ...


class Connection:
    """Thread-safe. A Client of the resolver. Owned by its sandbox, which closes it."""

    def __init__(self, services: Services, name: str, sandbox: int, link: Link, network: Network) -> None:
        """The sandbox's cgroup is guarded already. OSError when the maps are full; InvalidArgument for rules
        of which one can lead nowhere. Nothing is open then."""
        check_own_ports(network, services.own, services.control_ports)
        self.refusals = Refusals()
        self._services, self.name, self.id, self.link = services, name, sandbox, link
        self._lock = threading.Lock()  # guards what follows
        self._network = network
        self._version = 1
        self._learnt: dict[Prefix, dict[str, int]] = {}  # names, and until when
        self._last: Counts | None = None  # refused, of a closed one
        self._stop_names: Callable[[], None] = lambda: None
        self._own, self._is_shut = services.own, False  # of the table that holds; whether it does
        services.fence.replace(sandbox, _table(network, {}, self._own))
        leave_in_children(self)

    def leave(self) -> None:
        """In a child of a fork: what comes later is for its parent to read, of a log that has one reader."""
        self._lock, self._last = threading.Lock(), self.refusals.leave()

    def start(self, listener: socket.socket | None = None) -> None:
        """Opens the link and serves names, on a socket of the namespace where one is given, which is taken
        over. OSError when it cannot."""
        listener = listener or run_in(self.link.namespace, _listen)
        self._stop_names = self._services.resolver.serve(listener, self)
        self._services.fence.open_link(self.id, self.link)

    @property
    def version(self) -> int:
        """Of the rules that hold; 1 at first."""
        with self._lock:
            return self._version

    @property
    def network(self) -> Network:
        """The rules that hold."""
        with self._lock:
            return self._network

    def replace(self, network: Network, expected_version: int) -> int:
        """Puts these rules in the place of all others, in one step, and returns their version. What they do
        not allow is cut, addresses of names included. VersionConflict when another version holds,
        InvalidArgument for rules of which one can lead nowhere."""
        check_own_ports(network, self._services.own, self._services.control_ports)
        with self._lock:
            if expected_version != self._version:
                raise VersionConflict(
                    f"network version {expected_version} was expected and {self._version} holds",
                    hint="read `network_version` again and decide anew",
                    sandbox_id=self.name,
                )
            learnt = {
                prefix: still
                for prefix, names in self._learnt.items()
                if (still := {name: until for name, until in names.items() if _ports_of(network, name, 0)})
            }
            self._put(network, learnt)
            self._network = network
            self._version += 1
            return self._version

    def follow(self) -> None:
        """Has the rules hold for the uplink's addresses of now: in one step, or the sandbox reaches nothing
        any more, and this raises what kept it from that. Nothing where they are those of before."""
        with self._lock:
            if self._last is not None or (self._own == self._services.own and not self._is_shut):
                return
            try:
                self._put(self._network, self._learnt)
            except FileNotFoundError:  # its group has gone, and all that was in it
                return
            except Exception:  # whatever it is: the old rules are of other addresses
                self._is_shut = True
                self._services.fence.shut_off(self.id)
                raise

    def is_own(self, address: Address) -> bool:
        """Resolver's thread: whether it is the uplink's, to which no name leads."""
        return prefix_of(address) in self._services.own

    def allows_name(self, name: str) -> bool:
        """Resolver's thread: whether a rule has it."""
        return bool(_ports_of(self.network, name, 0))

    def learn(self, name: str, addresses: tuple[Address, ...], ttl_s: int) -> bool:
        """Resolver's thread: opens these addresses for the ports that rules have for the name."""
        until_ns = self._services.clock.now_ns() + ttl_s * 1_000_000_000 + GRACE_NS
        with self._lock:
            ports = _ports_of(self._network, name, until_ns)
            try:
                return bool(ports) and all(self._open(prefix_of(each), name, until_ns) for each in addresses)
            except (InvalidArgument, OSError):
                return False

    def refuse_name(self, name: str, why: str) -> None:
        """Resolver's thread: a name that was not resolved."""
        self.refusals.add(Attempt("name", name, LISTEN_AT[1], "dns", why))

    def counts(self) -> Counts:
        """What was refused so far, also once it is closed."""
        with self._lock:
            if self._last is not None:
                return self._last
        self._services.fence.drain()
        counts = dict(self.refusals.counts())
        if (unlogged := self._services.fence.counters(self.id)[1]) > 0:
            counts[Attempt("other")] = counts.get(Attempt("other"), 0) + unlogged
        return counts

    def close(self) -> None:
        """Stops the resolver's part and removes the entries: all is refused. The link is the caller's to
        remove. Idempotent; blocks for a moment."""
        try:
            self._stop_names()
            last = self.counts()
            with self._lock:
                self._last = last
        finally:
            self._services.fence.forget(self.id)

    def _put(self, network: Network, learnt: dict[Prefix, dict[str, int]]) -> None:
        """These rules, and of the addresses of names those that are not the uplink's."""
        own = self._services.own
        learnt = {prefix: names for prefix, names in learnt.items() if prefix not in own}
        self._services.fence.replace(self.id, _table(network, learnt, own))
        self._own, self._learnt, self._is_shut = own, learnt, False

    def _open(self, prefix: Prefix, name: str, until_ns: int) -> bool:
        if prefix not in self._learnt and not self._make_room():
            return False
        names = {**self._learnt.get(prefix, {}), name: until_ns}
        self._learnt[prefix] = dict(sorted(names.items(), key=lambda each: -each[1])[:MAX_NAMES])
        self._write(prefix)
        return True

    def _make_room(self) -> bool:
        if len(self._learnt) < MAX_LEARNT:
            return True
        oldest = min(self._learnt, key=lambda each: max(self._learnt[each].values()))
        if max(self._learnt[oldest].values()) > self._services.clock.now_ns():
            return False
        del self._learnt[oldest]
        self._write(oldest)
        return True

    def _write(self, prefix: Prefix) -> None:
        """The entry of one address anew, from the rules and from the names that it has."""
        written = rules_of(self._network)
        names = _rules_at(self._network, prefix, self._learnt.get(prefix, {}))
        if names or any(rule.prefix == prefix for rule in written):
            self._services.fence.extend(self.id, prefix, entry_at((*written, *names), prefix, self._own))
        else:
            self._services.fence.retract(self.id, prefix)


def matches(pattern: str, name: str) -> bool:
    """Whether a policy's domain is this name, or has it below. Both in lower case without a final dot."""
    if pattern == ANY_NAME:
        return True
    if pattern.startswith("*."):
        return name.endswith(pattern[1:]) and len(name) >= len(pattern)
    return name == pattern


def _table(network: Network, learnt: Mapping[Prefix, Mapping[str, int]], own: Own) -> Table:
    named = [rule for prefix, names in learnt.items() for rule in _rules_at(network, prefix, names)]
    return compile_table((*rules_of(network), *named), own)


def _rules_at(network: Network, prefix: Prefix, names: Mapping[str, int]) -> list[Rule]:
    return [Rule(prefix, ports) for name, until in names.items() for ports in _ports_of(network, name, until)]


def _ports_of(network: Network, name: str, until_ns: int) -> tuple[Ports, ...]:
    return tuple(
        port
        for rule in network.all_names()
        if _has(rule, name)
        for port in name_ports(rule.ranges(), rule.protocol, until_ns)
    )


def _has(rule: Names, name: str) -> bool:
    return any(matches(pattern, name) for pattern in rule.domains)


def _listen() -> socket.socket:
    listener = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
    try:
        listener.bind(LISTEN_AT)
    except BaseException:
        listener.close()
        raise
    return listener
