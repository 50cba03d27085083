"""Where the KV of sequences is: carries it between device, host and disk, as the scheduler has decided."""

import logging
from collections.abc import Callable, Container

from engine.cache.tiers import Tiers
from engine.model.base import Held
from engine.request import Sequence
from engine.scheduler.orders import Begin, CopyBlock, KeepBlock, LoadBlock, Order, ShowBlock, SwapOut
from engine.shortage import is_out_of_memory
from engine.weights import Weights
from protocol.handoff import KvPayload

_log = logging.getLogger(__name__)


class Residence:
    """Owned by the engine's thread. Of what a sequence has swapped out it keeps the books."""

    def __init__(self, weights: Weights, tiers: Tiers) -> None:
        self._weights, self.tiers = weights, tiers
        self._swapped: dict[Sequence, int] = {}  # bytes of host memory that are reserved for it
        self._swapped_bytes = 0
        self._lost: list[Sequence] = []
        self._unbegun: list[Sequence] = []
        self._starved: list[Sequence] = []
        self._tried: set[Sequence] = set()  # once, to begin
        self._bad_blocks: set[int] = set()  # by the orders that were carried out last

    @property
    def swapped_bytes(self) -> int:
        """Of all states that have gone to host memory since the start."""
        return self._swapped_bytes

    @property
    def bad_blocks(self) -> set[int]:
        """Those that may hold anything: there was no memory for what was to come to them."""
        return self._bad_blocks

    def carry_out(self, orders: list[Order]) -> list[Sequence]:
        """All of them, in order; the sequences that were to begin or go on by it. See `bad_blocks` and
        `take_…` for what there was no memory for."""
        self._bad_blocks = set()
        for order in orders:
            try:
                self._carry_out(order)
            except (MemoryError, RuntimeError) as error:
                if not is_out_of_memory(error):
                    raise
                _log.warning("no memory for KV that was to come: %s", error)
                self._give_up(order)
        return [order.sequence for order in orders if isinstance(order, Begin)]

    def take_unbegun(self) -> list[Sequence]:
        """Those that have found no memory to begin."""
        unbegun, self._unbegun = self._unbegun, []
        return unbegun

    def take_starved(self) -> list[Sequence]:
        """Of those, the ones that had found none before: they would be tried again for ever."""
        starved, self._starved = self._starved, []
        return starved

    def take_lost(self) -> list[Sequence]:
        """Those that were to be swapped out, and for which there was no memory."""
        lost, self._lost = self._lost, []
        return lost

    def keep(self, blocks: list[tuple[int, bytes]]) -> None:
        """Blocks that have just become full."""
        if self.tiers.keeps_at_once:
            for block, key in blocks:
                self._keep_block(block, key)

    def keep_windows(self, sequence: Sequence, key: bytes) -> None:
        """Of its computed positions. While it decodes, the newest take the place of those before."""
        state, slot, position = self._weights.state, sequence.slot, sequence.num_computed
        windows = _copied(lambda: state.export_windows(slot, position))
        if windows is None:
            self.tiers.windows_tier.refuse()
            return
        self.tiers.keep_windows(key, windows)
        if sequence.num_computed > sequence.num_prompt:
            if sequence.windows_key not in (None, key):
                self.tiers.drop_windows(sequence.windows_key)
            sequence.windows_key = key

    def leave(self, sequence: Sequence) -> None:
        """The sequence has ended, or computes again: what it had swapped out goes."""
        self._tried.discard(sequence)
        self._drop_incoming(sequence)

    def check_integrity(self, waiting: Container[Sequence]) -> None:
        """Room is reserved for those alone that wait with the state that it holds; raises AssertionError."""
        for sequence, num_bytes in self._swapped.items():
            held = 0 if sequence.incoming is None else sequence.incoming.nbytes
            found = num_bytes if sequence in waiting else 0
            assert found == held > 0, f"room is reserved for {sequence.id}, which left"
        self.tiers.check_integrity(sum(self._swapped.values()))

    def _carry_out(self, order: Order) -> None:
        match order:
            case KeepBlock(block=block, key=key):
                if self.tiers.keeps_blocks and not self.tiers.keeps_at_once and block not in self._bad_blocks:
                    self._keep_block(block, key)
            case LoadBlock(block=block, payload=payload):
                self._weights.state.import_block(block, payload)
                self._bad_blocks.discard(block)
            case CopyBlock(source=source, target=target):
                self._weights.state.copy_block(source, target)
                if source in self._bad_blocks:
                    self._bad_blocks.add(target)
                else:
                    self._bad_blocks.discard(target)
            case SwapOut(sequence=sequence, held=held):
                self._swap_out(sequence, held)
            case Begin():
                self._begin(order)
            case ShowBlock(block=block, key=key):
                if block not in self._bad_blocks:
                    self.keep([(block, key)])

    def _give_up(self, order: Order) -> None:
        """What was to come and found no memory is not tried again: it is computed. To begin is, once."""
        match order:
            case LoadBlock(block=block, key=key):
                self._bad_blocks.add(block)
                self.tiers.drop_block(key)
            case CopyBlock(target=target):
                self._bad_blocks.add(target)
            case Begin(sequence=sequence, fresh=fresh):
                self._bad_blocks.update(fresh)
                self._unbegun.append(sequence)
                if sequence in self._tried:
                    self._starved.append(sequence)
                self._tried.add(sequence)
                self._drop_incoming(sequence)
            case SwapOut(sequence=sequence, held=held):
                self._lose(sequence, held)
            case KeepBlock() | ShowBlock():  # copies that it is good to have
                pass

    def _keep_block(self, block: int, key: bytes) -> None:
        state = self._weights.state
        payload = _copied(lambda: state.export_block(block))
        if payload is None:
            self.tiers.blocks.refuse()
        else:
            self.tiers.keep_block(key, payload)

    def _swap_out(self, sequence: Sequence, held: Held) -> None:
        state = self._weights.state
        whole = self._bad_blocks.isdisjoint(held.blocks)
        copy = _copied(lambda: state.export(held)) if whole else None
        if copy is None:
            self._lose(sequence, held)
            return
        self._swapped[sequence] = copy.nbytes
        sequence.incoming = copy
        self._swapped_bytes += copy.nbytes

    def _lose(self, sequence: Sequence, held: Held) -> None:
        """What it was to swap out."""
        self.tiers.free(self._weights.bytes_of(held))
        self._lost.append(sequence)

    def _begin(self, order: Begin) -> None:
        sequence, held = order.sequence, order.held
        self._weights.state.begin(held.slot, sequence.token_ids[: held.num_positions])
        if order.windows is not None:
            self._weights.state.import_windows(held.slot, held.num_positions, order.windows)
        if sequence.incoming is not None:
            self._weights.state.import_(held, sequence.incoming)
        self.leave(sequence)

    def _drop_incoming(self, sequence: Sequence) -> None:
        self.tiers.free(self._swapped.pop(sequence, 0))
        sequence.incoming, sequence.num_incoming = None, 0


def _copied(copy: Callable[[], KvPayload]) -> KvPayload | None:
    """Something that it is good to have, and no request needs; None where there is no memory for it."""
    try:
        return copy()
    except (MemoryError, RuntimeError) as error:
        if not is_out_of_memory(error):
            raise
        _log.warning("no memory for a copy of KV: %s", error)
        return None
