"""What the scheduler asks of the KV that is kept outside the device's blocks: see `engine.cache.tiers`."""

from typing import Protocol

from engine.model.bounds import Held
from protocol.handoff import KvPayload


class KeptKv(Protocol):
    """Nothing here blocks or raises. A payload that was given out stays whole while somebody has it.

    `again`: the same sequence has asked before, and still waits.
    """

    def block(self, key: bytes, *, again: bool = False) -> KvPayload | None:
        """A block's persistent entries, where they are at hand."""
        ...

    def windows(self, key: bytes, *, again: bool = False) -> KvPayload | None:
        """The slot's part at the end of the block with that key."""
        ...

    def reserve(self, held: Held) -> bool:
        """Whether there is room to swap a sequence out; the room is then taken."""
        ...


class NothingKept:
    """A KeptKv of an engine without tiers."""

    def block(self, key: bytes, *, again: bool = False) -> KvPayload | None:
        return None

    def windows(self, key: bytes, *, again: bool = False) -> KvPayload | None:
        return None

    def reserve(self, held: Held) -> bool:
        return False
