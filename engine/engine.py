"""One worker's engine: `step()` schedules, runs and post-processes; everything else feeds it.

Roles: `both` serves a request from prompt to end. `prefill` computes the prompt, chooses the first token and
gives out a hand-off; `decode` adopts hand-offs and goes on. A request's tokens are the same in all of them.
"""

import time
from collections.abc import Sequence as Seq
from dataclasses import replace

from engine.cache.block_pool import BlockPool
from engine.cache.events import EventLog, TierEvents
from engine.cache.tiers import Tiers
from engine.chat.tokenizer import ChatTokenizer
from engine.config import EngineConfig
from engine.errors import EngineClosed
from engine.forward import Forward, Ran
from engine.generation import generate
from engine.handoff import Handoff
from engine.intake import Intake
from engine.loading import Loading
from engine.model.base import Model, State
from engine.model.stages import StageInterrupted
from engine.postprocessing import Postprocessing
from engine.request import Request, Sequence
from engine.residence import Residence
from engine.results import EngineStatistics, StepResult
from engine.sampling.step_sampler import StepSampler
from engine.scheduler.scheduler import Chunk, Limits, Scheduler
from engine.weights import Weights
from protocol.clock import Clock, SystemClock
from protocol.kv_events import KvEventBatch, Medium
from protocol.sampling import SamplingParams


