"""Requests whose prefix is on its way from disk to host memory, before they are scheduled."""

from engine.cache.block_pool import BlockPool
from engine.cache.prefetch import Prefetch
from engine.cache.tiers import Tiers
from engine.request import Sequence
from engine.scheduler.scheduler import Scheduler

_WAIT_S = 0.05  # for the disk, with nothing else to do


class Loading:
    """Owned by the engine's thread. What has come stays pinned until its request has its blocks."""

    def __init__(self, pool: BlockPool, scheduler: Scheduler, tiers: Tiers) -> None:
        self._pool, self._scheduler, self._tiers = pool, scheduler, tiers
        self.waiting: dict[Sequence, Prefetch] = {}  # in order of deadlines, as all wait equally long
        self._sequences: dict[Prefetch, Sequence] = {}  # the same the other way round
        self._unasked: set[Sequence] = set()  # of these: until it is known what the disk has
        self._pinned: dict[Sequence, Prefetch] = {}

    def add(self, sequence: Sequence) -> None:
        """Schedule it, behind its prefix from the disk if that has some of it."""
        if not self._tiers.has_disk or sequence.num_incoming:
            self._scheduler.add(sequence)
        elif (reading := self._tiers.until_read()) is not None:
            self._unasked.add(sequence)
            self._wait(sequence, reading)
        else:
            self._ask(sequence)

    def advance(self, now_ns: int, *, idle: bool) -> None:
        """Schedule what the disk has answered, or kept waiting too long. `idle`: wait for it a moment."""
        if idle:
            next(iter(self.waiting.values())).wait(_WAIT_S)
        for prefetch in self._tiers.take_done():
            if (sequence := self._sequences.get(prefetch)) is not None:
                self._go_on(sequence)
        while self.waiting:
            sequence, prefetch = next(iter(self.waiting.items()))
            if now_ns <= prefetch.deadline_ns:
                break
            self._go_on(sequence)

    def begun(self, sequence: Sequence) -> None:
        """It has its blocks."""
        prefetch = self._pinned.pop(sequence, None)
        if prefetch is not None:
            self._tiers.end(prefetch)

    def remove(self, sequence: Sequence) -> bool:
        """Forget it, wherever it is; whether it was still waiting for the disk."""
        if sequence in self.waiting:
            self._unasked.discard(sequence)
            self._tiers.end(self._stop_waiting(sequence))
            return True
        self.begun(sequence)
        return False

    def give_up(self) -> None:
        """Nothing that is loaded fits any more: schedule all."""
        for sequence in list(self.waiting):
            self.remove(sequence)
            self._scheduler.add(sequence)
        for sequence in list(self._pinned):
            self.begun(sequence)

    def check_integrity(self) -> None:
        assert self._pinned.keys() <= set(self._scheduler.waiting), "something is pinned for nobody"
        owned = {*self.waiting.values(), *self._pinned.values()}
        assert owned == self._tiers.prefetches, "a prefetch, or what it pins, is nobody's"
        assert self._unasked <= self.waiting.keys(), "one that waits for nothing waits for the disk"
        assert self._sequences == {p: s for s, p in self.waiting.items()}, "a prefetch is nobody's"

    def _ask(self, sequence: Sequence) -> None:
        if (prefetch := self._prefetch(sequence, None)) is None:
            self._scheduler.add(sequence)
        else:
            self._wait(sequence, prefetch)

    def _prefetch(self, sequence: Sequence, deadline_ns: int | None) -> Prefetch | None:
        tiers, pool = self._tiers, self._pool
        path = self._scheduler.known_path(sequence, lambda key: pool.knows(key) or tiers.is_kept(key))
        return tiers.prefetch(path.keys, [key for key in path.keys if not pool.knows(key)], deadline_ns)

    def _go_on(self, sequence: Sequence) -> None:
        """What it waits for has come, or is given up."""
        prefetch = self.waiting[sequence]
        if sequence not in self._unasked:
            self._pinned[sequence] = self._stop_waiting(sequence)
            self._scheduler.add(sequence)
            return
        self._unasked.remove(sequence)
        self._tiers.end(prefetch)
        found = self._prefetch(sequence, prefetch.deadline_ns) if prefetch.done else None
        if found is None:
            self._stop_waiting(sequence)
            self._scheduler.add(sequence)
            return
        del self._sequences[prefetch]
        self._wait(sequence, found)  # in its place among the others: it has waited for a while

    def _wait(self, sequence: Sequence, prefetch: Prefetch) -> None:
        self.waiting[sequence], self._sequences[prefetch] = prefetch, sequence

    def _stop_waiting(self, sequence: Sequence) -> Prefetch:
        prefetch = self.waiting.pop(sequence)
        del self._sequences[prefetch]
        return prefetch
