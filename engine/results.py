"""What an engine tells: tokens and hand-offs of a step, and its counters."""

from dataclasses import dataclass, field

from engine.cache.block_pool import PoolStatistics
from engine.cache.tiers import TierStatistics
from engine.handoff import Handoff
from engine.model.stages import StageTimes
from engine.request import FinishReason, Stages
from engine.scheduler.counts import SchedulerStatistics
from protocol.errors import DockyardError
from protocol.sampling_reply import TokenLogprobs


@dataclass(frozen=True, slots=True)
class TokenOutput:
    """New tokens of one request; `index` is the number of tokens before them."""

    request_id: str
    index: int
    token_ids: tuple[int, ...]
    finish_reason: FinishReason | None
    stages: Stages
    num_cached: int
    logprobs: TokenLogprobs | None = None
    prompt_logprobs: tuple[TokenLogprobs, ...] = ()  # of its tokens but the first, with the first token
    choice: int = 0  # which of the request's outputs
    resumed: tuple[int, ...] = ()  # where windows were run again: what it takes to go on elsewhere


@dataclass(frozen=True, slots=True)
class StepResult:
    tokens: list[TokenOutput] = field(default_factory=list[TokenOutput])
    handoffs: list[Handoff] = field(default_factory=list[Handoff])
    failed: list[tuple[str, DockyardError]] = field(default_factory=list[tuple[str, DockyardError]])
    num_rows: int = 0


@dataclass(frozen=True, slots=True)
class EngineStatistics:
    steps: int
    rows: int
    scheduler: SchedulerStatistics
    pool: PoolStatistics
    tiers: TierStatistics
    swapped_bytes: int  # that went to host memory, since the start
    loading: int  # requests that wait for the disk
    stages: StageTimes | None = None  # of a model that has them
