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

from engine.cache.block_pool import BlockPool
from engine.cache.events import EventLog
from engine.cache.keys import block_key, root_key
from protocol.kv_events import AllBlocksCleared, BlockRemoved, BlockStored, KvEvent

NUM_BLOCKS, BLOCK = 6, 4
ROOT = root_key("model")
CHAINS = ((0,), (0, 1), (0, 1, 2), (0, 3), (4,), (4, 5))  # contents whose keys follow one another
contents = st.integers(0, len(CHAINS) - 1)


def key_of(path: tuple[int, ...]) -> bytes:
    key = ROOT
    for token in path:
        key = block_key(key, (token,))
    return key


def parent_of(path: tuple[int, ...]) -> bytes | None:
    return key_of(path[:-1]) if len(path) > 1 else None


class PoolMachine(RuleBasedStateMachine):
    """`held` has one entry a reference; `contents` says what each block holds as far as anyone told."""

    def __init__(self) -> None:
        super().__init__()
        self.events = EventLog()
        self.pool = BlockPool(NUM_BLOCKS, BLOCK, self.events)
        self.pool.on_evict = self.see_eviction
        self.held: list[int] = []
        self.contents: dict[int, tuple[int, ...]] = {}
        self.told: set[bytes] = set()

    references = Bundle("references")

    def see_eviction(self, block: int, key: bytes) -> None:
        """What goes is known, free, and followed by nothing, unless all that is free is followed."""
        path = self.contents[block]
        assert (key, block in self.held) == (key_of(path), False)
        known = set(self.contents.values())

        def followed(path: tuple[int, ...]) -> bool:
            return any(other[:-1] == path for other in known if len(other) > 1)

        free = [other for block, other in self.contents.items() if block not in self.held]
        assert not followed(path) or all(followed(other) for other in free)
        del self.contents[block]

    @precondition(lambda self: self.pool.num_available > 0)
    @rule(target=references, data=st.data())
    def allocate(self, data: st.DataObject) -> object:
        blocks = self.pool.allocate(data.draw(st.integers(1, self.pool.num_available)))
        assert not set(blocks) & (set(self.held) | self.contents.keys()), "a block was given out again"
        assert len(set(blocks)) == len(blocks)
        self.held += blocks
        return multiple(*blocks)

    @rule(block=references, content=contents)
    def register(self, block: int, content: int) -> None:
        path = CHAINS[content]
        fresh = path not in self.contents.values() and block not in self.contents
        if fresh:
            self.contents[block] = path
        assert self.pool.register(block, key_of(path), parent_of(path), path) == fresh

    @rule(target=references, content=contents)
    def match(self, content: int) -> object:
        path = CHAINS[content]
        chain = [key_of(path[: end + 1]) for end in range(len(path))]
        known = [path[: end + 1] in self.contents.values() for end in range(len(path))]
        expected = known.index(False) if False in known else len(path)
        num_free = self.pool.count_free(chain[:expected])
        blocks = self.pool.match(chain)
        assert num_free == self.pool.num_available
        assert [self.contents[block] for block in blocks] == [path[: end + 1] for end in range(expected)]
        self.held += blocks
        return multiple(*blocks)

    @rule(given=st.lists(st.integers(0, NUM_BLOCKS - 1), max_size=NUM_BLOCKS), content=contents)
    def count_free(self, given: list[int], content: int) -> None:
        """As counted by hand over what would be held then."""
        left = list(self.held)
        released = [block for block in given if block in left and (left.remove(block) or True)]
        shared = {block for block, path in self.contents.items() if CHAINS[content][: len(path)] == path}
        keys = [key_of(self.contents[block]) for block in sorted(shared)]
        assert self.pool.count_free(keys, released) == NUM_BLOCKS - len(shared | set(left))

    @rule(target=references, block=references)
    def share(self, block: int) -> int:
        self.held += self.pool.share([block])
        assert self.pool.is_shared(block)
        return block

    @rule(blocks=st.lists(consumes(references), max_size=3))
    def release(self, blocks: list[int]) -> None:
        self.pool.release(blocks)
        for block in blocks:
            self.held.remove(block)

    @rule()
    def forget(self) -> None:
        self.pool.forget()
        self.contents.clear()

    @rule(blocks=st.sets(st.integers(0, NUM_BLOCKS - 1), max_size=2))
    def forget_blocks(self, blocks: set[int]) -> None:
        gone = {self.contents[block] for block in blocks if block in self.contents}
        for path in sorted(self.contents.values(), key=len):
            if path[:-1] in gone:
                gone.add(path)
        self.pool.forget_blocks(blocks)
        self.contents = {block: path for block, path in self.contents.items() if path not in gone}

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

    @invariant()
    def events_tell_what_is_known(self) -> None:
        batch = self.events.cut(0.0)
        for event in batch.events if batch else ():
            self.told = after(self.told, event)
        assert self.told == {key_of(path) for path in self.contents.values()}


def after(told: set[bytes], event: KvEvent) -> set[bytes]:
    match event:
        case BlockStored(block_hashes=keys):
            return told | set(keys)
        case BlockRemoved(block_hashes=keys):
            return told - set(keys)
        case AllBlocksCleared():
            return set()


TestBlockPool = PoolMachine.TestCase
TestBlockPool.settings = settings(max_examples=60, stateful_step_count=30, deadline=None)


def chain_in(pool: BlockPool, path: tuple[int, ...]) -> list[int]:
    """Blocks that the pool knows as a chain, held."""
    blocks = pool.allocate(len(path))
    for end, block in enumerate(blocks, 1):
        pool.register(block, key_of(path[:end]), parent_of(path[:end]), path[end - 1 : end])
    return blocks


def test_the_least_recently_released_end_is_evicted_first() -> None:
    pool = BlockPool(4, BLOCK)
    blocks = chain_in(pool, (0, 1, 2, 3))
    pool.release(blocks)
    assert pool.allocate(1) == [blocks[3]]
    assert pool.match([key_of((0, 1, 2, 3)[:end]) for end in range(1, 5)]) == blocks[:3]
    assert pool.statistics().evictions == 1


def test_a_start_that_was_released_long_ago_outlives_what_follows_it() -> None:
    pool = BlockPool(4, BLOCK)
    start = chain_in(pool, (0, 1))
    pool.release(start)
    copies = pool.allocate(2)  # of the same content, which stays unknown
    assert not pool.register(copies[0], key_of((0,)), None)
    assert pool.register(copies[1], key_of((0, 1, 2)), key_of((0, 1)))
    pool.release(copies)  # the second one follows the older start
    assert pool.allocate(2) == [copies[0], copies[1]]
    assert pool.match([key_of((0,)), key_of((0, 1))]) == start


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
