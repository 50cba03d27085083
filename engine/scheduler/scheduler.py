"""Continuous batching with chunked prefill under a budget of rows a step.

Running sequences decode first, one row each; what is left of the budget goes to prompts, in order of
(priority, arrival). When blocks run out, the least urgent running sequence is preempted: its blocks go, its
tokens stay, and it is computed again later, to the same bits: behind the same cached prefix as at first, even
where that is gone meanwhile and its entries have to be computed anew.
"""

from dataclasses import dataclass
from typing import Protocol

from engine.cache.block_pool import BlockPool
from engine.cache.keys import block_key
from engine.model.base import Bounds
from engine.request import Sequence


@dataclass(frozen=True, slots=True)
class Chunk:
    """The next `count` positions of a sequence, from `sequence.num_computed` on."""

    sequence: Sequence
    count: int

    @property
    def completes(self) -> bool:
        """Whether the chunk reaches the newest token, so that the next one can be chosen."""
        return self.count == self.sequence.num_missing


class PrefixRules(Protocol):
    """What a model makes of a cached prefix: see `engine.model.base.Model`."""

    @property
    def resumes_exactly(self) -> bool: ...
    def bounds(self, num_prompt: int, num_cached: int) -> Bounds: ...


@dataclass(frozen=True, slots=True)
class SchedulerStatistics:
    waiting: int
    running: int
    preemptions: int


