"""Who owns which cache block, and which blocks hold a known prefix. Pure: no tensor in sight.

A block is in one of three states: held (reference count above 0), cached (count 0, content known by its key,
reusable until evicted) or blank. Eviction takes the least recently released block that no other known block
follows, so that prefixes lose their end before their start. Only where each free block is followed by a held
one, of somebody who has a copy of the start, does it take the least recently released of all.
"""

import heapq
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from engine.cache.events import EventLog


@dataclass(frozen=True, slots=True)
class PoolStatistics:
    total: int
    held: int
    cached: int
    blank: int
    evictions: int


class BlockPool:
    """Not thread-safe: the engine's loop owns it."""

    def __init__(self, num_blocks: int, block_tokens: int, events: EventLog | None = None) -> None:
        self.block_tokens = block_tokens
        self.on_evict: Callable[[int, bytes], None] | None = None  # before a known block's content goes
        self._events = events
        self._references = [0] * num_blocks
        self._keys: list[bytes | None] = [None] * num_blocks
        self._parents: list[bytes | None] = [None] * num_blocks
        self._by_key: dict[bytes, int] = {}
        self._children: Counter[bytes] = Counter()  # known blocks that follow the one with a key
        self._blank = list(range(num_blocks - 1, -1, -1))
        self._cached: dict[int, int] = {}  # block to the time of its release
        self._leaves: list[tuple[int, int]] = []  # heap of (time, block), stale entries among them
        self._time = self._evictions = 0

    @property
    def num_available(self) -> int:
        return len(self._blank) + len(self._cached)

    def blocks_for(self, num_tokens: int) -> int:
        return -(-num_tokens // self.block_tokens)

    def knows(self, key: bytes) -> bool:
        return key in self._by_key

    def match(self, keys: Iterable[bytes]) -> list[int]:
        """The longest run of known blocks from the start, now held by the caller."""
        found: list[int] = []
        for key in keys:
            block = self._by_key.get(key)
            if block is None:
                break
            self._hold(block)
            found.append(block)
        return found

    def count_free(self, shared: Iterable[bytes], released: Iterable[int] = ()) -> int:
        """How many blocks `allocate` could take beside known ones under the keys `shared`, which are held
        then, once `released` are given back (one entry a reference). Changes nothing."""
        given = Counter(released)
        freed = {block for block, count in given.items() if count == self._references[block]}
        found = {self._by_key[key] for key in shared if key in self._by_key}
        num_shared = sum(self._references[block] == 0 or block in freed for block in found)
        return self.num_available + len(freed) - num_shared

    def allocate(self, count: int) -> list[int]:
        """`count` blocks of unknown content, held once. Callers ask `num_available` first."""
        assert count <= self.num_available, f"{count} blocks wanted, {self.num_available} available"
        return [self._take() for _ in range(count)]

    def share(self, blocks: Iterable[int]) -> list[int]:
        """The same blocks for one more holder, who copies a block before it writes to it (`is_shared`)."""
        shared = list(blocks)
        for block in shared:
            assert self._references[block] > 0, f"block {block} is not held"
            self._references[block] += 1
        return shared

    def is_shared(self, block: int) -> bool:
        return self._references[block] > 1

    def register(
        self, block: int, key: bytes, parent: bytes | None = None, token_ids: Sequence[int] = ()
    ) -> bool:
        """Tell the pool what a full, held block contains; `parent` is the key of the block before it.

        A second copy of known content stays unknown: False.
        """
        assert self._references[block] > 0, f"block {block} is not held"
        if key in self._by_key or self._keys[block] is not None:
            return False
        self._by_key[key] = block
        self._keys[block], self._parents[block] = key, parent
        if parent is not None:
            self._children[parent] += 1
        if self._events is not None:
            self._events.stored(key, parent, tuple(token_ids), self.block_tokens, "GPU")
        return True

    def release(self, blocks: Iterable[int]) -> None:
        """Give blocks back, the last first, so that the end of a prefix is evicted before its start."""
        for block in reversed(list(blocks)):
            assert self._references[block] > 0, f"block {block} released twice"
            self._references[block] -= 1
            if self._references[block] == 0:
                self._free(block)

    def forget(self) -> None:
        """No content is known any more, here or elsewhere: the weights have changed, say. Held blocks stay
        held."""
        self._blank += reversed(self._cached)
        self._cached.clear()
        self._leaves.clear()
        self._by_key.clear()
        self._children.clear()
        self._keys = [None] * len(self._keys)
        self._parents = [None] * len(self._keys)
        if self._events is not None:
            self._events.cleared()

    def forget_blocks(self, blocks: Iterable[int]) -> None:
        """The content of these is not known any more, nor that of known ones behind them: whoever hears of a
        block has heard of those before it. Held ones stay held."""
        followers: dict[bytes, list[int]] = {}
        for block, parent in enumerate(self._parents):
            if parent is not None:
                followers.setdefault(parent, []).append(block)
        left, gone = list(blocks), dict[int, bytes]()
        while left:
            block = left.pop()
            key = self._keys[block]
            if key is not None and block not in gone:
                gone[block] = key
                left += followers.get(key, ())
        for block in reversed(gone):
            self._lose(block)
            if self._cached.pop(block, None) is not None:
                self._blank.append(block)
        if self._events is not None:
            self._events.removed([*gone.values()][::-1], "GPU")

    def statistics(self) -> PoolStatistics:
        total, cached, blank = len(self._references), len(self._cached), len(self._blank)
        return PoolStatistics(total, total - cached - blank, cached, blank, self._evictions)

    def check_integrity(self, held: Iterable[int]) -> None:
        """Every reference is accounted for by `held` (one entry a reference); raises AssertionError."""
        counts = [0] * len(self._references)
        for block in held:
            counts[block] += 1
        assert counts == self._references, "references without an owner, or owners without a reference"
        free = {*self._blank, *self._cached}
        assert len(free) == len(self._blank) + len(self._cached), "a block is free twice"
        assert free == {b for b, count in enumerate(counts) if count == 0}, "a block is neither held nor free"
        known = {block: key for block, key in enumerate(self._keys) if key is not None}
        assert known == {block: key for key, block in self._by_key.items()}, "the index of keys is stale"
        assert not known.keys() & set(self._blank), "a blank block has a key"
        followed = Counter(parent for parent in self._parents if parent is not None)
        assert followed == self._children, "a count of following blocks is wrong"

    def _hold(self, block: int) -> None:
        self._cached.pop(block, None)
        self._references[block] += 1

    def _free(self, block: int) -> None:
        key = self._keys[block]
        if key is None:
            self._blank.append(block)
            return
        self._time += 1
        self._cached[block] = self._time
        if not self._children[key]:
            self._push_leaf(block)

    def _push_leaf(self, block: int) -> None:
        heapq.heappush(self._leaves, (self._cached[block], block))
        if len(self._leaves) > 64 + 4 * len(self._cached):  # most of it is stale
            self._leaves = [(time, b) for b, time in self._cached.items() if self._is_leaf(b)]
            heapq.heapify(self._leaves)

    def _is_leaf(self, block: int) -> bool:
        key = self._keys[block]
        return key is not None and not self._children[key]

    def _take(self) -> int:
        block = self._blank.pop() if self._blank else self._evict()
        self._references[block] = 1
        return block

    def _evict(self) -> int:
        block = self._oldest_leaf()
        key = self._keys[block]
        assert key is not None
        if self.on_evict is not None:
            self.on_evict(block, key)
        del self._cached[block]
        self._lose(block)
        self._evictions += 1
        if self._events is not None:
            self._events.removed([key], "GPU")
        return block

    def _lose(self, block: int) -> None:
        """A known block's key."""
        key, parent = self._keys[block], self._parents[block]
        assert key is not None
        del self._by_key[key]
        self._keys[block] = self._parents[block] = None
        if parent is not None:
            self._unfollow(parent)

    def _oldest_leaf(self) -> int:
        while self._leaves:
            time, block = heapq.heappop(self._leaves)
            if self._cached.get(block) == time and self._is_leaf(block):
                return block
        # Every cached block has a follower that somebody holds, behind a copy of his own.
        return min(self._cached, key=lambda block: self._cached[block])

    def _unfollow(self, parent: bytes) -> None:
        self._children[parent] -= 1
        if not self._children[parent]:
            del self._children[parent]
            block = self._by_key.get(parent)
            if block is not None and block in self._cached:
                self._push_leaf(block)
