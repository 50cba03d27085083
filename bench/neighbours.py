"""How much of the machine others used while a bench ran.

CPU pressure counts the bench's own threads too, and a bench that fills every core makes pressure by itself.
What decides whether its figures can be trusted is the CPU time of processes that are not its own.
"""

import os
import time
from dataclasses import dataclass

import psutil


@dataclass(frozen=True, slots=True)
class Sample:
    """CPU seconds since some origin, and when they were read."""

    at_s: float
    busy_s: float  # of the whole machine
    own_s: float  # of this process, its descendants, and those of them that have ended


def sample() -> Sample:
    """Reads the counters; some milliseconds."""
    times = psutil.cpu_times()
    busy_s = sum(times) - times.idle - getattr(times, "iowait", 0.0) - getattr(times, "guest", 0.0)
    return Sample(time.monotonic(), busy_s, _own_s())


def share(before: Sample, after: Sample) -> float:
    """Share (0..1) of all cores that went to others between two samples.

    Processes that left the bench's tree count as others: few, and on the safe side.
    """
    whole_s = (after.at_s - before.at_s) * (os.cpu_count() or 1)
    others_s = (after.busy_s - before.busy_s) - (after.own_s - before.own_s)
    return min(max(others_s / whole_s, 0.0), 1.0) if whole_s > 0 else 0.0


def _own_s() -> float:
    this = psutil.Process()
    return sum(_cpu_s(process) for process in (this, *this.children(recursive=True)))


def _cpu_s(process: psutil.Process) -> float:
    try:
        times = process.cpu_times()
    except psutil.NoSuchProcess:  # ended since it was listed; its parent has its times now, or soon
        return 0.0
    return times.user + times.system + times.children_user + times.children_system
