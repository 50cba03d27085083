"""A bounded log of what the caches took in and gave up, for whoever routes by it."""

import threading
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import takewhile
from typing import Protocol

from msgspec.structs import replace

from protocol.kv_events import (
    AllBlocksCleared,
    BlockRemoved,
    BlockStored,
    KvEvent,
    KvEventBatch,
    Medium,
)


class EventLog:
    """Thread-safe: the disk's thread tells of its files. Events gather until `cut` makes a numbered batch.

    The newest `kept` batches stay, for readers that missed some: they ask `since`. Nobody has to read.
    """

    def __init__(self, kept: int = 10_000) -> None:
        self.wake: Callable[[], None] = _nobody  # called at a first event, and at a new batch
        self._lock = threading.Lock()
        self._open: list[_Gathered] = []
        self._batches: deque[tuple[int, KvEventBatch]] = deque(maxlen=kept)
        self._next = 0

    @property
    def has_open(self) -> bool:
        """Whether there are events that no batch has yet."""
        return bool(self._open)

    def stored(
        self, key: bytes, parent: bytes | None, token_ids: tuple[int, ...], block_tokens: int, medium: Medium
    ) -> None:
        """A block has come; a chain of them becomes one event."""
        self._tell(BlockStored((key,), parent, token_ids, block_tokens, None, medium))

    def kept(self, keys: Sequence[bytes], block_tokens: int, medium: Medium) -> None:
        """A tier has blocks, in no order. As in vLLM neither their tokens are told nor what they follow: who
        knows a block has heard of both when it was on the device."""
        if keys:
            self._tell(BlockStored(tuple(keys), None, (), block_tokens, None, medium))

    def removed(self, keys: Sequence[bytes], medium: Medium) -> None:
        if keys:
            self._tell(BlockRemoved(tuple(keys), medium))

    def cleared(self) -> None:
        with self._lock:
            self._open = [_Gathered(AllBlocksCleared())]
        self.wake()

    def cut(self, now_s: float) -> KvEventBatch | None:
        """The events since the last cut as a batch, which the log keeps; None where there are none."""
        with self._lock:
            if not self._open:
                return None
            batch = KvEventBatch(now_s, tuple(gathered.whole() for gathered in self._open))
            self._open = []
            self._batches.append((self._next, batch))
            self._next += 1
        self.wake()
        return batch

    def since(self, number: int) -> list[tuple[int, KvEventBatch]]:
        """The kept batches from `number` on. A gap before the first tells that older ones are gone."""
        with self._lock:
            return list(takewhile(lambda entry: entry[0] >= number, reversed(self._batches)))[::-1]

    def _tell(self, event: KvEvent) -> None:
        with self._lock:
            is_first = not self._open
            if is_first or not self._open[-1].take(event):
                self._open.append(_Gathered(event))
        if is_first:
            self.wake()


@dataclass(slots=True)
class _Gathered:
    """An event, and those that have gone on from it."""

    first: KvEvent
    _hashes: list[bytes] = field(default_factory=list[bytes])  # behind the first's
    _token_ids: list[int] = field(default_factory=list[int])

    def take(self, event: KvEvent) -> bool:
        """Whether it goes on from these: then it is one of them now."""
        if not self._goes_on(event):
            return False
        assert not isinstance(event, AllBlocksCleared)
        self._hashes += event.block_hashes
        self._token_ids += event.token_ids if isinstance(event, BlockStored) else ()
        return True

    def whole(self) -> KvEvent:
        """All as one event."""
        match self.first:
            case BlockStored() as first:
                hashes, token_ids = (*first.block_hashes, *self._hashes), (*first.token_ids, *self._token_ids)
                return replace(first, block_hashes=hashes, token_ids=token_ids)
            case BlockRemoved() as first:
                return replace(first, block_hashes=(*first.block_hashes, *self._hashes))
            case _:
                return self.first

    def _goes_on(self, event: KvEvent) -> bool:
        match self.first, event:
            case BlockStored() as first, BlockStored() if first.medium == event.medium:
                newest = (self._hashes or first.block_hashes)[-1]
                in_no_order = not first.token_ids and not event.token_ids and event.parent_block_hash is None
                return newest == event.parent_block_hash or in_no_order
            case BlockRemoved() as first, BlockRemoved():
                return first.medium == event.medium
            case _:
                return False


class Watch(Protocol):
    """Hears of blocks that come to a tier and go from it, in any thread of the tier's; must not block."""

    def came(self, keys: Sequence[bytes]) -> None: ...
    def went(self, keys: Sequence[bytes]) -> None: ...


@dataclass(frozen=True, slots=True)
class TierEvents:
    """A Watch that tells a log."""

    log: EventLog
    block_tokens: int
    medium: Medium

    def came(self, keys: Sequence[bytes]) -> None:
        self.log.kept(keys, self.block_tokens, self.medium)

    def went(self, keys: Sequence[bytes]) -> None:
        self.log.removed(keys, self.medium)


class Unwatched:
    """A Watch of a tier that nobody asks about."""

    def came(self, keys: Sequence[bytes]) -> None: ...
    def went(self, keys: Sequence[bytes]) -> None: ...


def _nobody() -> None:
    """Without a publisher nobody waits for events."""