class Scheduler:
    """Not thread-safe: the engine's loop owns it."""

    def __init__(
        self, pool: BlockPool, rules: PrefixRules, *, max_sequences: int, token_budget: int, salt: bytes
    ) -> None:
        self._pool = pool
        self._rules = rules
        self._max_sequences = max_sequences
        self._slots = list(range(max_sequences - 1, -1, -1))  # free ones
        self._token_budget = token_budget
        self._salt = salt  # the model's fingerprint starts every chain of block hashes
        self.waiting: list[Sequence] = []
        self.running: list[Sequence] = []
        self._preemptions = 0

    def add(self, sequence: Sequence) -> None:
        self.waiting.append(sequence)
        self.waiting.sort(key=_urgency)

    def remove(self, sequence: Sequence) -> None:
        """Forget a sequence and give its blocks back, whatever state it is in."""
        (self.running if sequence in self.running else self.waiting).remove(sequence)
        self._release(sequence)

    def schedule(self) -> list[Chunk]:
        """The chunks of the next step; their sequences hold the blocks for them."""
        budget = self._token_budget
        chunks: list[Chunk] = []
        for sequence in sorted(self.running, key=_turn):
            if sequence not in self.running or budget == 0:
                continue  # preempted by a more urgent one in this very step
            count = _next_count(sequence, budget)
            if not self._make_room(sequence, count):
                continue
            chunks.append(Chunk(sequence, count))
            budget -= count
        while self.waiting and budget > 0 and len(self.running) < self._max_sequences:
            sequence = self.waiting[0]
            if not self._admit(sequence):
                break
            count = _next_count(sequence, budget)
            chunks.append(Chunk(sequence, count))
            budget -= count
        return [chunk for chunk in chunks if chunk.sequence in self.running]

    def computed(self, chunk: Chunk) -> None:
        """The chunk's KV is in the cache; full blocks of it become known to the prefix cache."""
        sequence = chunk.sequence
        sequence.num_computed += chunk.count
        size = self._pool.block_tokens
        while (sequence.num_registered + 1) * size <= sequence.num_computed:
            newest = self._chain(sequence, sequence.num_registered + 1)[sequence.num_registered]
            self._pool.register(sequence.blocks[sequence.num_registered], newest)
            sequence.num_registered += 1
        bounds = sequence.bounds
        if sequence.rebuilding and bounds is not None and sequence.num_computed == bounds.write_from:
            sequence.rebuilding = sequence.begun = False
            sequence.num_computed = bounds.start

    def statistics(self) -> SchedulerStatistics:
        return SchedulerStatistics(len(self.waiting), len(self.running), self._preemptions)

    def check_integrity(self) -> None:
        """Blocks and slots held equal those owned by running sequences; raises AssertionError."""
        assert not any(s.blocks for s in self.waiting), "a waiting sequence holds blocks"
        assert all(s.slot == -1 for s in self.waiting), "a waiting sequence holds a slot"
        slots = sorted([*self._slots, *(s.slot for s in self.running)])
        assert slots == list(range(self._max_sequences)), "a slot is neither held by one sequence nor free"
        self._pool.check_integrity(block for s in self.running for block in s.blocks)

    def _admit(self, sequence: Sequence) -> bool:
        """Give a waiting sequence its known prefix, blocks for all its tokens and a slot, and let it run."""
        size = self._pool.block_tokens
        prefix = [] if sequence.incoming is not None else self._prefix_hashes(sequence)
        num_known, _ = self._pool.count_known(prefix)
        bounds = sequence.bounds
        if bounds is None or (self._rules.resumes_exactly and sequence.incoming is None):
            bounds = self._rules.bounds(sequence.num_prompt, num_known * size)
        rebuilding = sequence.incoming is None and num_known * size < bounds.write_from
        prefix = [] if rebuilding else prefix[: bounds.write_from // size]
        num_known, num_free = self._pool.count_known(prefix)
        needed = self._pool.blocks_for(len(sequence.token_ids)) - num_known
        if needed > self._pool.num_available - num_free:
            return False
        sequence.blocks = self._pool.match(prefix) + self._pool.allocate(needed)
        sequence.bounds, sequence.rebuilding, sequence.begun = bounds, rebuilding, False
        if sequence.incoming is not None:
            sequence.num_computed = sequence.num_prompt
        else:
            sequence.num_computed = 0 if rebuilding else bounds.start
        sequence.num_registered = num_known
        if sequence.num_generated == 0 and sequence.incoming is None:
            sequence.num_cached = bounds.write_from
        sequence.slot = self._slots.pop()
        self.waiting.remove(sequence)
        self.running.append(sequence)
        return True

    def _prefix_hashes(self, sequence: Sequence) -> list[bytes]:
        """Hashes of the full blocks before the newest token, which must be computed to go on from it."""
        num_blocks = (len(sequence.token_ids) - 1) // self._pool.block_tokens
        return self._chain(sequence, num_blocks)[:num_blocks]

    def _chain(self, sequence: Sequence, num_blocks: int) -> list[bytes]:
        """At least so many hashes. Kept: tokens only come to be more, and who is blocked asks every step."""
        size, chain = self._pool.block_tokens, sequence.chain
        for index in range(len(chain), num_blocks):
            previous = chain[-1] if chain else self._salt
            chain.append(block_key(previous, sequence.token_ids[index * size : (index + 1) * size]))
        return chain

    def _make_room(self, sequence: Sequence, count: int) -> bool:
        """Blocks for the next `count` positions, preempting less urgent sequences; False if it was itself."""
        needed = self._pool.blocks_for(sequence.num_computed + count) - len(sequence.blocks)
        while needed > self._pool.num_available:
            victim = max(self.running, key=_urgency)
            self._preempt(victim)
            if victim is sequence:
                return False
        sequence.blocks += self._pool.allocate(max(needed, 0))
        return True

    def _preempt(self, sequence: Sequence) -> None:
        self._release(sequence)
        self.running.remove(sequence)
        self.add(sequence)
        self._preemptions += 1

    def _release(self, sequence: Sequence) -> None:
        self._pool.release(sequence.blocks)
        if sequence.slot >= 0:
            self._slots.append(sequence.slot)
        sequence.blocks, sequence.slot = [], -1
        sequence.num_computed = sequence.num_registered = 0


def _next_count(sequence: Sequence, budget: int) -> int:
    """Rows of the next chunk. Entries that are computed anew end where the known ones ended."""
    end = len(sequence.token_ids)
    if sequence.rebuilding and sequence.bounds is not None:
        end = sequence.bounds.write_from
    return min(end - sequence.num_computed, budget)


def _turn(sequence: Sequence) -> tuple[bool, tuple[int, int, str]]:
    """Sequences that need one row come first: a long prompt, however urgent, never holds up decoding."""
    return (sequence.num_missing > 1, _urgency(sequence))


def _urgency(sequence: Sequence) -> tuple[int, int, str]:
    return (sequence.request.priority, sequence.stages.arrived_ns, sequence.id)
