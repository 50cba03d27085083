"""A request as an engine takes it, and the sequence that it becomes."""

from dataclasses import dataclass, field, replace
from typing import Literal

from engine.cache.keys import ImageKey
from engine.model.bounds import Bounds, Held
from engine.scheduler.resume import Pass
from protocol.handoff import KvPayload
from protocol.sampling import SamplingParams
from protocol.stages import StageNs

FinishReason = Literal["stop", "length"]


@dataclass(frozen=True, slots=True)
class Request:
    """Prompt ids and how to go on from them. `priority`: lower runs first, as in vLLM."""

    id: str
    prompt_ids: tuple[int, ...]
    sampling: SamplingParams = SamplingParams()  # noqa: RUF009 - frozen
    priority: int = 0
    slack_ms: float = 0.0  # how much later it may start without holding anyone up
    choices: int = 1  # outputs for the one prompt, which is computed once; number k has the seed plus k
    cache_salt: str = ""  # requests share cached prefixes with those of the same salt alone
    images: tuple[ImageKey, ...] = ()  # among the prompt's tokens
    # Of a stream that goes on elsewhere: the tokens given out so far, and where windows were run again there.
    generated_ids: tuple[int, ...] = ()
    resumed: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class Stages:
    """When a request passed each stage: CLOCK_MONOTONIC nanoseconds, 0 where it has not yet."""

    arrived_ns: int = 0
    scheduled_ns: int = 0
    prefilled_ns: int = 0  # the first token is known
    adopted_ns: int = 0  # the decode worker has the KV in its cache
    spent: StageNs | None = None  # by the steps that it was in, of a model that has stages


@dataclass(slots=True, eq=False)
class Sequence:
    """A request in flight. Owns its counters; the block pool owns the blocks that it names."""

    request: Request
    token_ids: list[int]
    num_prompt: int
    choice: int = 0  # which of the request's outputs
    num_computed: int = 0  # positions whose KV is in the cache
    num_cached: int = 0  # of those, taken from the prefix cache at the first scheduling
    blocks: list[int] = field(default_factory=list[int])
    num_registered: int = 0  # leading blocks that the prefix cache knows
    chain: list[bytes] = field(default_factory=list[bytes])  # keys of its full blocks, as far as asked for
    keys: dict[tuple[bytes, bool], bytes] = field(
        default_factory=dict[tuple[bytes, bool], bytes]
    )  # worked out
    has_asked: bool = False  # for what is kept of it, since it waits for blocks
    slot: int = -1  # of the model's state; -1 while it waits
    resumed: tuple[int, ...] | None = None  # its lineage (engine.scheduler.resume); None until it first runs
    passes: tuple[
        Pass, ...
    ] = ()  # over its rows, the current one first; those before the last rebuild entries
    incoming: KvPayload | None = None  # a state that waits for blocks: a hand-off, or swapped out
    num_incoming: int = 0  # positions that it holds; above 0 also while a swap is on its way
    windows_key: bytes | None = None  # of the newest windows that were kept while it decodes
    served_ns: int = 0  # when it last got rows
    owed_at: int = (
        -1
    )  # how many tokens it had when it was left waiting too long: it goes first until the next
    branched: bool = False  # the request's other outputs have come from it
    given_up: frozenset[int] = (
        frozenset()
    )  # outputs that nobody wants, before they have come; its own among them
    grammar: object = None  # of its structure, compiled: held here it is not given up
    stages: Stages = Stages()

    @classmethod
    def start(cls, request: Request, arrived_ns: int) -> "Sequence":
        ids = [*request.prompt_ids, *request.generated_ids]
        lineage = request.resumed if request.generated_ids else None
        stages = Stages(arrived_ns=arrived_ns)
        return cls(request, ids, len(request.prompt_ids), resumed=lineage, stages=stages)

    @property
    def id(self) -> str:
        """The request's; of further outputs with their number, behind what no client's id has."""
        return f"{self.request.id}\0{self.choice}" if self.choice else self.request.id

    @property
    def sampling(self) -> SamplingParams:
        """The request's, with this output's seed."""
        sampling = self.request.sampling
        return replace(sampling, seed=sampling.seed + self.choice) if self.choice else sampling

    @property
    def num_generated(self) -> int:
        return len(self.token_ids) - self.num_prompt

    @property
    def num_promised(self) -> int:
        """Outputs that come from it once its prompt is computed."""
        begun = self.num_generated > len(self.request.generated_ids)
        none = self.choice or self.branched or begun
        return 0 if none else self.request.choices - 1 - len(self.given_up - {0})

    @property
    def num_missing(self) -> int:
        """Positions still to compute before the next token is known."""
        return len(self.token_ids) - self.num_computed

    @property
    def tells_prompt(self) -> bool:
        """Whether all its rows want logits: while a prompt is computed whose logprobs were asked for.
        Until then it takes nothing that is known, as those rows would not run."""
        return self.request.sampling.prompt_logprobs >= 0 and self.num_generated == 0

    @property
    def rebuilding(self) -> bool:
        """Whether entries that are gone are computed anew first."""
        return len(self.passes) > 1

    @property
    def row_bounds(self) -> Bounds:
        """Of the rows that run next."""
        assert self.passes, "bounds are fixed when a sequence is admitted"
        return self.passes[0].bounds

    def held(self, num_positions: int) -> Held:
        """What the model's state has of its first positions."""
        return Held(self.slot, tuple(self.blocks), num_positions, self.passes[-1].bounds)

    def fork(self, choice: int) -> "Sequence":
        """Another output behind the same tokens, with the same lineage; it holds nothing yet."""
        return Sequence(
            self.request, list(self.token_ids), self.num_prompt, choice,
            num_cached=self.num_cached, chain=list(self.chain), resumed=self.resumed,
            served_ns=self.served_ns, stages=self.stages, grammar=self.grammar,
        )  # fmt: skip

    def next_finish(self, eos_ids: frozenset[int]) -> FinishReason | None:
        """Whether the newest token ends the sequence."""
        sampling, newest = self.request.sampling, self.token_ids[-1]
        if sampling.forced_ids:
            return "stop" if self.num_generated >= len(sampling.forced_ids) else None
        if newest in sampling.stop_token_ids or (newest in eos_ids and not sampling.ignore_eos):
            return "stop"
        return "length" if self.num_generated >= sampling.max_tokens else None
