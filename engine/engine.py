"""One worker's engine: `step()` schedules, runs and post-processes; everything else feeds it.

Roles: `both` serves a request from prompt to end. `prefill` computes the prompt, chooses the first token and
gives out a hand-off; `decode` adopts hand-offs and goes on. A request's tokens are the same in all of them.
"""

import time
from collections.abc import Sequence as Seq
from dataclasses import replace
from uuid import uuid4

from torch import Tensor

from engine.cache.block_pool import BlockPool
from engine.cache.events import EventLog
from engine.cache.tiers import Tiers
from engine.chat.text_stream import TextStream
from engine.chat.tokenizer import ChatTokenizer
from engine.config import EngineConfig
from engine.errors import InvalidRequest, Overloaded
from engine.handoff import Handoff, adopt, hand_over
from engine.loading import Loading
from engine.model.base import ChunkRows, Held, Model
from engine.model.registry import load_model
from engine.model.stages import StageInterrupted
from engine.request import Request, Sequence
from engine.residence import Residence, bytes_of
from engine.results import EngineStatistics, StepResult, TokenOutput
from engine.sampling.candidates import Logits
from engine.sampling.step_sampler import StepSampler
from engine.scheduler.pace import Pace
from engine.scheduler.scheduler import Chunk, Limits, Scheduler
from engine.validation import check_request
from protocol.clock import Clock, SystemClock
from protocol.kv_events import KvEventBatch
from protocol.sampling import SamplingParams


