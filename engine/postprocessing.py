"""What a step's logits lead to: blocks and windows are kept, tokens chosen, outputs ended or handed over."""

from collections.abc import Iterator
from dataclasses import replace

from engine.chunk_rows import num_logits
from engine.config import Role
from engine.errors import InvalidLogits, InvalidRequest, Overloaded
from engine.forward import Ran
from engine.handoff import hand_over
from engine.intake import Intake
from engine.model.base import Held
from engine.request import Sequence
from engine.residence import Residence
from engine.results import StepResult, TokenOutput
from engine.sampling.candidates import Logits, check_logits
from engine.sampling.step_sampler import StepSampler
from engine.scheduler.scheduler import Chunk, Scheduler
from engine.shortage import is_out_of_memory
from engine.weights import Weights
from protocol.errors import DockyardError


class Postprocessing:
    """Owned by the engine's thread."""

    def __init__(
        self,
        role: Role,
        weights: Weights,
        sampler: StepSampler,
        *,
        scheduler: Scheduler,
        residence: Residence,
        intake: Intake,
    ) -> None:
        self._role, self._weights, self._sampler = role, weights, sampler
        self._scheduler, self._residence, self._intake = scheduler, residence, intake
        self._eos_ids = weights.model.eos_ids

    def run(self, ran: Ran, unbegun: list[Sequence], now_ns: int) -> StepResult:
        """What has run is taken in, and requests without memory end: to begin, or for a row."""
        result = StepResult(num_rows=sum(chunk.count for chunk in ran.chunks))
        starved = [(s, _no_memory_to_begin()) for s in unbegun] + [(s, _no_memory(s)) for s in ran.starved]
        for sequence, error in starved:
            if self._is_here(sequence):
                self._fail(sequence.request.id, error, result)
        rows: Iterator[Logits] = (row for logits in ran.logits for row in logits.numpy())
        for chunk in ran.chunks:
            taken = [next(rows) for _ in range(num_logits(chunk))]
            if self._is_here(chunk.sequence):  # else its request has failed at another output, just now
                self._take_in(chunk, taken, now_ns, result)
        return result

    def _take_in(self, chunk: Chunk, rows: list[Logits], now_ns: int, result: StepResult) -> None:
        """Whatever goes wrong by one request ends that one alone."""
        request_id = chunk.sequence.request.id
        try:
            self._lead_on(chunk, rows, now_ns, result)
        # Its grammar is stuck or refused at this time, or a row is no distribution.
        except (InvalidRequest, InvalidLogits, Overloaded) as error:
            self._fail(request_id, error, result)
        except (MemoryError, RuntimeError) as error:
            if not is_out_of_memory(error):
                raise
            told = "there is no memory to take in what the model has computed for this request"
            self._fail(request_id, Overloaded(told, hint="try again in a while"), result)

    def _lead_on(self, chunk: Chunk, rows: list[Logits], now_ns: int, result: StepResult) -> None:
        """Raises InvalidRequest, InvalidLogits, Overloaded, and what a lack of memory raises; then the
        request is to end."""
        sequence, completes = chunk.sequence, chunk.completes
        for row in rows:  # before its blocks are known to others
            check_logits(row)
        if sequence.tells_prompt:
            prompt_ids = sequence.token_ids[: sequence.num_prompt]
            start = sequence.num_computed
            self._sampler.take_in_prompt(sequence.id, sequence.sampling, prompt_ids, start, rows)
        self._residence.keep(self._scheduler.computed(chunk))
        if (key := self._scheduler.windows_due(sequence)) is not None:
            self._residence.keep_windows(sequence, key)
        if not completes:
            return
        held = sequence.held(sequence.num_computed)
        for output in self._intake.outputs_of(sequence):
            self._choose(output, rows[-1], now_ns, result)
            if self._role == "prefill" and self._is_here(output):
                self._hand_over(output, held, result)

    def _fail(self, request_id: str, error: DockyardError, result: StepResult) -> None:
        """One request ends, with all of its outputs; the others of the step go on."""
        result.failed.append((request_id, error))
        result.handoffs[:] = [h for h in result.handoffs if h.header.request_id != request_id]
        self._intake.abort(request_id)

    def _is_here(self, sequence: Sequence) -> bool:
        return self._intake.sequences.get(sequence.id) is sequence

    def _hand_over(self, sequence: Sequence, held: Held, result: StepResult) -> None:
        """Give an output away behind its first token."""
        weights = self._weights
        result.handoffs.append(hand_over(sequence, held, weights.fingerprint, weights.state))
        self._intake.end(sequence)

    def _choose(self, sequence: Sequence, row: Logits, now_ns: int, result: StepResult) -> None:
        """The next token from a row of logits; ends the sequence where that is the last."""
        index, request_id = sequence.num_generated, sequence.request.id
        choice = self._sampler.choose(
            row, sequence.id, sequence.sampling, sequence.token_ids, sequence.num_prompt
        )
        sequence.token_ids.append(choice.token_id)
        if sequence.stages.prefilled_ns == 0:
            sequence.stages = replace(sequence.stages, prefilled_ns=now_ns)
        reason = sequence.next_finish(self._eos_ids)
        result.tokens.append(
            TokenOutput(
                request_id, index, (choice.token_id,), reason, sequence.stages, sequence.num_cached,
                choice.logprobs, self._sampler.prompt_logprobs(sequence.id), sequence.choice,
                sequence.resumed or (),
            )
        )  # fmt: skip
        if reason is not None:
            self._intake.end(sequence)


def _no_memory_to_begin() -> Overloaded:
    return Overloaded("there is no memory for this request to begin", hint="try again in a while")


def _no_memory(sequence: Sequence) -> Overloaded:
    return Overloaded(
        f"there is no memory for one more row of this request, alone, behind {sequence.num_computed} others",
        hint="try again in a while, or with a shorter prompt",
    )
