"""The kernel's side: programs at a sandbox's cgroup and at the host end of its veth, and the maps they read.

Programs stay attached to a cgroup until it is removed, not until this process ends: a sandbox whose owner has
been killed stays fenced for the moment that it still lives. For the same reason nothing is pinned anywhere.
Entries are keyed by the cgroup's id; a policy's rules carry a generation, and the sandbox's current one is
switched when all are there, so an update holds as a whole or not at all.
"""

import errno
import itertools
import os
import struct
import threading
import time
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from pathlib import Path

from sandbox.egress.libbpf import ATTACH_TYPES, BpfMap, BpfObject, RingBuffer, load_library
from sandbox.egress.links import Link
from sandbox.egress.rules import (
    Denials,
    Ports,
    Prefix,
    Rule,
    Table,
    address_text,
    compile_table,
    is_clear,
    pack_allow_key,
    pack_deny_key,
    pack_entry,
    prefix_of,
)
from sandbox.forks import close_left
from sandbox.places import EGRESS_OBJECT
from sandbox.refusals import Attempt, Hook

# enum hook of egress.bpf.c, from 1 on.
_HOOKS: tuple[Hook, ...] = ("connect", "send", "bind", "socket", "packet", "wire")
_EVENT = struct.Struct("=Q16sHBBI")
_COUNTERS = struct.Struct("=QQQQ")
_NO_RULES = 0  # generation
# Whether an entry's mark that it is clear of denials is believed: key and value of the programs' variable.
_MARKS_HOLD, _MARKS_DO_NOT_HOLD = ((bytes(4), struct.pack("=I", word)) for word in (1, 0))
_SHUT_ATTEMPTS, _SHUT_REST_S = 50, 0.1
MAPS = ("allowed", "attached", "counts", "events", "links")  # that owners write to or read
_PROTOCOLS = {6: "tcp", 17: "udp", 1: "icmp", 58: "icmp6"}


