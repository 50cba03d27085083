"""Continuous batching with chunked prefill under a budget of rows a step.

Running sequences decode first, one row each; what is left of the budget goes to prompts, in order of urgency
(engine.scheduler.urgency). When blocks run out, the least urgent running sequence is preempted: its state is
swapped to host memory, or its blocks go and it is computed again later, to the same bits along its lineage.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Literal

from engine.cache.block_pool import BlockPool
from engine.cache.keys import root_key
from engine.model.bounds import ResumeRules
from engine.request import Sequence
from engine.scheduler.admission import Admission, plan_admission
from engine.scheduler.counts import Counts, SchedulerStatistics
from engine.scheduler.kept import KeptKv, NothingKept
from engine.scheduler.orders import Begin, CopyBlock, KeepBlock, LoadBlock, Order, ShowBlock, SwapOut
from engine.scheduler.prefix import Path, extend_chain, known_path
from engine.scheduler.urgency import Urgency, is_starving, outranks, urgency
from engine.scheduler.waiting import WaitingLine

Preemption = Literal["recompute", "swap"]
_NEVER_NS = 1 << 62


@dataclass(frozen=True, slots=True)
class Limits:
    """`window_interval`: positions of a prompt between kept windows, a multiple of a block."""

    max_sequences: int
    token_budget: int
    starvation_ns: int = _NEVER_NS
    window_interval: int = 0  # keeps none
    preemption: Preemption = "recompute"  # swap falls back to it where host memory has no room


@dataclass(frozen=True, slots=True)
class Chunk:
    """The next `count` positions of a sequence, from `sequence.num_computed` on."""

    sequence: Sequence
    count: int

    @property
    def completes(self) -> bool:
        """Whether the chunk reaches the newest token, so that the next one can be chosen."""
        return self.count == self.sequence.num_missing


@dataclass(frozen=True, slots=True)
class Plan:
    """A step: first the orders one after another, then all chunks at once."""

    chunks: list[Chunk] = field(default_factory=list[Chunk])
    orders: list[Order] = field(default_factory=list[Order])


class Scheduler:
    """Not thread-safe: the engine's loop owns it."""

    def __init__(
        self, pool: BlockPool, rules: ResumeRules, limits: Limits, *, model: str, kept: KeptKv | None = None
    ) -> None:
        """`model`: fingerprint of the weights, with which every chain of keys begins."""
        self.model, self.version = model, ""
        self.waiting = WaitingLine(limits.starvation_ns)
        self.running: list[Sequence] = []
        self._pool, self._rules, self._limits = pool, rules, limits
        self._kept: KeptKv = kept or NothingKept()
        self._slots = list(range(limits.max_sequences - 1, -1, -1))  # free ones
        self._orders: list[Order] = []
        self._counts = Counts()
        self._now_ns = 0
        self._rows: dict[Sequence, int] = {}  # of the step that is being scheduled
        self._budget = 0  # rows that it has left
        pool.on_evict = lambda block, key: self._orders.append(KeepBlock(block, key))

    def add(self, sequence: Sequence) -> None:
        self.waiting.add(sequence)

    def remove(self, sequence: Sequence) -> None:
        """Forget a sequence and give its blocks back, whatever state it is in."""
        (self.running if sequence in self.running else self.waiting).remove(sequence)
        self._release(sequence)

    def schedule(self, now_ns: int = 0) -> Plan:
        """The next step; the chunks' sequences hold the blocks for them."""
        self._now_ns, self._rows = now_ns, {}
        self.waiting.advance(now_ns)
        for sequence in self.running:
            if is_starving(sequence, now_ns, self._limits.starvation_ns):
                sequence.owed_at = len(sequence.token_ids)
        owed = self._owed_rows()
        # Those that run may take every row of every step; half of them is for one left waiting too long.
        reserved = -(-self._limits.token_budget // 2) if self.waiting.any_starving else 0
        self._budget = self._limits.token_budget - reserved
        self._run_on(owed)
        self._budget += reserved
        while self.waiting and self._budget > 0:
            sequence = self.waiting.first()
            if not self._admit(sequence):
                break
            self._give_rows(sequence, self._next_count(sequence))
        if not self._rows:  # all of it was kept for one that lacks blocks
            self._run_on(owed)
        rows, self._rows = self._rows, {}  # or the last ones would be kept for as long as nothing comes
        chunks = [Chunk(sequence, count) for sequence, count in rows.items()]
        for sequence in rows:
            sequence.served_ns = now_ns
        orders, self._orders = self._orders, []
        return Plan(chunks, orders)

    def computed(self, chunk: Chunk) -> list[tuple[int, bytes]]:
        """The chunk's KV is in the cache. Its full blocks that become known by it, and their keys."""
        sequence = chunk.sequence
        sequence.num_computed += chunk.count
        found = self._register(sequence)
        if sequence.num_computed == sequence.passes[0].stop:
            sequence.passes = sequence.passes[1:]
            sequence.num_computed = sequence.row_bounds.start
            self._orders.append(Begin(sequence, sequence.held(sequence.num_computed), None))
        return found

    def windows_due(self, sequence: Sequence) -> bytes | None:
        """The key under which the slot's windows are worth keeping just now.

        Never of rows before the last resumed place: those have windows of another lineage.
        """
        position, size = sequence.num_computed, self._pool.block_tokens
        after = max(sequence.resumed or (0,), default=0)
        unkept = self._rules.window == 0 or self._limits.window_interval == 0
        if unkept or position % size or position <= after or sequence.rebuilding:
            return None
        if position <= sequence.num_prompt and position != self._next_window_place(sequence, position - 1):
            return None
        # A stream begun elsewhere has no chain yet where its first blocks were known.
        return extend_chain(sequence, self._root(sequence), size, position // size)[position // size - 1]

    def known_path(self, sequence: Sequence, known: Callable[[bytes], bool]) -> Path:
        """How far `known` blocks reach along the sequence's tokens."""
        size, window = self._pool.block_tokens, self._rules.window
        return known_path(sequence, self._root(sequence), size, window, known)

    def runs_fork(self, parent: Sequence) -> bool:
        """Whether a child of it would run at once, and not wait."""
        begun = parent in self.running and not parent.rebuilding and not self._begins(parent)
        return bool(self._slots) and begun

    def fork(self, parent: Sequence, child: Sequence) -> bool:
        """Let a child run behind the same positions, on the same blocks. False: no slot, so it waits."""
        if not self.runs_fork(parent):
            self.add(child)
            return False
        self._counts.forks += 1
        child.blocks = self._pool.share(parent.blocks)
        child.num_computed, child.num_registered = parent.num_computed, parent.num_registered
        child.passes, child.slot = parent.passes, self._slots.pop()
        self.running.append(child)
        return True

    def start_again(self, sequence: Sequence) -> None:
        """What was to be swapped out is lost: it is computed again, also where it came back at once."""
        sequence.num_incoming = 0
        if sequence in self.running:
            self._preempt(sequence, swap=False)
        sequence.passes = ()
        self._counts.swapped -= 1

    def begin_again(self, unbegun: Iterable[Sequence], blocks: set[int]) -> list[Sequence]:
        """What `unbegun` ones go on from is not there, and `blocks` hold anything: whoever has one of these
        is computed again too. All that are."""
        lost = set(unbegun)
        again = [s for s in self.running if s in lost or not blocks.isdisjoint(s.blocks)]
        for sequence in again:
            self._preempt(sequence, swap=False)
        self._pool.forget_blocks(blocks)
        return again

    def renew(self, model: str, version: str) -> None:
        """The weights have changed: nothing that is cached fits any more, and what runs is computed again."""
        for sequence in list(self.running):
            self._preempt(sequence, swap=False)
        for sequence in self.waiting:
            sequence.chain, sequence.keys = [], {}
            sequence.incoming, sequence.num_incoming, sequence.resumed = None, 0, None
            sequence.passes, sequence.windows_key = (), None
        self._pool.forget()
        self._orders.clear()
        self.model, self.version = model, version

    def statistics(self) -> SchedulerStatistics:
        return self._counts.statistics(len(self.waiting), len(self.running))

    def check_integrity(self) -> None:
        """Blocks and slots held equal those owned by running sequences; raises AssertionError."""
        self.waiting.check_integrity()
        assert not any(s.blocks for s in self.waiting), "a waiting sequence holds blocks"
        assert all(s.slot == -1 for s in self.waiting), "a waiting sequence holds a slot"
        slots = sorted([*self._slots, *(s.slot for s in self.running)])
        assert slots == list(range(self._limits.max_sequences)), (
            "a slot is neither held by one sequence nor free"
        )
        self._pool.check_integrity(block for s in self.running for block in s.blocks)

    def _register(self, sequence: Sequence) -> list[tuple[int, bytes]]:
        """Make its full blocks known; those that were not, and their keys."""
        found: list[tuple[int, bytes]] = []
        size = self._pool.block_tokens
        first, stop = sequence.num_registered, sequence.num_computed // size
        if first >= stop:
            return found
        chain = extend_chain(sequence, self._root(sequence), size, stop)
        # Those before may have been forgotten, or another's evicted that was known in place of ours.
        while first > 0 and not self._pool.knows(chain[first - 1]):
            first -= 1
        for index in range(first, stop):
            tokens = sequence.token_ids[index * size : (index + 1) * size]
            parent = chain[index - 1] if index else None
            if self._pool.register(sequence.blocks[index], chain[index], parent, tokens):
                found.append((sequence.blocks[index], chain[index]))
        sequence.num_registered = stop
        return found

    # ------------------------------------------------------------------ who runs
    def _run_on(self, owed: int) -> None:
        """Rows for those that run. `owed`: of prompts of those left waiting too long."""
        for sequence in sorted(self.running, key=self._turn):
            if sequence not in self.running or self._budget == 0:
                continue  # preempted by a more urgent one in this very step
            count = self._next_count(sequence)
            if sequence.num_missing > 1 and not self._urgency(sequence)[0]:
                count = min(count, owed)
                owed -= count
            if count and self._make_room(sequence, count):
                self._give_rows(sequence, count)

    def _turn(self, sequence: Sequence) -> tuple[bool, bool, Urgency]:
        """Those left waiting too long come first, then all that need one row: a long prompt, however urgent,
        never holds up decoding."""
        urgent = self._urgency(sequence)
        return (urgent[0], sequence.num_missing > 1, urgent)

    def _urgency(self, sequence: Sequence) -> Urgency:
        return urgency(sequence, self._now_ns, self._limits.starvation_ns)

    def _owed_rows(self) -> int:
        """Rows of a step for the prompts of those left waiting too long: half, and what decoding leaves."""
        half = -(-self._limits.token_budget // 2)
        decoding = sum(sequence.num_missing == 1 for sequence in self.running)
        return max(half, self._limits.token_budget - decoding)

    def _give_rows(self, sequence: Sequence, count: int) -> None:
        """Of the step that is being scheduled."""
        self._rows[sequence] = count
        self._budget -= count

    def _next_count(self, sequence: Sequence) -> int:
        """Rows of the next chunk. Chunks end where windows are kept: those of a later row would be others."""
        start = sequence.num_computed
        end = sequence.passes[0].stop or len(sequence.token_ids)
        if self._rules.window and self._limits.window_interval and not sequence.rebuilding:
            end = min(end, self._next_window_place(sequence, start) or end)
        return min(end - start, self._budget)

    def _next_window_place(self, sequence: Sequence, start: int) -> int:
        """Where windows of a prompt are kept next: at its last block's end, for a next turn; a window before
        that, for the same prompt once more; at intervals, for others that share its start. 0: nowhere."""
        size, prompt, every = self._pool.block_tokens, sequence.num_prompt, self._limits.window_interval
        ends = (
            prompt // size * size,
            (prompt - self._rules.window) // size * size,
            (start // every + 1) * every,
        )
        return min((end for end in ends if start < end <= prompt), default=0)

    # ------------------------------------------------------------------ who gets blocks
    def _admit(self, sequence: Sequence) -> bool:
        """Give a waiting sequence its known prefix, blocks for all its tokens and a slot, and let it run."""
        lower = self._lower(sequence)
        if not self._slots and not lower:
            return False
        admission = plan_admission(sequence, self._root(sequence), self._pool, self._rules, self._kept)
        sequence.has_asked = True
        if not self._fits(admission) and not self._make_way(lower, admission):
            return False
        self.waiting.remove(sequence)
        self._take(sequence, admission)
        self.running.append(sequence)
        return True

    def _fits(self, admission: Admission) -> bool:
        return bool(self._slots) and admission.fits(self._pool)

    def _take(self, sequence: Sequence, admission: Admission) -> None:
        start, pool = admission.start, self._pool
        resident = {key: pool.match([key])[0] for key, payload in admission.known if payload is None}
        fresh = pool.allocate(admission.num_needed)
        parent: bytes | None = None
        for index, (key, payload) in enumerate(admission.known):
            if payload is None:
                sequence.blocks.append(resident[key])
            else:
                block = fresh.pop()
                sequence.blocks.append(block)
                tokens = sequence.token_ids[index * pool.block_tokens : (index + 1) * pool.block_tokens]
                pool.register(block, key, parent, tokens)
                self._orders.append(LoadBlock(block, key, payload))
                self._counts.loaded_blocks += 1
            parent = key
        sequence.blocks += fresh
        sequence.slot, sequence.has_asked = self._slots.pop(), False
        self._count_start(sequence, admission)
        sequence.passes, sequence.num_computed = start.passes, start.position
        sequence.num_registered = len(admission.known)
        if sequence.resumed is None:
            sequence.num_cached = (
                start.num_known if len(start.resumed) > len(admission.path) else start.position
            )
            sequence.resumed = start.resumed
            sequence.chain = [key for key, _ in admission.known]
        fresh = tuple(sequence.blocks[len(admission.known) :]) if sequence.num_incoming else ()
        self._orders.append(Begin(sequence, sequence.held(sequence.num_computed), admission.windows, fresh))
        if sequence.incoming is not None:  # not while it is on its way to host memory, in this very step
            self._orders += [ShowBlock(block, key) for block, key in self._register(sequence)]

    def _count_start(self, sequence: Sequence, admission: Admission) -> None:
        if sequence.num_incoming:
            return
        start, counts = admission.start, self._counts
        counts.exact_resumes += admission.windows is not None
        counts.replayed_resumes += sequence.resumed is None and len(start.resumed) > len(admission.path)
        counts.rebuilt += len(start.passes) > 1

    def _lower(self, head: Sequence) -> list[Sequence]:
        """Running sequences whose place the first in the queue may take, the least urgent first."""
        starvation_ns = self._limits.starvation_ns
        lower = [s for s in self.running if outranks(head, s, self._now_ns, starvation_ns)]
        return sorted(lower, key=self._urgency, reverse=True)

    def _make_way(self, lower: list[Sequence], admission: Admission) -> bool:
        """Preempt as many of those as it takes to make room, if they are enough."""
        if not lower or not admission.fits(self._pool, (block for s in lower for block in s.blocks)):
            return False
        while lower and not self._fits(admission):
            self._preempt(lower.pop(0))
        return self._fits(admission)

    def _make_room(self, sequence: Sequence, count: int) -> bool:
        """Blocks for the next `count` positions, preempting less urgent sequences; False if it was itself."""
        stop = sequence.num_computed + count
        first = max(sequence.num_computed, sequence.row_bounds.write_from) // self._pool.block_tokens
        more = self._pool.blocks_for(stop) - len(sequence.blocks)
        copies = self._shared(sequence, first, stop)
        while max(more, 0) + len(copies) > self._pool.num_available:
            victim = max(self.running, key=self._urgency)
            self._preempt(victim)
            if victim is sequence:
                return False
            copies = self._shared(sequence, first, stop)
        for index, block in zip(copies, self._pool.allocate(len(copies)), strict=True):
            self._orders.append(CopyBlock(sequence.blocks[index], block))
            self._pool.release([sequence.blocks[index]])
            sequence.blocks[index] = block
        self._counts.copied_blocks += len(copies)
        sequence.blocks += self._pool.allocate(max(more, 0))
        return True

    def _shared(self, sequence: Sequence, first: int, stop: int) -> list[int]:
        """Which of its blocks the next rows write to while others hold them too."""
        end = min(self._pool.blocks_for(stop), len(sequence.blocks))
        return [i for i in range(first, end) if self._pool.is_shared(sequence.blocks[i])]

    def _preempt(self, sequence: Sequence, *, swap: bool = True) -> None:
        """A state that is still being rebuilt, or not begun, is not worth keeping."""
        whole = sequence.num_computed >= sequence.row_bounds.write_from and not sequence.rebuilding
        whole = whole and not self._begins(sequence)
        if swap and self._limits.preemption == "swap" and whole and sequence.num_computed > 0:
            held = sequence.held(sequence.num_computed)
            if sequence.incoming is None and self._kept.reserve(held):
                self._orders.append(SwapOut(sequence, held))
                sequence.num_incoming = held.num_positions
                self._counts.swapped += 1
        passes = sequence.passes
        self._release(sequence)
        sequence.passes = passes if sequence.num_incoming else ()
        self.running.remove(sequence)
        self._budget += self._rows.pop(sequence, 0)
        self.add(sequence)
        self._counts.preemptions += 1

    def _release(self, sequence: Sequence) -> None:
        self._pool.release(sequence.blocks)
        if sequence.slot >= 0:
            self._slots.append(sequence.slot)
        self._orders = [o for o in self._orders if not isinstance(o, Begin) or o.sequence is not sequence]
        sequence.blocks, sequence.slot = [], -1
        sequence.num_computed = sequence.num_registered = 0

    def _begins(self, sequence: Sequence) -> bool:
        """Whether its slot has what it goes on from by the next step alone."""
        return any(isinstance(order, Begin) and order.sequence is sequence for order in self._orders)

    def _root(self, sequence: Sequence) -> bytes:
        return root_key(self.model, self.version, sequence.request.cache_salt)
