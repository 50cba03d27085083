"""What the engine does to its state before a step, in the order in which the scheduler has decided it.

The scheduler books blocks and slots; these say what happens to their content. Carried out one after another
they are right: whatever an order reads is there until a later one overwrites it.
"""

from dataclasses import dataclass

from engine.model.bounds import Held
from engine.request import Sequence
from protocol.handoff import KvPayload


@dataclass(frozen=True, slots=True)
class KeepBlock:
    """A known block is about to be reused: its content may be kept elsewhere."""

    block: int
    key: bytes


@dataclass(frozen=True, slots=True)
class LoadBlock:
    block: int
    key: bytes
    payload: KvPayload


@dataclass(frozen=True, slots=True)
class CopyBlock:
    """A sequence is about to write to a block that others hold too."""

    source: int
    target: int


@dataclass(frozen=True, slots=True)
class SwapOut:
    """A preempted sequence's state goes to host memory."""

    sequence: Sequence
    held: Held


@dataclass(frozen=True, slots=True)
class Begin:
    """A sequence goes on in `held.slot` behind its first positions. `windows`: kept ones, of these.
    `fresh`: blocks that get their content by it, from a state that comes."""

    sequence: Sequence
    held: Held
    windows: KvPayload | None
    fresh: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class ShowBlock:
    """A full block has come with a sequence's state, and is known from now on."""

    block: int
    key: bytes


Order = KeepBlock | LoadBlock | CopyBlock | SwapOut | Begin | ShowBlock