class Fence:
    """Programs and maps of this process, for all of its sandboxes. Thread-safe."""

    def __init__(
        self,
        denied: Iterable[Rule],
        on_refusal: Callable[[int, Attempt], None],
        maps: Mapping[str, int] | None = None,
    ) -> None:
        """Loads and fills in what no policy overrides. OSError when the kernel refuses. `on_refusal` is
        called from `drain`, with the sandbox's cgroup id. `maps`: descriptors of the maps of programs that
        the helper has loaded, attaches, and fills in; they are this object's from now on."""
        self._denied = tuple(denied)
        self._denials = Denials(self._denied)
        self._given = dict(maps or {})
        self._object = None if maps is not None else BpfObject(EGRESS_OBJECT)
        try:
            self._maps = self._open_maps(self._object)
            self._log = RingBuffer(
                self._maps["events"], load_library(), lambda sample: on_refusal(*_decode(sample))
            )
        except BaseException:
            self._let_go()
            raise
        self._lock = threading.Lock()  # guards what follows, and the log's reader
        self._generations = itertools.count(1)
        self._current: dict[int, tuple[int, set[Prefix]]] = {}
        self._links: dict[int, Link] = {}
        self._closed = self._is_shut = False

    def guard(self, group: Path) -> int:
        """Attaches every program to a cgroup, and returns its id. From now on all that is in it is refused,
        but its own loopback. OSError when one cannot be attached. Where the helper has attached them, this
        enters the group and no more."""
        fd = os.open(group, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            sandbox = os.fstat(fd).st_ino
            if self._object is not None:
                for name in ATTACH_TYPES:
                    self._object.attach(name, fd)
        finally:
            os.close(fd)
        key = struct.pack("=Q", sandbox)
        self._maps["attached"].set(key, _identity(sandbox, _NO_RULES))
        self._maps["counts"].set(key, bytes(_COUNTERS.size))
        return sandbox

    def watch_link(self, ifindex: int) -> None:
        """Puts the fence at the host end of a veth, whose namespace the calling thread is in: nothing passes
        until `open_link`."""
        assert self._object is not None, "the helper watches its own links"
        self._object.attach_to_link("wire", ifindex)

    def lead(self, ifindex: int) -> None:
        """Has a device of the calling thread's namespace hand what it is to send to the host ends of those
        whom it is for."""
        assert self._object is not None, "the helper's links have routes"
        self._object.attach_to_link("deliver", ifindex, outgoing=True)

    def open_link(self, sandbox: int, link: Link) -> None:
        """Lets pass what the sandbox's rules allow, from its own addresses, and what is for these. The helper
        has entered those of its own links."""
        key = struct.pack("=I", link.ifindex)
        with self._lock:
            self._check_open()
            self._links[sandbox] = link
            if self._object is not None:
                addresses = _packed_addresses(link)
                self._maps["homes"].set(key, b"".join(addresses) + struct.pack("=II", link.trunk, 0))
                self._maps["ends"].set(addresses[1], key)
            self._write_identity(sandbox, self._current[sandbox][0])

    def replace(self, sandbox: int, table: Table) -> None:
        """Gives a sandbox these rules instead of the ones that it has, in one step. OSError when the maps are
        full; the old ones then hold."""
        with self._lock:
            self._check_open()
            before = self._current.get(sandbox, (_NO_RULES, set[Prefix]()))
            now = next(self._generations), set(table)
            try:
                self._current[sandbox] = now
                for prefix, ports in table.items():
                    self._allow(sandbox, now[0], prefix, ports)
                self._write_identity(sandbox, now[0])
            except BaseException:
                # Where this fails too, whoever looks for the new rules finds none, and refuses.
                with suppress(OSError, MemoryError):
                    self._write_identity(sandbox, before[0])
                self._current[sandbox] = before
                self._remove(sandbox, *now)
                raise
            self._remove(sandbox, *before)

    def extend(self, sandbox: int, prefix: Prefix, ports: tuple[Ports, ...]) -> None:
        """Adds or replaces one entry of the current rules."""
        with self._lock:
            self._check_open()
            generation, prefixes = self._current[sandbox]
            if generation != _NO_RULES:
                self._allow(sandbox, generation, prefix, ports)
                prefixes.add(prefix)

    def retract(self, sandbox: int, prefix: Prefix) -> None:
        """Removes one entry of the current rules; what it allowed is cut."""
        with self._lock:
            self._check_open()
            generation, prefixes = self._current[sandbox]
            prefixes.discard(prefix)
            self._maps["allowed"].remove(pack_allow_key(sandbox, generation, prefix))

    def deny(self, denied: Iterable[Rule]) -> None:
        """From now on no policy overrides these, instead of those before; whatever is allowed already.
        OSError when the map is full: then `shut` is due."""
        with self._lock:
            self._check_open()
            before, self._denied = _packed(self._denied), tuple(denied)
            self._denials = Denials(self._denied)
            after = _packed(self._denied)
            if after == before or self._object is None:
                return
            self._object.map(".bss").set(*_MARKS_DO_NOT_HOLD)  # they are of the denials before
            for key, value in after.items():
                self._maps["denied"].set(key, value)
            for key in before.keys() - after.keys():
                self._maps["denied"].remove(key)

    def shut(self) -> None:
        """Refuses everything to every sandbox, for good: no rules are taken any more. Idempotent. Those that
        cannot be shut, for want of memory say, are tried again for five seconds; then it raises why."""
        left = _SHUT_ATTEMPTS
        while (error := self._try_to_shut()) is not None:
            left -= 1
            if left == 0:
                raise error
            time.sleep(_SHUT_REST_S)

    def _try_to_shut(self) -> Exception | None:
        """Why one of them is open yet, where one is; the others are shut all the same."""
        found = None
        with self._lock:
            self._is_shut = True
            for sandbox in () if self._closed else self._current:
                try:
                    self._shut_off(sandbox)
                except Exception as error:
                    found = error
        return found

    def shut_off(self, sandbox: int) -> None:
        """Refuses everything to one sandbox, until it has new rules. Idempotent."""
        with self._lock:
            if self._closed or (current := self._current.get(sandbox)) is None:
                return
            self._current[sandbox] = (_NO_RULES, set())
            self._shut_off(sandbox)
            self._remove(sandbox, *current)

    def counters(self, sandbox: int) -> tuple[int, int]:
        """How much was refused, and how much of that the log had no room for."""
        with self._lock:
            closed = self._closed
        key = struct.pack("=Q", sandbox)
        value = None if closed else self._maps["counts"].get(key, _COUNTERS.size)
        denied, unlogged, *_ = _COUNTERS.unpack(value) if value is not None else (0, 0)
        return denied, unlogged

    def forget(self, sandbox: int) -> None:
        """Removes a sandbox's entries: what is still in its cgroup is refused. Idempotent."""
        key = struct.pack("=Q", sandbox)
        with self._lock:
            if self._closed:
                return
            if (link := self._links.pop(sandbox, None)) is not None:
                for name in self._maps.keys() & {"homes", "links"}:
                    self._maps[name].remove(struct.pack("=I", link.ifindex))
                if "ends" in self._maps:
                    self._maps["ends"].remove(_packed_addresses(link)[1])
            self._maps["counts"].remove(key)
            if (current := self._current.pop(sandbox, None)) is not None:
                self._remove(sandbox, *current)

    def num_entries(self) -> int:
        """Entries of all sandboxes that this process has made."""
        with self._lock:
            return sum(len(prefixes) for _, prefixes in self._current.values())

    def log_fileno(self) -> int:
        """Readable when there are refusals."""
        return self._log.fileno()

    def drain(self) -> None:
        """Hands all refusals that there are to `on_refusal`. Does not block."""
        with self._lock:
            if not self._closed:
                self._log.consume()

    def close(self) -> None:
        """Lets go of programs and maps; attached ones stay until their cgroup is gone. Idempotent."""
        with self._lock:
            if not self._closed:
                self._log.close()
                self._let_go()
            self._closed = True

    def leave(self) -> None:
        """In a child of a fork, which has nothing to say to its parent's maps."""
        self._lock = threading.Lock()
        self.close()

    def _open_maps(self, loaded: BpfObject | None) -> dict[str, BpfMap]:
        if loaded is None:
            return {name: BpfMap(load_library(), fd, name) for name, fd in self._given.items()}
        maps = {name: loaded.map(name) for name in (*MAPS, "denied", "ends", "homes")}
        for key, value in _packed(self._denied).items():
            maps["denied"].set(key, value)
        loaded.map(".bss").set(*_MARKS_HOLD)  # entries are this process's
        return maps

    def _let_go(self) -> None:
        if self._object is not None:
            self._object.close()
        for fd in self._given.values():
            close_left(fd)

    def _allow(self, sandbox: int, generation: int, prefix: Prefix, ports: tuple[Ports, ...]) -> None:
        entry = pack_entry(ports, clear=is_clear(prefix, ports, self._denials))
        self._maps["allowed"].set(pack_allow_key(sandbox, generation, prefix), entry)

    def _shut_off(self, sandbox: int) -> None:
        try:
            self._write_identity(sandbox, _NO_RULES)
        except (OSError, MemoryError):  # its group has gone; or no memory, and what has no entry is refused
            if (link := self._links.get(sandbox)) is not None:
                self._maps["links"].remove(struct.pack("=I", link.ifindex))

    def _write_identity(self, sandbox: int, generation: int) -> None:
        """At the wire and at the sockets; the old rules are there until both have the new ones."""
        identity = _identity(sandbox, generation)
        if (link := self._links.get(sandbox)) is not None:
            self._maps["links"].set(struct.pack("=I", link.ifindex), identity)
        self._maps["attached"].set(struct.pack("=Q", sandbox), identity)

    def _check_open(self) -> None:
        """Descriptors of a closed fence may be someone else's by now."""
        if self._closed:
            raise OSError(errno.EBADF, "the fence is closed")
        if self._is_shut:
            raise OSError(errno.EIO, "the fence is shut, since this machine's addresses are unknown")

    def _remove(self, sandbox: int, generation: int, prefixes: Iterable[Prefix]) -> None:
        for prefix in prefixes:
            with suppress(MemoryError):
                self._maps["allowed"].remove(pack_allow_key(sandbox, generation, prefix))


def _packed(denied: Iterable[Rule]) -> dict[bytes, bytes]:
    table = compile_table(denied, with_zones=False)
    return {pack_deny_key(prefix): pack_entry(ports) for prefix, ports in table.items()}


def _packed_addresses(link: Link) -> tuple[bytes, ...]:
    return tuple(prefix_of(each).packed() for each in link.home.addresses)


def _identity(sandbox: int, generation: int) -> bytes:
    return struct.pack("=QII", sandbox, generation, 0)


def _decode(sample: bytes) -> tuple[int, Attempt]:
    sandbox, address, port, protocol, hook, _ = _EVENT.unpack(sample)
    where = _HOOKS[int(hook) - 1]
    text = "" if where == "socket" else address_text(address)
    return sandbox, Attempt(where, text, port, _PROTOCOLS.get(protocol, str(protocol)))
