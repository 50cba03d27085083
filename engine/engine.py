"""One worker's engine: `step()` schedules, runs and post-processes; everything else feeds it.

Roles: `both` serves a request from prompt to end. `prefill` computes the prompt, chooses the first token and
gives out a hand-off; `decode` adopts hand-offs and goes on. A request's tokens are the same in all of them.
"""

from collections.abc import Sequence as Seq
from dataclasses import dataclass, field, replace

from torch import Tensor

from engine.cache.block_pool import BlockPool, PoolStatistics
from engine.chat.text_stream import TextStream
from engine.chat.tokenizer import ChatTokenizer
from engine.config import EngineConfig
from engine.errors import GrammarStuck, InvalidRequest, Overloaded
from engine.handoff import Handoff, adopt, hand_over
from engine.model.base import ChunkRows, Model
from engine.model.registry import load_model
from engine.request import FinishReason, Request, Sequence, Stages
from engine.sampling.step_sampler import StepSampler
from engine.scheduler.scheduler import Chunk, Scheduler, SchedulerStatistics
from protocol.clock import Clock, SystemClock
from protocol.sampling import SamplingParams
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


@dataclass(frozen=True, slots=True)
class StepResult:
    tokens: list[TokenOutput] = field(default_factory=list[TokenOutput])
    handoffs: list[Handoff] = field(default_factory=list[Handoff])
    failed: list[tuple[str, InvalidRequest]] = field(default_factory=list[tuple[str, InvalidRequest]])
    num_rows: int = 0


@dataclass(frozen=True, slots=True)
class EngineStatistics:
    steps: int
    rows: int
    scheduler: SchedulerStatistics
    pool: PoolStatistics