class Engine:
    """Owned by one thread. Raises UnknownModel, BrokenModelFile, MissingCapability at construction."""

    def __init__(self, config: EngineConfig, clock: Clock | None = None, model: Model | None = None) -> None:
        """`model`: loaded already, as the config has it; it stays its owner's to close."""
        self.config = config
        self._owns_model = model is None
        self.model: Model = model or _load(config, config.model)
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
        self.events = EventLog() if config.kv_events else None
        self.pool = BlockPool(num_blocks, config.block_tokens, self.events)
        self._num_blocks = num_blocks
        self.state = self.model.new_state(num_blocks, config.block_tokens, config.max_sequences)
        rules = self.model.resume_rules
        tiers = Tiers(
            config.tiers, self._clock, self.fingerprint,
            windows_on_disk=rules.window > 0 and not rules.replay,
            bytes_of=lambda held: bytes_of(self.state, held),
        )  # fmt: skip
        self._residence = Residence(self.state, tiers)
        self._scheduler = Scheduler(
            self.pool, rules, _limits(config, rules.window), model=self.fingerprint, kept=tiers
        )
        self._loading = Loading(self.pool, self._scheduler, tiers)
        self._pace = Pace()
        self._eos_ids = self.model.eos_ids
        self.sampler = StepSampler(
            self.model.vocabulary, self._eos_ids, lambda: self.model.tokenizer().token_bytes()
        )
        self._sequences: dict[str, Sequence] = {}
        self._steps = self._rows = 0
        self._labels: set[str] = set()  # versions of weights that there have been
        self._stepping: frozenset[str] = frozenset()  # requests of the step that runs

    @property
    def max_positions(self) -> int:
        """The longest prompt plus output that this engine takes."""
        return min(self.model.max_positions, self._capacity)

    @property
    def has_work(self) -> bool:
        return bool(self._sequences)

    @property
    def requests(self) -> frozenset[str]:
        """Ids of those that are here."""
        return frozenset(sequence.request.id for sequence in self._sequences.values())

    def add(self, request: Request, arrived_ns: int | None = None) -> None:
        """Queue a request, which has waited since `arrived_ns`. Raises InvalidRequest, Overloaded."""
        grammar = self._validate(request, request.generated_ids)
        if request.sampling.prompt_logprobs >= 0:  # every row of the prompt has to run
            request = replace(request, cache_salt=f"{request.cache_salt}/{request.id}/prompt_logprobs")
        sequence = Sequence.start(request, arrived_ns or self._clock.now_ns())
        sequence.grammar = grammar
        self._enqueue(sequence)

    def adopt(self, handoff: Handoff) -> None:
        """Queue a request that a prefill worker has begun. Raises BrokenHandoff, InvalidRequest, Overloaded.

        It is checked as in `add`: this engine's cache may be smaller than the prefill worker's, and a request
        that never fits would wait for ever.
        """
        sequence = adopt(handoff, self.fingerprint, self.state)
        sequence.grammar = self._validate(sequence.request, sequence.token_ids[sequence.num_prompt :])
        self._enqueue(sequence)

    def abort(self, request_id: str, choice: int | None = None) -> bool:
        """Forget a request, or one of its outputs, and free what it held; False where it is not here."""
        found = [
            s for s in self._sequences.values() if s.request.id == request_id and choice in (None, s.choice)
        ]
        for sequence in found:
            self._end(sequence)
        return bool(found)

    def fork(self, request_id: str, fork_id: str, sampling: SamplingParams | None = None) -> None:
        """Another request that goes on from where a running one is, on the same blocks, with all its tokens.

        Its outputs count on from there. `sampling`: its own, or the other's. Raises InvalidRequest, and
        Overloaded where it would have to wait in a full queue.
        """
        parent = self._sequences.get(request_id)
        if parent is None or parent.resumed is None:
            raise InvalidRequest(f"request {request_id!r} has not begun to run here", parameter="request_id")
        request = replace(
            parent.request, id=fork_id, sampling=sampling or parent.sampling, choices=1,
            generated_ids=tuple(parent.token_ids[parent.num_prompt :]),
        )  # fmt: skip
        grammar = self._validate(request, request.generated_ids)
        child = parent.fork(0)
        child.request, child.grammar = request, grammar
        self._check_new(child)
        if not self._scheduler.runs_fork(parent):
            self._check_room()
        self._sequences[child.id] = child
        self._place(parent, child)

    def update_weights(self, version: str, model: str | None = None) -> None:
        """Go on with other weights, between two steps: those of `model`, which must have the same shape, or,
        without it, those that their owner has changed in place.

        No cached KV is used again; running requests keep their tokens and compute them anew. Blocks for as
        long as reading takes. Weights of `model` are known by their fingerprint. Those changed in place look
        like others under the same label: their KV and hand-offs are this engine's alone, and the label must
        be new to it.

        Raises UnknownModel, BrokenModelFile, InvalidRequest; then all stays as it was.
        """
        label = version
        if model is not None:
            self._replace_model(model)
        elif not label or label in self._labels:
            raise InvalidRequest(
                f"version is {label!r}; weights changed in place need one that this engine has not had",
                parameter="version",
            )
        else:
            version = f"{label}#{uuid4().hex}"
        self._labels.add(label)
        self.fingerprint = self.model.fingerprint if not version else f"{self.model.fingerprint}@{version}"
        for sequence in self._sequences.values():
            self._residence.leave(sequence)
        self._loading.give_up()
        self._scheduler.renew(self.model.fingerprint, version)
        self._residence.tiers.renew(self.model.fingerprint, version)

    def step(self) -> StepResult:
        """Run one step: every scheduled row through the model. Blocks for the length of it.

        Behind `interrupt` it has no result, and its rows run in a later step.
        """
        now_ns, waiting = self._clock.now_ns(), self._loading.waiting
        self._loading.advance(now_ns, idle=bool(waiting) and len(waiting) == len(self._sequences))
        plan = self._scheduler.schedule(now_ns)
        begun = self._residence.carry_out(plan.orders)
        self._stamp(begun, plan.chunks)
        if not plan.chunks:
            return StepResult()
        try:
            logits = self._run(plan.chunks)
        except StageInterrupted:
            return StepResult()
        finally:
            self._stepping = frozenset()
        result = self._postprocess(plan.chunks, logits)
        if self.events is not None:
            self.events.cut(time.time())
        return result

    def interrupt(self, request_id: str | None = None) -> None:
        """End the step that runs before its next stage: a hint, from any thread. The next one runs through.

        `request_id`: only where the step has no other request, whose work would be thrown away. Nothing
        happens between steps, and with a model without stages.
        """
        stages = self.state.stages
        if stages is not None and (request_id is None or self._stepping == frozenset({request_id})):
            stages.interrupt()

    def events_since(self, number: int) -> list[tuple[int, KvEventBatch]]:
        """What the prefix cache has taken in and given up, by step, with `kv_events` on.

        Batches from `number` on, of which the newest 10,000 are kept: a gap before the first says that older
        ones are gone.
        """
        if self.events is None:
            return []
        self.events.cut(time.time())
        return list(self.events.since(number))

    def generate(
        self,
        prompts: Seq[str | Seq[int]],
        sampling: SamplingParams = SamplingParams(),  # noqa: B008 - frozen
        tokenizer: ChatTokenizer | None = None,
    ) -> list[str]:
        """Texts for prompts, batched. Blocks until all have ended. Only in role `both`.

        Raises InvalidRequest, Overloaded, GrammarStuck; then none of the prompts stays in the engine.
        """
        tokenizer = tokenizer or self.model.tokenizer()
        streams: dict[str, TextStream] = {}
        try:
            for index, prompt in enumerate(prompts):
                ids = tokenizer.encode(prompt) if isinstance(prompt, str) else prompt
                request = Request(f"generate-{index}", tuple(ids), sampling)
                self.add(request)
                streams[request.id] = TextStream(
                    tokenizer,
                    sampling.stop,
                    include_stop=sampling.include_stop,
                    min_tokens=sampling.min_tokens,
                )
        except BaseException:
            for request_id in streams:
                self.abort(request_id)
            raise
        while self.has_work:
            result = self.step()
            if result.failed:
                for request_id in streams:
                    self.abort(request_id)
                raise result.failed[0][1]
            for output in result.tokens:
                stream = streams[output.request_id]
                stream.push(output.token_ids, final=output.finish_reason is not None)
                if stream.stopped and output.finish_reason is None:
                    self.abort(output.request_id)
        return [stream.text for stream in streams.values()]

    def statistics(self) -> EngineStatistics:
        residence = self._residence
        return EngineStatistics(
            self._steps, self._rows, self._scheduler.statistics(), self.pool.statistics(),
            residence.tiers.statistics(), residence.swapped_bytes, len(self._loading.waiting),
            self.state.stages.times() if self.state.stages is not None else None,
        )  # fmt: skip

    def check_integrity(self) -> None:
        """Every block, slot, pin, swapped byte and sequence is owned or free; raises AssertionError."""
        self._scheduler.check_integrity()
        places = (*self._scheduler.waiting, *self._scheduler.running, *self._loading.waiting)
        queued = {s.id for s in places}
        assert len(queued) == len(places), "a sequence is in two places"
        assert queued == self._sequences.keys(), "a sequence is neither waiting, running nor loading"
        self._loading.check_integrity()
        self._residence.check_integrity()
        self.sampler.check_integrity(queued)

    def close(self) -> None:
        """End what the engine has started beside itself: threads of the model and the disk, the grammars'
        process. Blocks until what is to be kept on disk is there."""
        self._residence.tiers.close()
        self.sampler.close()
        if self._owns_model:
            self.model.close()

    def _validate(self, request: Request, begun_ids: Seq[int]) -> object:
        """The grammar of its structure, if it has one. `begun_ids`: of its output so far."""
        check_request(request, self.model, self.max_positions, self.config.block_tokens)
        return self.sampler.check(request.sampling, begun_ids)

    def _enqueue(self, sequence: Sequence) -> None:
        self._check_new(sequence)
        self._check_room()
        self._sequences[sequence.id] = sequence
        self._loading.add(sequence)

    def _check_new(self, sequence: Sequence) -> None:
        if sequence.id in self._sequences:
            raise InvalidRequest(f"request {sequence.id!r} is already running", parameter="request_id")

    def _check_room(self) -> None:
        """Whether one more may wait."""
        if len(self._scheduler.waiting) + len(self._loading.waiting) >= self.config.max_waiting:
            wait_s = self._pace.refused()
            raise Overloaded(
                f"{self.config.max_waiting} requests are waiting",
                hint=f"try again in {wait_s:.0f} s", retry_after_s=wait_s,
            )  # fmt: skip

    def _end(self, sequence: Sequence) -> None:
        """Free whatever a sequence holds, wherever it is; nothing where it has ended."""
        if self._sequences.pop(sequence.id, None) is None:
            return
        self.sampler.forget(sequence.id)
        self._residence.leave(sequence)
        if not self._loading.remove(sequence):
            self._scheduler.remove(sequence)

    def _place(self, parent: Sequence, child: Sequence) -> None:
        """Run a fork on its parent's blocks, or queue it."""
        if self._scheduler.fork(parent, child):
            self.state.copy_slot(parent.slot, child.slot)

    def _replace_model(self, name: str) -> None:
        config, old, new = self.config, self.model, _load(self.config, name)
        shape = (old.vocabulary, old.max_positions, old.cache_bytes_per_token(), old.resume_rules)
        if (new.vocabulary, new.max_positions, new.cache_bytes_per_token(), new.resume_rules) != shape:
            new.close()
            raise InvalidRequest(f"the model {name!r} has another shape", parameter="model")
        self.model = new
        self.state = new.new_state(self._num_blocks, config.block_tokens, config.max_sequences)
        self._residence.state = self.state
        if self._owns_model:
            old.close()
        self._owns_model = True

    def _stamp(self, begun: list[Sequence], chunks: list[Chunk]) -> None:
        """When hand-offs were adopted, and when what runs did so first; what was prefetched is used now."""
        now = self._clock.now_ns()
        for sequence in begun:
            self._loading.begun(sequence)
            if (
                sequence.stages.prefilled_ns
                and not sequence.stages.adopted_ns
                and self.config.role == "decode"
            ):
                sequence.stages = replace(sequence.stages, adopted_ns=now)
        for sequence in (chunk.sequence for chunk in chunks):
            if sequence.stages.scheduled_ns == 0:
                sequence.stages = replace(sequence.stages, scheduled_ns=now)

    def _run(self, chunks: list[Chunk]) -> Tensor:
        """Logits [R, V] of the last row of each completing chunk, in order."""
        rows = [_rows_of(chunk) for chunk in chunks]
        self._stepping = frozenset(chunk.sequence.request.id for chunk in chunks)
        logits = self.state.run(rows)
        self._steps, self._rows = self._steps + 1, self._rows + sum(chunk.count for chunk in chunks)
        return logits

    def _postprocess(self, chunks: list[Chunk], logits: Tensor) -> StepResult:
        result = StepResult(num_rows=sum(chunk.count for chunk in chunks))
        rows = iter(logits.numpy())
        now = self._clock.now_ns()
        for chunk in chunks:
            sequence, completes, start = chunk.sequence, chunk.completes, chunk.sequence.num_computed
            taken = [next(rows) for _ in range(_num_logits(chunk))]
            if self._sequences.get(sequence.id) is not sequence:
                continue  # its request has failed at another output, in this very step
            if _tells_prompt(sequence):
                prompt_ids = sequence.token_ids[: sequence.num_prompt]
                self.sampler.take_in_prompt(sequence.id, sequence.sampling, prompt_ids, start, taken)
            self._residence.keep(self._scheduler.computed(chunk))
            if (key := self._scheduler.windows_due(sequence)) is not None:
                self._residence.keep_windows(sequence, key)
            if not completes:
                continue
            row, held = taken[-1], sequence.held(sequence.num_computed)
            for output in self._outputs(sequence):
                if output.id in self._sequences:  # unless the request has failed at an output before
                    self._choose(output, row, now, result)
                if self.config.role == "prefill" and output.id in self._sequences:
                    self._hand_over(output, held, result)
        return result

    def _hand_over(self, sequence: Sequence, held: Held, result: StepResult) -> None:
        """Give an output away behind its first token."""
        result.handoffs.append(hand_over(sequence, held, self.fingerprint, self.state))
        self._end(sequence)

    def _outputs(self, sequence: Sequence) -> list[Sequence]:
        """The sequence, and where its prompt has just been computed the request's other outputs."""
        request = sequence.request
        if sequence.choice or request.choices == 1 or sequence.num_generated > len(request.generated_ids):
            return [sequence]
        children = [sequence.fork(number) for number in range(1, request.choices)]
        for child in children:
            self._sequences[child.id] = child
            if self.config.role == "prefill":
                self._scheduler.add(child)  # for a moment: it is handed over at once
            else:
                self._place(sequence, child)
        return [sequence, *children]

    def _choose(self, sequence: Sequence, row: Logits, now: int, result: StepResult) -> None:
        """The next token from a row of logits; ends the sequence where that is the last."""
        index, request_id = sequence.num_generated, sequence.request.id
        try:
            choice = self.sampler.choose(
                row, sequence.id, sequence.sampling, sequence.token_ids, sequence.num_prompt
            )
        except InvalidRequest as error:  # its grammar is stuck, or refused at this time
            result.failed.append((request_id, error))
            self.abort(request_id)
            return
        sequence.token_ids.append(choice.token_id)
        if sequence.stages.prefilled_ns == 0:
            sequence.stages = replace(sequence.stages, prefilled_ns=now)
        reason = sequence.next_finish(self._eos_ids)
        result.tokens.append(
            TokenOutput(
                request_id, index, (choice.token_id,), reason, sequence.stages, sequence.num_cached,
                choice.logprobs, self.sampler.prompt_logprobs(sequence.id), sequence.choice,
                sequence.resumed or (),
            )
        )  # fmt: skip
        if reason is not None:
            self._pace.finished(now)
            self._end(sequence)


