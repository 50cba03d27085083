"""What a scheduler counts."""

from dataclasses import asdict, dataclass


@dataclass(frozen=True, slots=True)
class SchedulerStatistics:
    """Counters since the start, but for `waiting` and `running`."""

    waiting: int
    running: int
    preemptions: int
    swapped: int  # of those, to host memory
    forks: int  # that ran at once, on shared blocks
    copied_blocks: int
    loaded_blocks: int  # from host memory, into which disk loads first
    exact_resumes: int  # behind kept windows
    replayed_resumes: int  # behind windows that were run again
    rebuilt: int  # whose entries were computed anew first


@dataclass(slots=True)
class Counts:
    """Those since the start, as they grow."""

    preemptions: int = 0
    swapped: int = 0
    forks: int = 0
    copied_blocks: int = 0
    loaded_blocks: int = 0
    exact_resumes: int = 0
    replayed_resumes: int = 0
    rebuilt: int = 0

    def statistics(self, waiting: int, running: int) -> SchedulerStatistics:
        return SchedulerStatistics(waiting, running, **asdict(self))
