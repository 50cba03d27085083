"""Host memory under every order of its operations: bounded, least recently used first, pins respected."""

import numpy as np
from hand_clock import HandClock
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from engine.cache.host_tier import HostTier
from engine.cache.tiers import Prefetch
from protocol.handoff import KvPayload

keys = st.integers(0, 6).map(lambda number: bytes([number]) * 16)
SIZE, BOUND, TTL_NS = 10, 45, 1000


class HostMachine(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.clock = HandClock()
        self.evicted: list[bytes] = []
        self.tier = HostTier(BOUND, self.clock, TTL_NS, lambda key, _: self.evicted.append(key))
        self.used: dict[bytes, int] = {}  # oldest use first
        self.pins: list[bytes] = []
        self.reserved = 0

    def payload(self, key: bytes) -> KvPayload:
        return np.frombuffer(key[:SIZE], np.uint8)

    def expire(self) -> None:
        oldest = self.clock.now - TTL_NS
        self.used = {k: t for k, t in self.used.items() if t >= oldest or k in self.pins}

    def use(self, key: bytes) -> None:
        self.used.pop(key, None)
        self.used[key] = self.clock.now

    def make_room(self, num_bytes: int) -> bool:
        pinned = SIZE * len(set(self.pins))
        if pinned + self.reserved + num_bytes > BOUND:
            return False
        while SIZE * len(self.used) + self.reserved + num_bytes > BOUND:
            self.used.pop(next(key for key in self.used if key not in self.pins))
        return True

    @rule(key=keys)
    def put(self, key: bytes) -> None:
        self.expire()
        made = key in self.used or self.make_room(SIZE)
        assert self.tier.put(key, self.payload(key)) == made
        if made:
            self.use(key)

    @rule(key=keys)
    def get(self, key: bytes) -> None:
        self.expire()
        found = self.tier.get(key)
        assert (found is not None) == (key in self.used)
        if found is not None:
            assert np.array_equal(found, self.payload(key))
            self.use(key)

    @rule(key=keys)
    def pin(self, key: bytes) -> None:
        if self.tier.pin(key):
            self.pins.append(key)
        assert (key in self.pins) or key not in self.tier

    @rule(key=keys)
    def unpin(self, key: bytes) -> None:
        if key in self.pins:
            self.tier.unpin(key)
            self.pins.remove(key)
            if key not in self.pins:
                self.use(key)

    @rule(key=keys)
    def drop(self, key: bytes) -> None:
        self.tier.drop(key)
        if key not in self.pins:
            self.used.pop(key, None)

    @rule(num_bytes=st.integers(1, 30))
    def reserve(self, num_bytes: int) -> None:
        made = self.make_room(num_bytes)
        assert self.tier.reserve(num_bytes) == made
        self.reserved += num_bytes * made

    @rule()
    def free(self) -> None:
        self.tier.free(self.reserved)
        self.reserved = 0

    @rule(ns=st.sampled_from([1, 600]))
    def wait(self, ns: int) -> None:
        self.clock.now += ns

    @invariant()
    def books_balance(self) -> None:
        self.tier.check_integrity()
        counts = self.tier.statistics()
        assert (counts.pinned, counts.reserved_bytes) == (len(self.pins), self.reserved)
        assert set(self.pins) <= {key for key, _ in self.tier.entries()}
        assert counts.bytes + counts.reserved_bytes <= BOUND


TestHostTier = HostMachine.TestCase
TestHostTier.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)


class CountedEntry(np.ndarray):
    """A payload that counts who looks at its size."""

    looks = 0

    @property
    def nbytes(self) -> int:
        CountedEntry.looks += 1
        return SIZE


def test_what_is_pinned_is_not_looked_through() -> None:
    tier = HostTier(3000 * SIZE, HandClock())
    CountedEntry.looks = 0
    for number in range(3000):  # and the last thousand of them evict, behind two thousand that are pinned
        key = number.to_bytes(16, "big")
        assert tier.put(key, np.zeros(1, np.uint8).view(CountedEntry))
        if number < 2000:
            assert tier.pin(key)
    assert tier.reserve(500 * SIZE)
    assert CountedEntry.looks < 10 * 3000
    assert tier.statistics().pinned == 2000
    tier.check_integrity()


def test_the_end_of_a_prefix_goes_before_its_start() -> None:
    tier = HostTier(3 * SIZE, HandClock())
    prefetch = Prefetch(0)
    start, middle, end, other = (bytes([number]) * 16 for number in range(4))
    for key in (start, middle, end):
        tier.put(key, np.zeros(SIZE, np.uint8))
        prefetch.hold(tier, key)
    prefetch.release()
    tier.put(other, np.zeros(SIZE, np.uint8))
    assert end not in tier
    assert start in tier
