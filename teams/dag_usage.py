"""How a run used its agents: concurrency over time, and work that nothing came of."""

from dataclasses import dataclass

from protocol.events import Interval
from teams.critical_path import NS_PER_S
from teams.dag_network import WAITS, Network


@dataclass(frozen=True, slots=True)
class Concurrency:
    """Activities at the same time, waits left out."""

    peak: int
    average: float  # work over makespan
    serial_share: float  # share of the makespan with at most one activity: what no team size shortens


@dataclass(frozen=True, slots=True)
class Wasted:
    """Intervals from which no dependency leads to the end of the run: cancelled or unused work."""

    intervals: tuple[str, ...]
    work_ns: int  # their durations, waits left out

    @property
    def work_s(self) -> float:
        return self.work_ns / NS_PER_S


def is_work(interval: Interval) -> bool:
    """Everything but waiting and queueing for a box."""
    return interval.kind not in WAITS


def concurrency(network: Network) -> Concurrency:
    """Peak, average and serial share of the recorded run."""
    work = [i for i in network.intervals if is_work(i) and i.end_ns > i.start_ns]
    # Ends sort before starts at the same time: what follows is not concurrent.
    changes = sorted([(i.start_ns, 1) for i in work] + [(i.end_ns, -1) for i in work])
    makespan_ns = network.makespan_ns(network.recorded)
    active = peak = parallel_ns = 0
    before_ns = network.origin_ns
    for time_ns, change in changes:
        parallel_ns += time_ns - before_ns if active > 1 else 0
        active += change
        peak = max(peak, active)
        before_ns = time_ns
    if makespan_ns == 0:
        return Concurrency(peak, 0.0, 1.0)
    work_ns = sum(i.end_ns - i.start_ns for i in work)
    return Concurrency(peak, work_ns / makespan_ns, 1 - parallel_ns / makespan_ns)


def wasted(network: Network) -> Wasted:
    """What the end of the run did not need."""
    final = network.final(network.recorded)
    used = {final}
    frontier = [final]
    while frontier:
        for source in network.sources(frontier.pop()):
            if source not in used:
                used.add(source)
                frontier.append(source)
    left = [i for index, i in enumerate(network.intervals) if index not in used]
    return Wasted(tuple(i.id for i in left), sum(i.end_ns - i.start_ns for i in left if is_work(i)))
