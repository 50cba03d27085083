"""Requests whose prefix is on its way from disk to host memory, before they are scheduled."""

from engine.cache.block_pool import BlockPool
from engine.cache.tiers import Prefetch, Tiers
from engine.request import Sequence
from engine.scheduler.scheduler import Scheduler

_WAIT_S = 0.05  # for the disk, with nothing else to do


class Loading:
    """Owned by the engine's thread. What has come stays pinned until its request has its blocks."""

    def __init__(self, pool: BlockPool, scheduler: Scheduler, tiers: Tiers) -> None:
        self._pool, self._scheduler, self._tiers = pool, scheduler, tiers
        self.waiting: dict[Sequence, Prefetch] = {}
        self._pinned: dict[Sequence, Prefetch] = {}

    def add(self, sequence: Sequence) -> None:
        """Schedule it, behind its prefix from the disk if that has some of it."""
        tiers, pool = self._tiers, self._pool
        if tiers.has_disk and not sequence.num_incoming:
            path = self._scheduler.known_path(sequence, lambda key: pool.knows(key) or tiers.is_kept(key))
            prefetch = tiers.prefetch(path.keys, [key for key in path.keys if not pool.knows(key)])
            if prefetch is not None:
                self.waiting[sequence] = prefetch
                return
        self._scheduler.add(sequence)

    def advance(self, now_ns: int, *, idle: bool) -> None:
        """Schedule what the disk has answered, or kept waiting too long. `idle`: wait for it a moment."""
        if idle:
            next(iter(self.waiting.values())).wait(_WAIT_S)
        for sequence, prefetch in list(self.waiting.items()):
            if prefetch.done or now_ns > prefetch.deadline_ns:
                self._pinned[sequence] = self.waiting.pop(sequence)
                self._scheduler.add(sequence)

    def begun(self, sequence: Sequence) -> None:
        """It has its blocks."""
        prefetch = self._pinned.pop(sequence, None)
        if prefetch is not None:
            self._tiers.end(prefetch)

    def remove(self, sequence: Sequence) -> bool:
        """Forget it, wherever it is; whether it was still waiting for the disk."""
        prefetch = self.waiting.pop(sequence, None)
        if prefetch is not None:
            self._tiers.end(prefetch)
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
