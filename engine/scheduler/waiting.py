"""Those that wait, the most urgent first: what `min(waiting, key=urgency)` finds, without looking at all.

How urgent one is changes while it waits in one way alone: some time it has waited too long, for good
(engine.scheduler.urgency). So there are two heaps, of those that have and of those that have not, and a third
that tells when the next one moves from one to the other. Entries of what has left lie in the heaps until they
come up, or until they are most of a heap.
"""

import heapq
from collections.abc import Iterator
from typing import TypeVar

from engine.request import Sequence
from engine.scheduler.urgency import is_starving, starves_at, urgency

_Order = TypeVar("_Order")
_Heap = list[tuple[_Order, int, Sequence]]  # the number tells a newer entry of a sequence from older ones
_Urgency = tuple[int, int, int, str, int]  # behind its first field
_BEFORE_ALL = -(1 << 62)


class WaitingLine:
    """Not thread-safe. Iterates in order of arrival in the line; adding and taking cost O(log n)."""

    def __init__(self, starvation_ns: int) -> None:
        self._starvation_ns = starvation_ns
        self._present: dict[Sequence, int] = {}  # and the number of its entries
        self._number = 0
        self._calm: _Heap[_Urgency] = []
        self._starving: _Heap[_Urgency] = []
        self._due: _Heap[int] = []  # by when they starve
        self._too_long: set[Sequence] = set()
        self._now_ns = _BEFORE_ALL

    def __len__(self) -> int:
        return len(self._present)

    def __iter__(self) -> Iterator[Sequence]:
        return iter(self._present)

    def __contains__(self, sequence: object) -> bool:
        return sequence in self._present

    @property
    def any_starving(self) -> bool:
        return bool(self._too_long)

    def add(self, sequence: Sequence) -> None:
        if is_starving(sequence, self._now_ns, self._starvation_ns):
            self._add_starving(sequence)
        else:
            order, number = self._order(sequence), self._new_number(sequence)
            heapq.heappush(self._calm, (order, number, sequence))
            heapq.heappush(self._due, (starves_at(sequence, self._starvation_ns), number, sequence))
        self._compact()

    def remove(self, sequence: Sequence) -> None:
        """Raises KeyError where it does not wait."""
        del self._present[sequence]
        self._too_long.discard(sequence)
        self._compact()

    def advance(self, now_ns: int) -> None:
        """Mark those that have waited too long by now, for as long as they have no new token."""
        self._now_ns = now_ns
        while self._due and self._due[0][0] < now_ns:
            _, number, sequence = heapq.heappop(self._due)
            if self._present.get(sequence) == number:
                self._add_starving(sequence)

    def first(self) -> Sequence:
        """The most urgent one at the time that `advance` was told. There must be one."""
        for heap in (self._starving, self._calm):
            while heap:
                _, number, sequence = heap[0]
                if self._present.get(sequence) == number:
                    return sequence
                heapq.heappop(heap)
        raise AssertionError("nobody waits")

    def check_integrity(self) -> None:
        """Each is in the heap of its kind, once; raises AssertionError."""
        starving, calm, due = (
            [s for _, number, s in heap if self._present.get(s) == number]
            for heap in (self._starving, self._calm, self._due)
        )
        assert len(starving) + len(calm) == len({*starving, *calm}), "one that waits is in two heaps"
        assert {*starving, *calm} == self._present.keys(), "one that waits is in no heap"
        assert set(due) == set(calm), "one that waits never starves, or does so twice"
        assert set(starving) == self._too_long, "one that has waited too long is not known for it"

    def _add_starving(self, sequence: Sequence) -> None:
        sequence.owed_at = len(sequence.token_ids)
        self._too_long.add(sequence)
        order = self._order(sequence)
        heapq.heappush(self._starving, (order, self._new_number(sequence), sequence))

    def _order(self, sequence: Sequence) -> _Urgency:
        return urgency(sequence, self._now_ns, self._starvation_ns)[1:]

    def _new_number(self, sequence: Sequence) -> int:
        self._number += 1
        self._present[sequence] = self._number
        return self._number

    def _compact(self) -> None:
        for heap in (self._calm, self._starving):
            self._drop_old(heap)
        self._drop_old(self._due)

    def _drop_old(self, heap: _Heap[_Order]) -> None:
        if not self._present:
            heap.clear()
        elif len(heap) > 64 + 2 * len(self._present):
            heap[:] = [entry for entry in heap if self._present.get(entry[2]) == entry[1]]
            heapq.heapify(heap)
