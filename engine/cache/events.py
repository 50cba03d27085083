"""A bounded log of what the caches took in and gave up, for whoever routes by it."""

from collections import deque
from collections.abc import Iterator

from protocol.kv_events import (
    AllBlocksCleared,
    BlockRemoved,
    BlockStored,
    KvEvent,
    KvEventBatch,
    Medium,
)


class EventLog:
    """Not thread-safe. Events gather until `cut` makes a numbered batch of them.

    The newest `kept` batches stay, for readers that missed some: they ask `since`. Nobody has to read.
    """

    def __init__(self, kept: int = 10_000) -> None:
        self._open: list[KvEvent] = []
        self._batches: deque[tuple[int, KvEventBatch]] = deque(maxlen=kept)
        self._next = 0

    def stored(
        self, key: bytes, parent: bytes | None, token_ids: tuple[int, ...], block_tokens: int, medium: Medium
    ) -> None:
        """A block has come; a chain of them becomes one event."""
        last = self._open[-1] if self._open else None
        if isinstance(last, BlockStored) and last.block_hashes[-1] == parent and last.medium == medium:
            keys, tokens = (*last.block_hashes, key), last.token_ids + token_ids
            whole = BlockStored(keys, last.parent_block_hash, tokens, block_tokens, None, medium)
            self._open[-1] = whole
        else:
            self._open.append(BlockStored((key,), parent, token_ids, block_tokens, None, medium))

    def removed(self, key: bytes, medium: Medium) -> None:
        self._open.append(BlockRemoved((key,), medium))

    def cleared(self) -> None:
        self._open = [AllBlocksCleared()]

    def cut(self, now_s: float) -> KvEventBatch | None:
        """The events since the last cut as a batch, which the log keeps; None where there are none."""
        if not self._open:
            return None
        batch, self._open = KvEventBatch(now_s, tuple(self._open)), []
        self._batches.append((self._next, batch))
        self._next += 1
        return batch

    def since(self, number: int) -> Iterator[tuple[int, KvEventBatch]]:
        """The kept batches from `number` on. A gap before the first tells that older ones are gone."""
        return (entry for entry in list(self._batches) if entry[0] >= number)
