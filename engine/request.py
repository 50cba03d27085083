"""A request as an engine takes it, and the sequence that it becomes."""

from dataclasses import dataclass, field
from typing import Literal

from engine.model.base import Bounds, Held
from protocol.handoff import KvPayload
from protocol.sampling import SamplingParams

FinishReason = Literal["stop", "length"]


@dataclass(frozen=True, slots=True)
class Request:
    """Prompt ids and how to go on from them. `priority`: lower runs first, as in vLLM."""

    id: str
    prompt_ids: tuple[int, ...]
    sampling: SamplingParams = SamplingParams()  # noqa: RUF009 - frozen
    priority: int = 0


@dataclass(frozen=True, slots=True)
class Stages:
    """When a request passed each stage: CLOCK_MONOTONIC nanoseconds, 0 where it has not yet."""

    arrived_ns: int = 0
    scheduled_ns: int = 0
    prefilled_ns: int = 0  # the first token is known
    adopted_ns: int = 0  # the decode worker has the KV in its cache


@dataclass(slots=True, eq=False)
class Sequence:
    """A request in flight. Owns its counters; the block pool owns the blocks that it names."""

    request: Request
    token_ids: list[int]
    num_prompt: int
    num_computed: int = 0  # positions whose KV is in the cache
    num_cached: int = 0  # of those, taken from the prefix cache at the first scheduling
    blocks: list[int] = field(default_factory=list[int])
    num_registered: int = 0  # leading blocks that the prefix cache knows
    chain: list[bytes] = field(default_factory=list[bytes])  # hashes of its full blocks, as far as asked for
    slot: int = -1  # of the model's state; -1 while it waits
    bounds: Bounds | None = None  # of its rows; fixed when it first runs
    rebuilding: bool = False  # its cached prefix is gone, and its entries are computed anew first
    begun: bool = False  # the state knows that it has the slot
    incoming: KvPayload | None = None  # a hand-off whose KV waits for blocks
    stages: Stages = Stages()

    @classmethod
    def start(cls, request: Request, arrived_ns: int) -> "Sequence":
        ids = list(request.prompt_ids)
        return cls(request, ids, len(ids), stages=Stages(arrived_ns=arrived_ns))

    @property
    def id(self) -> str:
        return self.request.id

    @property
    def num_generated(self) -> int:
        return len(self.token_ids) - self.num_prompt

    @property
    def num_missing(self) -> int:
        """Positions still to compute before the next token is known."""
        return len(self.token_ids) - self.num_computed

    @property
    def row_bounds(self) -> Bounds:
        """Of the rows that run next: to rebuild entries takes the encoder alone."""
        assert self.bounds is not None, "bounds are fixed when a sequence is admitted"
        return Bounds(decoder_from=self.bounds.write_from) if self.rebuilding else self.bounds

    def held(self, num_positions: int) -> Held:
        """What the model's state has of its first positions."""
        assert self.bounds is not None, "a sequence that has run has bounds"
        return Held(self.slot, self.blocks, num_positions, self.bounds)

    def next_finish(self, eos_ids: frozenset[int]) -> FinishReason | None:
        """Whether the newest token ends the sequence."""
        sampling, newest = self.request.sampling, self.token_ids[-1]
        if sampling.forced_ids:
            return "stop" if self.num_generated >= len(sampling.forced_ids) else None
        if newest in sampling.stop_token_ids or (newest in eos_ids and not sampling.ignore_eos):
            return "stop"
        return "length" if self.num_generated >= sampling.max_tokens else None