def _load(config: EngineConfig, name: str) -> Model:
    return load_model(
        name, threads=config.threads, operations=config.operations, profile=config.profile,
        replay=config.replay, caches=config.caches,
    )  # fmt: skip


def _limits(config: EngineConfig, window: int) -> Limits:
    """Windows are kept at ends of blocks, and only where there is memory for them."""
    blocks = -(-(config.tiers.window_interval or 4 * window) // config.block_tokens)
    return Limits(
        config.max_sequences,
        config.token_budget,
        int(config.starvation_s * 1e9),
        blocks * config.block_tokens if config.tiers.most_window_bytes else 0,
        config.preemption,
    )


def _rows_of(chunk: Chunk) -> ChunkRows:
    sequence, start = chunk.sequence, chunk.sequence.num_computed
    return ChunkRows(
        token_ids=sequence.token_ids[start : start + chunk.count],
        start=start,
        slot=sequence.slot,
        blocks=sequence.blocks,
        bounds=sequence.row_bounds,
        wants_logits=chunk.completes,
        all_logits=_tells_prompt(sequence),
    )


def _num_logits(chunk: Chunk) -> int:
    return chunk.count if _tells_prompt(chunk.sequence) else int(chunk.completes)


def _tells_prompt(sequence: Sequence) -> bool:
    """Whether logits of all rows are wanted: while a prompt is computed whose logprobs were asked for."""
    return sequence.num_generated == 0 and sequence.sampling.prompt_logprobs >= 0