class Engine:
    """Owned by one thread. Raises UnknownModel, BrokenModelFile, MissingCapability at construction."""

    def __init__(self, config: EngineConfig, clock: Clock | None = None) -> None:
        self.config = config
        self.model: Model = load_model(
            config.model, threads=config.threads, operations=config.operations, profile=config.profile,
            replay=config.replay, caches=config.caches,
        )  # fmt: skip
        self.fingerprint = self.model.fingerprint
        self._clock = clock or SystemClock()
        block_bytes = int(self.model.cache_bytes_per_token() * config.block_tokens)
        num_blocks = config.kv_cache_bytes // block_bytes
        if num_blocks == 0:
            raise InvalidRequest(
                f"kv_cache_bytes {config.kv_cache_bytes} holds no block of {block_bytes} bytes",
                parameter="kv_cache_bytes", hint=f"give at least {block_bytes}",
            )  # fmt: skip
        self._capacity = num_blocks * config.block_tokens
        self.state = self.model.new_state(num_blocks, config.block_tokens, config.max_sequences)
        self.pool = BlockPool(num_blocks, config.block_tokens)
        self._scheduler = Scheduler(
            self.pool, self.model, max_sequences=config.max_sequences, token_budget=config.token_budget,
            salt=self.fingerprint.encode(),
        )  # fmt: skip
        self._eos_ids = self.model.eos_ids
        self.sampler = StepSampler(
            self.model.vocabulary, self._eos_ids, lambda: self.model.tokenizer().token_bytes()
        )
        self._sequences: dict[str, Sequence] = {}
        self._steps = self._rows = 0

    @property
    def max_positions(self) -> int:
        """The longest prompt plus output that this engine takes."""
        return min(self.model.max_positions, self._capacity)

    @property
    def has_work(self) -> bool:
        return bool(self._sequences)

    def add(self, request: Request, arrived_ns: int | None = None) -> None:
        """Queue a request, which has waited since `arrived_ns`. Raises InvalidRequest, Overloaded."""
        self._validate(request)
        self._enqueue(Sequence.start(request, arrived_ns or self._clock.now_ns()))

    def adopt(self, handoff: Handoff) -> None:
        """Queue a request that a prefill worker has begun. Raises BrokenHandoff, InvalidRequest, Overloaded.

        It is checked as in `add`: this engine's cache may be smaller than the prefill worker's, and a request
        that never fits would wait for ever.
        """
        sequence = adopt(handoff, self.fingerprint, self.state)
        self._validate(sequence.request)
        self._enqueue(sequence)

    def abort(self, request_id: str) -> bool:
        """Forget a request and free what it held; False where it is not here (any more)."""
        sequence = self._sequences.pop(request_id, None)
        self.sampler.forget(request_id)
        if sequence is not None:
            self._scheduler.remove(sequence)
        return sequence is not None

    def step(self) -> StepResult:
        """Run one step: every scheduled row through the model. Blocks for the length of it."""
        chunks = self._scheduler.schedule()
        if not chunks:
            return StepResult()
        self._begin(chunks)
        logits = self._run(chunks)
        return self._postprocess(chunks, logits)

    def generate(
        self,
        prompts: Seq[str | Seq[int]],
        sampling: SamplingParams = SamplingParams(),  # noqa: B008 - frozen
        tokenizer: ChatTokenizer | None = None,
    ) -> list[str]:
        """Texts for prompts, batched. Blocks until all have ended. Only in role `both`.

        Raises InvalidRequest, Overloaded; then none of the prompts stays in the engine.
        """
        tokenizer = tokenizer or self.model.tokenizer()
        streams: dict[str, TextStream] = {}
        try:
            for index, prompt in enumerate(prompts):
                ids = tokenizer.encode(prompt) if isinstance(prompt, str) else prompt
                request = Request(f"generate-{index}", tuple(ids), sampling)
                self.add(request)
                streams[request.id] = TextStream(tokenizer, sampling.stop)
        except BaseException:
            for request_id in streams:
                self.abort(request_id)
            raise
        while self.has_work:
            for output in self.step().tokens:
                stream = streams[output.request_id]
                stream.push(output.token_ids, final=output.finish_reason is not None)
                if stream.stopped and output.finish_reason is None:
                    self.abort(output.request_id)
        return [stream.text for stream in streams.values()]

    def statistics(self) -> EngineStatistics:
        return EngineStatistics(self._steps, self._rows, self._scheduler.statistics(), self.pool.statistics())

    def check_integrity(self) -> None:
        """Every block and sequence is owned or free; raises AssertionError."""
        self._scheduler.check_integrity()
        queued = {s.id for s in (*self._scheduler.waiting, *self._scheduler.running)}
        assert queued == self._sequences.keys(), "a sequence is neither waiting nor running"
        self.sampler.check_integrity(queued)

    def close(self) -> None:
        """End what the engine has started beside itself: threads of the model, the grammars' process."""
        self.sampler.close()
        self.model.close()

    def _validate(self, request: Request) -> None:
        sampling, prompt = request.sampling, len(request.prompt_ids)
        if prompt == 0:
            raise InvalidRequest("the prompt is empty", parameter="messages")
        new = len(sampling.forced_ids) or sampling.max_tokens
        if new < 1:
            raise InvalidRequest(f"max_tokens is {new}; it must be at least 1", parameter="max_tokens")
        if prompt + new > self.max_positions:
            raise InvalidRequest(
                f"{prompt} prompt tokens and {new} new ones exceed the {self.max_positions} positions",
                parameter="messages", hint="shorten the prompt or lower max_tokens",
            )  # fmt: skip
        vocabulary = self.model.vocabulary
        if not all(0 <= token < vocabulary for token in (*request.prompt_ids, *sampling.forced_ids)):
            raise InvalidRequest(
                f"a token id lies outside the vocabulary of {vocabulary}", parameter="prompt_ids"
            )
        self.sampler.check(sampling)

    def _enqueue(self, sequence: Sequence) -> None:
        if sequence.id in self._sequences:
            raise InvalidRequest(f"request {sequence.id!r} is already running", parameter="request_id")
        if self._scheduler.statistics().waiting >= self.config.max_waiting:
            raise Overloaded(f"{self.config.max_waiting} requests are waiting", hint="try again later")
        self._sequences[sequence.id] = sequence
        self._scheduler.add(sequence)

    def _begin(self, chunks: list[Chunk]) -> None:
        """Stamp what runs for the first time; tell the state of new slots; write hand-offs into them."""
        now = self._clock.now_ns()
        for sequence in (chunk.sequence for chunk in chunks):
            if sequence.incoming is None and sequence.stages.scheduled_ns == 0:
                sequence.stages = replace(sequence.stages, scheduled_ns=now)
            if sequence.begun:
                continue
            self.state.begin(sequence.slot, sequence.token_ids[: sequence.num_computed])
            sequence.begun = True
            if sequence.incoming is not None:
                self.state.import_(sequence.held(sequence.num_computed), sequence.incoming)
                sequence.incoming = None
                sequence.stages = replace(sequence.stages, adopted_ns=self._clock.now_ns())

    def _run(self, chunks: list[Chunk]) -> Tensor:
        """Logits [R, V] of the last row of each completing chunk, in order."""
        rows = [_rows_of(chunk) for chunk in chunks]
        self._steps, self._rows = self._steps + 1, self._rows + sum(chunk.count for chunk in chunks)
        return self.state.run(rows)

    def _postprocess(self, chunks: list[Chunk], logits: Tensor) -> StepResult:
        result = StepResult(num_rows=sum(chunk.count for chunk in chunks))
        rows = iter(logits.numpy())
        now = self._clock.now_ns()
        for chunk in chunks:
            sequence, completes = chunk.sequence, chunk.completes
            self._scheduler.computed(chunk)
            if not completes:
                continue
            index = sequence.num_generated
            try:
                choice = self.sampler.choose(
                    next(rows),
                    sequence.id,
                    sequence.request.sampling,
                    sequence.token_ids,
                    sequence.num_prompt,
                )
            except GrammarStuck as error:
                result.failed.append((sequence.id, error))
                self.abort(sequence.id)
                continue
            sequence.token_ids.append(choice.token_id)
            if index == 0:
                sequence.stages = replace(sequence.stages, prefilled_ns=now)
            reason = sequence.next_finish(self._eos_ids)
            result.tokens.append(
                TokenOutput(
                    sequence.id,
                    index,
                    (sequence.token_ids[-1],),
                    reason,
                    sequence.stages,
                    sequence.num_cached,
                    choice.logprobs,
                )
            )
            if reason is None and self.config.role == "prefill":
                result.handoffs.append(hand_over(sequence, self.fingerprint, self.state))
            if reason is not None or self.config.role == "prefill":
                self.abort(sequence.id)
        return result


def _rows_of(chunk: Chunk) -> ChunkRows:
    sequence, start = chunk.sequence, chunk.sequence.num_computed
    return ChunkRows(
        token_ids=sequence.token_ids[start : start + chunk.count],
        start=start,
        slot=sequence.slot,
        blocks=sequence.blocks,
        bounds=sequence.row_bounds,
        wants_logits=chunk.completes,
    )
