"""The block pool under every order of its operations, against a model that remembers contents."""

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    Bundle,
    RuleBasedStateMachine,
    consumes,
    invariant,
    multiple,
    precondition,
    rule,
)

from engine.cache.block_pool import BlockPool, chain_hash

NUM_BLOCKS, BLOCK = 6, 4
hashes = st.integers(0, 5).map(lambda content: chain_hash(b"salt", [content]))


class PoolMachine(RuleBasedStateMachine):
    """`held` has one entry a reference; `contents` says what each block holds as far as anyone told."""

    def __init__(self) -> None:
        super().__init__()
        self.pool = BlockPool(NUM_BLOCKS, BLOCK)
        self.held: list[int] = []
        self.contents: dict[int, bytes] = {}

    references = Bundle("references")

    @precondition(lambda self: self.pool.num_available > 0)
    @rule(target=references, data=st.data())
    def allocate(self, data: st.DataObject) -> object:
        blocks = self.pool.allocate(data.draw(st.integers(1, self.pool.num_available)))
        assert not set(blocks) & set(self.held), "a held block was given out again"
        assert len(set(blocks)) == len(blocks)
        for block in blocks:
            self.contents.pop(block, None)
        self.held += blocks
        return multiple(*blocks)

    @rule(block=references, content=hashes)
    def register(self, block: int, content: bytes) -> None:
        if content not in self.contents.values() and block not in self.contents:
            self.contents[block] = content
        self.pool.register(block, content)

    @rule(target=references, chain=st.lists(hashes, max_size=4, unique=True))
    def match(self, chain: list[bytes]) -> object:
        num_known, num_free = self.pool.count_known(chain)
        before = self.pool.num_available
        blocks = self.pool.match(chain)
        assert (num_known, num_free) == (len(blocks), before - self.pool.num_available)
        known = [content in self.contents.values() for content in chain]
        expected = known.index(False) if False in known else len(chain)
        assert [self.contents[block] for block in blocks] == chain[:expected]
        self.held += blocks
        return multiple(*blocks)

    @rule(blocks=st.lists(consumes(references), max_size=3))
    def release(self, blocks: list[int]) -> None:
        self.pool.release(blocks)
        for block in blocks:
            self.held.remove(block)

    @rule()
    def refuse_to_over_commit(self) -> None:
        with pytest.raises(AssertionError, match="available"):
            self.pool.allocate(self.pool.num_available + 1)

    @invariant()
    def books_balance(self) -> None:
        self.pool.check_integrity(self.held)
        counts = self.pool.statistics()
        assert counts.held == len(set(self.held))
        assert counts.held + counts.cached + counts.blank == counts.total == NUM_BLOCKS
        assert self.pool.num_available == NUM_BLOCKS - counts.held


TestBlockPool = PoolMachine.TestCase
TestBlockPool.settings = settings(max_examples=60, stateful_step_count=30, deadline=None)


def test_the_least_recently_released_end_is_evicted_first() -> None:
    pool = BlockPool(4, BLOCK)
    chain = [chain_hash(b"", [n]) for n in range(4)]
    blocks = pool.allocate(4)
    for block, content in zip(blocks, chain, strict=True):
        pool.register(block, content)
    pool.release(blocks)
    assert pool.allocate(1) == [blocks[3]]
    assert pool.match(chain) == blocks[:3]
    assert pool.statistics().evictions == 1


def test_releasing_twice_fails() -> None:
    pool = BlockPool(2, BLOCK)
    blocks = pool.allocate(1)
    pool.release(blocks)
    with pytest.raises(AssertionError, match="released twice"):
        pool.release(blocks)


def test_integrity_finds_a_leak() -> None:
    pool = BlockPool(2, BLOCK)
    pool.allocate(1)
    with pytest.raises(AssertionError, match="without an owner"):
        pool.check_integrity([])


def test_a_block_hash_covers_everything_before_it() -> None:
    assert chain_hash(chain_hash(b"", [1]), [2]) != chain_hash(chain_hash(b"", [3]), [2])
    assert chain_hash(b"", [1, 2]) != chain_hash(b"", [2, 1])
