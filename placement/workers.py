"""Which worker of the model goes where, and why.

Filter, score, admit, one worker after the other, the largest first. Memory and devices are never promised
twice. Cores are each given to one worker while they last; when there are more workers than cores they are
shared, and the choice says so, since a slower worker still works and a missing one does not.
"""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field

from placement.topology import Core, Device, Topology, domain_place, gib
from protocol.errors import InvalidInput, ResourceShortage


@dataclass(frozen=True, slots=True)
class WorkerDemand:
    """What one worker asks for."""

    name: str
    memory_bytes: int  # weights, KV pool and working memory
    min_threads: int = 1
    max_threads: int | None = None  # None: as many as there are cores left
    gpus: int = 0
    near: tuple[str, ...] = ()  # workers that it exchanges much with, such as KV: placed close to it


@dataclass(frozen=True, slots=True)
class Rejection:
    """A place that was not chosen, and the reason."""

    place: str
    reason: str


@dataclass(frozen=True, slots=True)
class WorkerChoice:
    """Where a worker goes. `threads` is how many it should run; `cpus` are those that it may run on."""

    worker: str
    place: str
    threads: int
    cpus: tuple[int, ...]
    shares_cores: bool
    memory_bytes: int
    gpus: tuple[str, ...]
    because: str
    rejected: tuple[Rejection, ...]


@dataclass(frozen=True, slots=True)
class WorkerPlacement:
    """A choice for every worker, in the order of the demands, and what is left after them."""

    choices: tuple[WorkerChoice, ...]
    free_bytes: dict[str, int]  # by place
    free_cores: dict[str, int]

    def choice(self, worker: str) -> WorkerChoice:
        """The choice for one worker; InvalidInput where it is not placed here."""
        for choice in self.choices:
            if choice.worker == worker:
                return choice
        raise InvalidInput(f"no worker {worker!r} in this placement")

    def describe(self) -> str:
        """A few lines for people: where each worker is, why, and what was rejected."""
        lines: list[str] = []
        for c in self.choices:
            cpus = ",".join(map(str, c.cpus))
            lines.append(
                f"{c.worker}: {c.place}, {c.threads} thread{'s' * (c.threads != 1)} on cpu {cpus}"
                f"{' (shared)' if c.shares_cores else ''}, {gib(c.memory_bytes)}"
                f"{', ' + ', '.join(c.gpus) if c.gpus else ''}: {c.because}"
            )
            lines += [f"  not {rejected.place}: {rejected.reason}" for rejected in c.rejected]
        lines += [
            f"left on {place}: {gib(free)}, {self.free_cores[place]} cores"
            for place, free in self.free_bytes.items()
        ]
        return "\n".join(lines)


@dataclass(slots=True)
class _Place:
    """What is still free in one domain, and who is there."""

    name: str
    free_bytes: int
    gpus: list[Device]
    workers: list[WorkerDemand] = field(default_factory=list[WorkerDemand])

    def free_cores(self, cores: Sequence[Core]) -> int:
        return len(cores) - sum(worker.min_threads for worker in self.workers)

    def lacks(self, demand: WorkerDemand, cores: Sequence[Core]) -> str:
        """Why the worker cannot go here; empty where it can."""
        if not cores:
            return "no usable core"
        if demand.memory_bytes > self.free_bytes:
            return f"needs {gib(demand.memory_bytes)} of memory, {gib(self.free_bytes)} free"
        if demand.gpus > len(self.gpus):
            return f"needs {demand.gpus} gpus, {len(self.gpus)} free"
        return ""


def place_workers(
    topology: Topology, demands: Sequence[WorkerDemand], *, reserve_bytes: int = 0
) -> WorkerPlacement:
    """Place every worker, or raise ResourceShortage with what is needed and what there is.

    `reserve_bytes` stay free in each domain. Greedy: it may fail where a search over all orders would not.
    """
    _check(demands)
    placer = _WorkerPlacer(topology, reserve_bytes)
    largest_first = sorted(demands, key=lambda d: (-d.gpus, -d.memory_bytes))  # equal ones as they come
    for demand in largest_first:
        placer.place(demand)
    return placer.result(demands)