class Engine:
    """Owned by one thread. Raises UnknownModel, BrokenModelFile, MissingCapability, ResourceShortage at
    construction."""

    def __init__(self, config: EngineConfig, clock: Clock | None = None, model: Model | None = None) -> None:
        """`model`: loaded already, as the config has it; it stays its owner's to close."""
        self.config = config
        self._clock = clock or SystemClock()
        self._weights = weights = Weights(config, model)
        self.events = EventLog(config.kv_event_batches) if config.kv_events else None
        self.pool = BlockPool(weights.num_blocks, weights.block_tokens, self.events)
        rules = weights.model.resume_rules
        tiers = Tiers(
            config.tiers, self._clock, weights.fingerprint,
            windows_on_disk=rules.window > 0 and not rules.replay, bytes_of=weights.bytes_of,
            watch_host=self._watch("CPU"), watch_disk=self._watch("STORAGE"),
        )  # fmt: skip
        self._residence = Residence(weights, tiers)
        self._scheduler = Scheduler(
            self.pool,
            rules,
            _limits(config, rules.window, weights.block_tokens),
            model=weights.fingerprint,
            kept=tiers,
        )
        self._loading = Loading(self.pool, self._scheduler, tiers)
        self.sampler = StepSampler(
            weights.model.vocabulary, weights.model.eos_ids,
            lambda: weights.model.tokenizer().token_bytes(), self._clock,
        )  # fmt: skip
        self._intake = Intake(
            config, weights, self.sampler,
            scheduler=self._scheduler, loading=self._loading, residence=self._residence, clock=self._clock,
        )  # fmt: skip
        self._postprocessing = Postprocessing(
            config.role, weights, self.sampler,
            scheduler=self._scheduler, residence=self._residence, intake=self._intake,
        )  # fmt: skip
        self._forward = Forward(weights)
        self._closed = False

    @property
    def model(self) -> Model:
        return self._weights.model

    @property
    def state(self) -> State:
        return self._weights.state

    @property
    def fingerprint(self) -> str:
        """Of the model and the version of its weights."""
        return self._weights.fingerprint

    @property
    def max_positions(self) -> int:
        """The longest prompt plus output that this engine takes."""
        return self._weights.max_positions

    @property
    def has_work(self) -> bool:
        return bool(self._intake.sequences)

    @property
    def requests(self) -> frozenset[str]:
        """Ids of those that are here."""
        return self._intake.requests

    @property
    def outputs(self) -> dict[str, int]:
        """How many of each request are here, or come once its prompt is computed."""
        return self._intake.outputs

    def add(self, request: Request, arrived_ns: int | None = None) -> None:
        """Queue a request, which has waited since `arrived_ns`. Raises InvalidRequest, Overloaded.

        Each of its outputs takes a place of the queue, though all but one come when the prompt is computed.
        """
        self._check_open()
        self._intake.add(request, arrived_ns or self._clock.now_ns())

    def adopt(self, handoff: Handoff) -> None:
        """Queue what a prefill worker has begun. Raises BrokenHandoff, InvalidRequest, Overloaded."""
        self._check_open()
        self._intake.adopt(handoff)

    def abort(self, request_id: str, choice: int | None = None) -> bool:
        """Forget a request, or one of its outputs, and free what it held; False where it is not here."""
        return self._intake.abort(request_id, choice)

    def fork(self, request_id: str, fork_id: str, sampling: SamplingParams | None = None) -> None:
        """Another request that goes on from where a running one is, on the same blocks, with all its tokens.

        Its outputs count on from there. `sampling`: its own, or the other's. Raises InvalidRequest, and
        Overloaded where it would have to wait in a full queue, or there is no memory for it.
        """
        self._check_open()
        self._intake.fork(request_id, fork_id, sampling)

    def update_weights(self, version: str, model: str | None = None, digest: str = "") -> None:
        """Go on with other weights, between two steps: those of `model`, which must have the same shape,
        tokens and ends, or, without it, those that their owner has changed in place.

        No cached KV is used again; running requests keep their tokens and compute them anew. Blocks for as
        long as reading takes. Weights of `model` are known by their fingerprint. Those changed in place look
        like others under the same label, which must be new to this engine: their KV and hand-offs are its
        alone, unless the owner tells a `digest` of what they hold, in hexadecimal digits. Engines with the
        same label and digest take each other's.

        Raises UnknownModel, BrokenModelFile, InvalidRequest, whatever a lack of memory raises; then all stays
        as it was.
        """
        self._check_open()
        version = self._weights.renew(version, model, digest)
        for sequence in self._intake.sequences.values():
            self._residence.leave(sequence)
        self._loading.give_up()
        self._scheduler.renew(self.model.fingerprint, version)
        self._residence.tiers.renew(self.model.fingerprint, version)

    def step(self) -> StepResult:
        """Run one step: every scheduled row through the model. Blocks for the length of it.

        Behind `interrupt` it has no result, and its rows run in a later step. Rows for which there is no
        memory at once run part by part; a request of which not one row fits fails with Overloaded.
        """
        self._check_open()
        now_ns, loading = self._clock.now_ns(), len(self._loading.waiting)
        self._loading.advance(now_ns, idle=0 < loading == len(self._intake.sequences))
        plan = self._scheduler.schedule(now_ns)
        begun = self._residence.carry_out(plan.orders)
        again, unbegun = self._begin_again(), self._residence.take_starved()
        chunks = [chunk for chunk in plan.chunks if chunk.sequence not in again]
        self._stamp(begun, chunks)
        try:
            ran = self._forward.run(chunks) if chunks else Ran()
        except StageInterrupted:
            ran = Ran()
        if not ran.chunks and not ran.starved and not unbegun:
            return StepResult()
        result = self._postprocessing.run(ran, unbegun, self._clock.now_ns())
        if self.events is not None:
            self.events.cut(time.time())
        return result

    def interrupt(self, request_id: str | None = None) -> None:
        """End the step that runs before its next stage: a hint, from any thread. The next one runs through.

        `request_id`: only where the step has no other request, whose work would be thrown away. Nothing
        happens between steps, and with a model without stages.
        """
        stages = self.state.stages
        if stages is not None and (request_id is None or self._forward.stepping == frozenset({request_id})):
            stages.interrupt()

    def events_since(self, number: int) -> list[tuple[int, KvEventBatch]]:
        """What the prefix cache has taken in and given up, by step, with `kv_events` on.

        Batches from `number` on, of which the newest are kept (`kv_event_batches`): a gap before the first
        says that older ones are gone.
        """
        if self.events is None:
            return []
        self.events.cut(time.time())
        return self.events.since(number)

    def generate(
        self,
        prompts: str | Seq[str | Seq[int]],
        sampling: SamplingParams = SamplingParams(),  # noqa: B008 - frozen
        tokenizer: ChatTokenizer | None = None,
    ) -> list[str]:
        """Texts for prompts, batched; a lone text is one of them. Blocks until all have ended. Only in role
        `both`, and without other requests, whose tokens it would take.

        A prompt is encoded as it is: an opening token that servers put before texts is the caller's.
        Raises InvalidRequest, Overloaded, GrammarStuck; then none of the prompts stays in the engine.
        """
        self._check_open()
        return generate(self, prompts, sampling, tokenizer or self.model.tokenizer())

    def statistics(self) -> EngineStatistics:
        residence, stages = self._residence, self.state.stages
        return EngineStatistics(
            self._forward.steps, self._forward.rows, self._scheduler.statistics(), self.pool.statistics(),
            residence.tiers.statistics(), residence.swapped_bytes, len(self._loading.waiting),
            stages.times() if stages is not None else None,
        )  # fmt: skip

    def check_integrity(self) -> None:
        """Every block, slot, pin, swapped byte and sequence is owned or free; raises AssertionError."""
        self._scheduler.check_integrity()
        self._intake.check_integrity()
        self._loading.check_integrity()
        self._residence.check_integrity(self._scheduler.waiting)
        self.sampler.check_integrity(self._intake.sequences)

    def flush(self) -> None:
        """Blocks until what the disk tier was given so far is there."""
        self._residence.tiers.flush()

    def close(self) -> None:
        """End what the engine has started beside itself: threads of the model and the disk, the grammars'
        process. Blocks until what is to be kept on disk is there. What is asked of it afterwards raises
        EngineClosed; a second call does nothing."""
        if self._closed:
            return
        self._closed = True
        self._residence.tiers.close()
        self.sampler.close()
        self._weights.close()

    def _check_open(self) -> None:
        if self._closed:
            raise EngineClosed("the engine has been closed", hint="make another one")

    def _watch(self, medium: Medium) -> TierEvents | None:
        """Tells of a tier's blocks."""
        return None if self.events is None else TierEvents(self.events, self.pool.block_tokens, medium)

    def _begin_again(self) -> set[Sequence]:
        """Preempt those that have not what they go on from, which is computed again, and tell which."""
        residence, scheduler = self._residence, self._scheduler
        again = residence.take_lost()
        for sequence in again:
            scheduler.start_again(sequence)
        unbegun, bad = residence.take_unbegun(), residence.bad_blocks
        if unbegun or bad:
            again += scheduler.begin_again(unbegun, bad)
        return set(again)

    def _stamp(self, begun: list[Sequence], chunks: list[Chunk]) -> None:
        """When hand-offs were adopted, and when what runs did so first; what was prefetched is used now."""
        now, decodes = self._clock.now_ns(), self.config.role == "decode"
        for sequence in begun:
            self._loading.begun(sequence)
            if decodes and sequence.stages.prefilled_ns and not sequence.stages.adopted_ns:
                sequence.stages = replace(sequence.stages, adopted_ns=now)
        for sequence in (chunk.sequence for chunk in chunks):
            if sequence.stages.scheduled_ns == 0:
                sequence.stages = replace(sequence.stages, scheduled_ns=now)


def _limits(config: EngineConfig, window: int, block_tokens: int) -> Limits:
    """Windows are kept at ends of blocks, and only where there is memory for them."""
    blocks = -(-(config.tiers.window_interval or 4 * window) // block_tokens)
    return Limits(
        config.max_sequences,
        config.token_budget,
        int(config.starvation_s * 1e9),
        blocks * block_tokens if config.tiers.most_window_bytes else 0,
        config.preemption,
    )
