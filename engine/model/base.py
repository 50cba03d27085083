"""What an engine asks of a model, and of the state that a model keeps of sequences in flight."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from engine.chat.tokenizer import ChatTokenizer
from engine.errors import InvalidRequest
from engine.model.bounds import Bounds, Held, ResumeRules
from engine.model.stages import StageClock
from kernels.operations import Operations
from protocol.handoff import KvPayload, StateLayout


@dataclass(frozen=True, slots=True)
class ChunkRows:
    """The next rows of one sequence. `wants_logits`: of the last of them; `all_logits`: of each."""

    token_ids: Sequence[int]
    start: int  # position of the first
    slot: int
    blocks: Sequence[int]
    bounds: Bounds
    wants_logits: bool
    all_logits: bool = False

    @property
    def num_logits(self) -> int:
        """How many of the last rows get logits."""
        return len(self.token_ids) if self.all_logits else int(self.wants_logits)


def check_prompt(token_ids: Sequence[int], vocabulary: int, max_positions: int) -> None:
    """Raises InvalidRequest: no ids, too many, or one that is no integer or that the model does not have."""
    if not 0 < len(token_ids) <= max_positions:
        raise InvalidRequest(
            f"{len(token_ids)} token ids, expected 1 to {max_positions}", parameter="prompt_ids"
        )
    for token in token_ids:
        if not hasattr(token, "__index__"):
            raise InvalidRequest(f"a token id is {token!r:.40}, expected an integer", parameter="prompt_ids")
    if not all(0 <= token < vocabulary for token in token_ids):
        raise InvalidRequest(
            f"a token id lies outside the vocabulary of {vocabulary}", parameter="prompt_ids"
        )


class State(Protocol):
    """Tensors by block and slot; who owns which is the engine's to know. Not thread-safe."""

    @property
    def dtype(self) -> str:
        """Names the form of the entries in a hand-off."""
        ...

    @property
    def stages(self) -> StageClock | None:
        """Of a model whose steps have stages."""
        ...

    def begin(self, slot: int, token_ids: Sequence[int]) -> None:
        """A sequence takes the slot; its first row stands behind these ids."""
        ...

    def run(self, chunks: Sequence[ChunkRows]) -> Tensor:
        """Rows through the model: logits [R, V] of those that want them, in order. Blocks.

        Raises StageInterrupted where `stages` was asked to, and what a lack of memory raises; the sequences'
        rows can then run again, at once or fewer of them.
        """
        ...

    def layout(self, held: Held) -> StateLayout:
        """Names, rows and bytes a row of the parts of an export."""
        ...

    def export(self, held: Held) -> KvPayload:
        """A copy as contiguous bytes, in the order of `layout`."""
        ...

    def import_(self, held: Held, payload: KvPayload) -> None:
        """Write an export into blocks and slot. The payload may be read-only shared memory."""
        ...

    @property
    def block_bytes(self) -> int:
        """Of one block's persistent entries."""
        ...

    def export_block(self, block: int) -> KvPayload:
        """A copy of one block's persistent entries."""
        ...

    def import_block(self, block: int, payload: KvPayload) -> None:
        """Raises BrokenHandoff where the payload has another size than `block_bytes`."""
        ...

    def copy_block(self, source: int, target: int) -> None: ...

    def copy_slot(self, source: int, target: int) -> None: ...

    def export_windows(self, slot: int, num_positions: int) -> KvPayload:
        """What a sequence needs beside its blocks to go on from `num_positions`, as `ResumeRules` has it."""
        ...

    def import_windows(self, slot: int, num_positions: int, payload: KvPayload) -> None:
        """Raises BrokenHandoff where the payload has another size."""
        ...


class Model(Protocol):
    """Weights and arithmetic. Not thread-safe; `close` ends what threads it has."""

    @property
    def operations(self) -> Operations: ...
    @property
    def max_positions(self) -> int: ...
    @property
    def vocabulary(self) -> int: ...
    @property
    def eos_ids(self) -> frozenset[int]: ...
    @property
    def fingerprint(self) -> str:
        """Names weights, numerics and the form of the caches: equal where hand-offs and cached blocks fit.

        Of all bytes, which the first call reads.
        """
        ...

    @property
    def resume_rules(self) -> ResumeRules: ...

    @property
    def entry_ratios(self) -> frozenset[int]:
        """How many positions an entry of its caches stands for: blocks hold a multiple of each."""
        ...

    def cache_bytes_per_token(self) -> float:
        """Bytes of persistent KV a token."""
        ...

    def new_state(self, num_blocks: int, block_tokens: int, num_slots: int) -> State: ...

    def tokenizer(self) -> ChatTokenizer: ...

    def logits(self, token_ids: Sequence[int], last_only: bool = False) -> Tensor:
        """One full exact forward over a prompt: [T, V] float32, or [V] of the last position.

        Raises InvalidRequest as `check_prompt`.
        """
        ...

    def close(self) -> None: ...
