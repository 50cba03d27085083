"""A bin: a part of a machine that admits sandboxes by itself.

A bin is the only one who knows its true state. It says yes or no, and either answer carries that state, so
that whoever asked sees further the next time. An edge keeps one of these for each of its bins.
"""

import threading
from dataclasses import dataclass
from typing import Protocol

from placement.amounts import Amounts, available
from placement.topology import Topology
from placement.workers import WorkerPlacement
from protocol.errors import InvalidInput
from protocol.resources import Resources


@dataclass(frozen=True, slots=True)
class BinState:
    """A bin as it was at one moment. `version` grows with every change, so that older news can be told."""

    name: str
    capacity: Amounts
    used: Amounts
    live: int
    version: int

    @property
    def free(self) -> Amounts:
        return self.capacity.minus(self.used)


@dataclass(frozen=True, slots=True)
class Answer:
    """A bin's yes or no; `reason` is empty for yes, and `state` is true at the time of the answer."""

    admitted: bool
    reason: str
    state: BinState


class Admission(Protocol):
    """What a placer asks of a bin, here or behind a wire. Each call may block for one round trip."""

    def admit(self, sandbox_id: str, demand: Amounts) -> Answer:
        """Take the sandbox in, or say why not. Repeating an admitted id is a yes without effect."""
        ...

    def release(self, sandbox_id: str) -> BinState:
        """Give back what the sandbox held. Nothing happens for an id that is not there."""
        ...


class Bin:
    """Admissions of one bin. Safe from any thread; never promises more than its capacity."""

    def __init__(self, name: str, capacity: Resources) -> None:
        self._name = name
        self._capacity = available(capacity)
        self._lock = threading.Lock()
        self._held: dict[str, Amounts] = {}
        self._used = Amounts()
        self._version = 0

    def admit(self, sandbox_id: str, demand: Amounts) -> Answer:
        """See `Admission`."""
        with self._lock:
            reason = self._reason(sandbox_id, demand)
            if not reason and sandbox_id not in self._held:
                self._held[sandbox_id] = demand
                self._used = self._used.plus(demand)
                self._version += 1
            return Answer(not reason, reason, self._state())

    def release(self, sandbox_id: str) -> BinState:
        """See `Admission`."""
        with self._lock:
            demand = self._held.pop(sandbox_id, None)
            if demand is not None:
                self._used = self._used.minus(demand)
                self._version += 1
            return self._state()

    def state(self) -> BinState:
        """The true state, as a heartbeat would carry it."""
        with self._lock:
            return self._state()

    def check_integrity(self) -> None:
        """Raise AssertionError where the sum of what is held is not what is counted as used."""
        with self._lock:
            total = Amounts()
            for demand in self._held.values():
                total = total.plus(demand)
            assert total == self._used, f"bin {self._name}: holds {total}, counts {self._used}"
            assert total.fits_into(self._capacity), f"bin {self._name}: {total} is over {self._capacity}"

    def _reason(self, sandbox_id: str, demand: Amounts) -> str:
        held = self._held.get(sandbox_id)
        if held is not None:
            return "" if held == demand else "the id is here already with another demand"
        return demand.lacking(self._capacity.minus(self._used))

    def _state(self) -> BinState:
        return BinState(self._name, self._capacity, self._used, len(self._held), self._version)


def sandbox_bins(
    topology: Topology,
    *,
    disk_bytes: int,
    pids: int,
    workers: WorkerPlacement | None = None,
    cpu_overcommit: float = 4.0,
    keep_free_bytes: int = 2**30,
) -> tuple[Bin, ...]:
    """One bin for each domain: the memory that workers leave, less `keep_free_bytes` for the host.

    Sandboxes mostly wait for their agents, so a core is promised `cpu_overcommit` times; memory is promised
    once. Disk and pids of the node are divided evenly among its domains.
    """
    if cpu_overcommit <= 0:
        raise InvalidInput(f"cpu_overcommit: {cpu_overcommit} must be above 0", hint="1 promises a core once")
    bins: list[Bin] = []
    for node, domain, place in topology.domains():
        free = workers.free_bytes[place] if workers else domain.free_bytes
        share = len(node.domains)
        capacity = Resources(
            cpus=min(len(domain.cores), node.num_cores) * cpu_overcommit,
            memory_bytes=max(0, free - keep_free_bytes),
            pids=pids // share,
            disk_bytes=disk_bytes // share,
        )
        bins.append(Bin(place, capacity))
    return tuple(bins)