class _WorkerPlacer:
    def __init__(self, topology: Topology, reserve_bytes: int) -> None:
        self._graph = topology.graph
        self._places = [
            _Place(place, max(0, domain.free_bytes - reserve_bytes), [*domain.devices_of("gpu")])
            for _, domain, place in topology.domains()
        ]
        self._cores = _usable_cores(topology)
        self._chosen: dict[str, tuple[_Place, tuple[Rejection, ...], str, tuple[str, ...]]] = {}

    def place(self, demand: WorkerDemand) -> None:
        lacking = [(place, place.lacks(demand, self._cores[place.name])) for place in self._places]
        fitting = [place for place, reason in lacking if not reason]
        if not fitting:
            raise self._shortage(demand, lacking)
        best = min(fitting, key=lambda place: self._score(place, demand))
        rejected = [Rejection(place.name, reason) for place, reason in lacking if reason]
        rejected += [Rejection(p.name, f"fits, but {self._why(p, demand)}") for p in fitting if p is not best]
        because = self._why(best, demand)
        gpus = tuple(device.name for device in best.gpus[: demand.gpus])
        best.free_bytes -= demand.memory_bytes
        best.gpus = best.gpus[demand.gpus :]
        best.workers.append(demand)
        self._chosen[demand.name] = (best, tuple(rejected), because, gpus)

    def result(self, demands: Sequence[WorkerDemand]) -> WorkerPlacement:
        cores = {place.name: self._share_cores(place) for place in self._places}
        choices: list[WorkerChoice] = []
        for demand in demands:
            place, rejected, because, gpus = self._chosen[demand.name]
            own, shared = cores[place.name][demand.name]
            cpus = tuple(sorted(cpu for core in own for cpu in core.cpus))
            choices.append(
                WorkerChoice(
                    demand.name,
                    place.name,
                    len(own),
                    cpus,
                    shared,
                    demand.memory_bytes,
                    gpus,
                    because,
                    rejected,
                )
            )
        taken = {place.name: _num_taken(cores[place.name]) for place in self._places}
        return WorkerPlacement(
            tuple(choices),
            {place.name: place.free_bytes for place in self._places},
            {place.name: len(self._cores[place.name]) - taken[place.name] for place in self._places},
        )

    def _score(self, place: _Place, demand: WorkerDemand) -> tuple[bool, float, int, int, str]:
        """Least is best: cores of its own, then close to its peers, then the most cores and memory free."""
        free = place.free_cores(self._cores[place.name])
        distance = self._distance(place, demand)
        return (free < demand.min_threads, distance, -free, -place.free_bytes, place.name)

    def _distance(self, place: _Place, demand: WorkerDemand) -> float:
        """Sum of the distances to those peers that are placed already, whoever of the two named the other."""
        peers = [
            other
            for other in self._places
            for worker in other.workers
            if worker.name in demand.near or demand.name in worker.near
        ]
        return sum(self._graph.distance(place.name, peer.name) for peer in peers)

    def _why(self, place: _Place, demand: WorkerDemand) -> str:
        free = place.free_cores(self._cores[place.name])
        cores = f"{max(0, free)} of {len(self._cores[place.name])} cores free"
        return (
            f"{cores}, {gib(place.free_bytes)} free, distance {self._distance(place, demand):g} to its peers"
        )

    def _shortage(self, demand: WorkerDemand, lacking: Sequence[tuple[_Place, str]]) -> ResourceShortage:
        reasons = "; ".join(f"{place.name}: {reason}" for place, reason in lacking) or "there is no machine"
        return ResourceShortage(
            f"no place for worker {demand.name!r}: {reasons}",
            hint="free memory, choose a smaller model or KV pool, or add a machine",
        )

    def _share_cores(self, place: _Place) -> dict[str, tuple[list[Core], bool]]:
        """Cores for each worker of a place: the least each needs, then the rest in turns."""
        cores = self._cores[place.name]
        own: dict[str, list[Core]] = {worker.name: [] for worker in place.workers}
        given = 0
        for worker in place.workers:
            for _ in range(min(worker.min_threads, len(cores))):
                own[worker.name].append(cores[given % len(cores)])
                given += 1
        while given < len(cores):
            hungry = [w for w in place.workers if len(own[w.name]) < (w.max_threads or len(cores))]
            if not hungry:
                break
            least = min(hungry, key=lambda w: len(own[w.name]))
            own[least.name].append(cores[given])
            given += 1
        uses = Counter(core.id for found in own.values() for core in found)
        return {name: (found, any(uses[core.id] > 1 for core in found)) for name, found in own.items()}


def _usable_cores(topology: Topology) -> dict[str, tuple[Core, ...]]:
    """The cores of each domain, no more in a node than its quota keeps busy, spread over its domains."""
    cores: dict[str, tuple[Core, ...]] = {}
    for node in topology.nodes:
        left = node.num_cores
        share = {domain.id: 0 for domain in node.domains}
        while left > 0:
            open_domains = [d for d in node.domains if share[d.id] < len(d.cores)]
            if not open_domains:
                break
            share[min(open_domains, key=lambda d: share[d.id]).id] += 1
            left -= 1
        for domain in node.domains:
            cores[domain_place(node, domain)] = domain.cores[: share[domain.id]]
    return cores


def _num_taken(shares: dict[str, tuple[list[Core], bool]]) -> int:
    return len({core.id for cores, _ in shares.values() for core in cores})


def _check(demands: Sequence[WorkerDemand]) -> None:
    names = [demand.name for demand in demands]
    for demand in demands:
        if names.count(demand.name) > 1:
            raise InvalidInput(f"two workers are named {demand.name!r}")
        if demand.memory_bytes < 0 or demand.gpus < 0:
            raise InvalidInput(f"worker {demand.name!r}: memory_bytes and gpus must be 0 or more")
        if demand.min_threads < 1 or (demand.max_threads or demand.min_threads) < demand.min_threads:
            raise InvalidInput(
                f"worker {demand.name!r}: threads {demand.min_threads}..{demand.max_threads} is no range",
                hint="min_threads is at least 1 and at most max_threads",
            )
