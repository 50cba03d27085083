"""Who owns which cache block, and which blocks hold a known prefix. Pure: no tensor in sight.

A block is in one of three states: held (reference count above 0), cached (count 0, content known by hash,
reusable until evicted) or blank. Blocks are evicted least recently released first.
"""

import hashlib
from collections import OrderedDict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class PoolStatistics:
    total: int
    held: int
    cached: int
    blank: int
    evictions: int


def chain_hash(previous: bytes, token_ids: Sequence[int]) -> bytes:
    """Hash of a block's tokens and of everything before them; the same in every process."""
    digest = hashlib.blake2b(previous, digest_size=16)
    digest.update(b"".join(token.to_bytes(4, "little") for token in token_ids))
    return digest.digest()


class BlockPool:
    """Not thread-safe: the engine's loop owns it."""

    def __init__(self, num_blocks: int, block_tokens: int) -> None:
        self.block_tokens = block_tokens
        self._references = [0] * num_blocks
        self._hashes: list[bytes | None] = [None] * num_blocks
        self._by_hash: dict[bytes, int] = {}
        self._blank = list(range(num_blocks - 1, -1, -1))
        self._cached: OrderedDict[int, None] = OrderedDict()  # least recently released first
        self._evictions = 0

    @property
    def num_available(self) -> int:
        return len(self._blank) + len(self._cached)

    def blocks_for(self, num_tokens: int) -> int:
        return -(-num_tokens // self.block_tokens)

    def match(self, hashes: Iterable[bytes]) -> list[int]:
        """The longest run of known blocks from the start, now held by the caller."""
        found: list[int] = []
        for block_hash in hashes:
            block = self._by_hash.get(block_hash)
            if block is None:
                break
            self._hold(block)
            found.append(block)
        return found

    def count_known(self, hashes: Iterable[bytes]) -> tuple[int, int]:
        """How many blocks `match` would find, and how many of them are free now. Changes nothing."""
        num_known = num_free = 0
        for block_hash in hashes:
            block = self._by_hash.get(block_hash)
            if block is None:
                break
            num_known += 1
            num_free += self._references[block] == 0
        return num_known, num_free

    def allocate(self, count: int) -> list[int]:
        """`count` blocks of unknown content, held once. Callers ask `num_available` first."""
        assert count <= self.num_available, f"{count} blocks wanted, {self.num_available} available"
        return [self._take() for _ in range(count)]

    def register(self, block: int, block_hash: bytes) -> None:
        """Tell the pool what a full, held block contains. A second copy of known content stays unknown."""
        assert self._references[block] > 0, f"block {block} is not held"
        if block_hash not in self._by_hash and self._hashes[block] is None:
            self._by_hash[block_hash] = block
            self._hashes[block] = block_hash

    def release(self, blocks: Iterable[int]) -> None:
        """Give blocks back, the last first, so that the end of a prefix is evicted before its start."""
        for block in reversed(list(blocks)):
            assert self._references[block] > 0, f"block {block} released twice"
            self._references[block] -= 1
            if self._references[block] == 0:
                if self._hashes[block] is None:
                    self._blank.append(block)
                else:
                    self._cached[block] = None

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
        assert all(self._hashes[block] == h for h, block in self._by_hash.items()), "the hash index is stale"

    def _hold(self, block: int) -> None:
        self._cached.pop(block, None)
        self._references[block] += 1

    def _take(self) -> int:
        block = self._blank.pop() if self._blank else self._evict()
        self._references[block] = 1
        return block

    def _evict(self) -> int:
        block, _ = self._cached.popitem(last=False)
        known = self._hashes[block]
        assert known is not None
        del self._by_hash[known]
        self._hashes[block] = None
        self._evictions += 1
        return block
