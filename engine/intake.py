"""What an engine has in flight: takes requests in, checks them, and forgets them with all that they hold."""

from collections.abc import Sequence as Seq
from dataclasses import replace

from engine.config import EngineConfig
from engine.errors import InvalidRequest, Overloaded
from engine.handoff import Handoff, adopt
from engine.loading import Loading
from engine.request import Request, Sequence
from engine.residence import Residence
from engine.sampling.step_sampler import StepSampler
from engine.scheduler.pace import Pace
from engine.scheduler.scheduler import Scheduler
from engine.shortage import is_out_of_memory
from engine.validation import check_request
from engine.weights import Weights
from protocol.clock import Clock
from protocol.sampling import SamplingParams


class Intake:
    """Owned by the engine's thread. `sequences` by id: each is with the scheduler, or waits for the disk."""

    def __init__(
        self,
        config: EngineConfig,
        weights: Weights,
        sampler: StepSampler,
        *,
        scheduler: Scheduler,
        loading: Loading,
        residence: Residence,
        clock: Clock,
    ) -> None:
        self._config, self._weights, self._sampler, self._clock = config, weights, sampler, clock
        self._scheduler, self._loading, self._residence = scheduler, loading, residence
        self.pace = Pace()
        self.sequences: dict[str, Sequence] = {}
        self._by_request: dict[str, dict[int, Sequence]] = {}  # by output
        self._num_promised = 0  # outputs that come once their prompts are computed

    @property
    def requests(self) -> frozenset[str]:
        """Ids of those that are here."""
        return frozenset(self._by_request)

    @property
    def outputs(self) -> dict[str, int]:
        """How many of each request are here, or come once its prompt is computed."""
        return {
            request_id: sum((s.choice not in s.given_up) + s.num_promised for s in outputs.values())
            for request_id, outputs in self._by_request.items()
        }

    @property
    def num_waiting(self) -> int:
        """Outputs in the queue, or on their way to it."""
        return len(self._scheduler.waiting) + len(self._loading.waiting) + self._num_promised

    def add(self, request: Request, arrived_ns: int) -> None:
        """Raises InvalidRequest, Overloaded."""
        grammar = self._validate(request, request.generated_ids)
        sequence = Sequence.start(request, arrived_ns)
        sequence.grammar = grammar
        self._enqueue(sequence)

    def adopt(self, handoff: Handoff) -> None:
        """Raises BrokenHandoff, InvalidRequest, Overloaded.

        It is checked as in `add`: this engine's cache may be smaller than the prefill worker's, and a request
        that never fits would wait for ever.
        """
        sequence = adopt(handoff, self._weights.fingerprint, self._weights.state)
        sequence.grammar = self._validate(sequence.request, sequence.token_ids[sequence.num_prompt :])
        self._enqueue(sequence)

    def fork(self, request_id: str, fork_id: str, sampling: SamplingParams | None) -> None:
        """Raises InvalidRequest, and Overloaded where it would have to wait in a full queue, or there is no
        memory for it."""
        parent = self.sequences.get(request_id)
        if parent is None or parent.resumed is None or parent.choice in parent.given_up:
            raise InvalidRequest(f"request {request_id!r} has not begun to run here", parameter="request_id")
        if sampling is not None and sampling.prompt_logprobs >= 0:
            raise InvalidRequest(
                f"prompt_logprobs is {sampling.prompt_logprobs}, and rows of the prompt have run already",
                parameter="prompt_logprobs", hint="leave it out: the request that it leaves may tell them",
            )  # fmt: skip
        request = replace(
            parent.request, id=fork_id, choices=1,
            sampling=sampling or replace(parent.sampling, prompt_logprobs=-1),
            generated_ids=tuple(parent.token_ids[parent.num_prompt :]),
        )  # fmt: skip
        grammar = self._validate(request, request.generated_ids)
        child = parent.fork(0)
        child.request, child.grammar = request, grammar
        self._check_new(child)
        if not self._scheduler.runs_fork(parent):
            self._check_room(1)
        self._put(child)
        try:
            self._place(parent, child)
        except BaseException as error:  # its slot may hold anything
            self.end(child)
            if not is_out_of_memory(error):
                raise
            raise Overloaded("there is no memory for a fork", hint="try again in a while") from error

    def outputs_of(self, sequence: Sequence) -> list[Sequence]:
        """The sequence, and where its prompt has just been computed the request's other outputs. Raises what
        a lack of memory raises; then the request is to end."""
        if not sequence.num_promised:
            return [sequence]
        wanted = [n for n in range(1, sequence.request.choices) if n not in sequence.given_up]
        children = [sequence.fork(number) for number in wanted]
        self._num_promised -= self._promised(sequence)
        sequence.branched = True
        for child in children:
            self._put(child)
            if self._config.role == "prefill":
                self._scheduler.add(child)  # for a moment: it is handed over at once
            else:
                self._place(sequence, child)
        if sequence.choice in sequence.given_up:
            self.end(sequence)
            return children
        return [sequence, *children]

    def abort(self, request_id: str, choice: int | None = None) -> bool:
        """Forget a request, or one of its outputs; False where it is not here."""
        outputs = self._by_request.get(request_id, {})
        first = outputs.get(0)
        if choice is not None and first is not None and first.num_promised:
            return self._give_up(first, choice)
        found = [sequence for number, sequence in outputs.items() if choice in (None, number)]
        for sequence in found:
            self.end(sequence)
        return bool(found)

    def _give_up(self, first: Sequence, choice: int) -> bool:
        """One output of a prompt that is not computed yet; it is, for as long as another is wanted."""
        if choice not in range(first.request.choices) or choice in first.given_up:
            return False
        given_up = first.given_up | {choice}
        if len(given_up) == first.request.choices:
            self.end(first)
            return True
        before = self._promised(first)
        first.given_up = given_up
        self._num_promised += self._promised(first) - before
        return True

    def end(self, sequence: Sequence) -> None:
        """Free whatever a sequence holds, wherever it is; nothing where it has ended. However it ends, here
        or elsewhere, another one has its place: who was refused hears of that."""
        if self.sequences.pop(sequence.id, None) is None:
            return
        outputs = self._by_request[sequence.request.id]
        del outputs[sequence.choice]
        if not outputs:
            del self._by_request[sequence.request.id]
        self._num_promised -= self._promised(sequence)
        self._sampler.forget(sequence.id)
        self._residence.leave(sequence)
        if not self._loading.remove(sequence):
            self._scheduler.remove(sequence)
        self.pace.finished(self._clock.now_ns())

    def check_integrity(self) -> None:
        """Raises AssertionError."""
        places = (*self._scheduler.waiting, *self._scheduler.running, *self._loading.waiting)
        queued = {s.id for s in places}
        assert len(queued) == len(places), "a sequence is in two places"
        assert queued == self.sequences.keys(), "a sequence is neither waiting, running nor loading"
        by_request = {s.id for outputs in self._by_request.values() for s in outputs.values()}
        assert by_request == queued, "a request has outputs that are not here, or lacks some that are"
        assert self._num_promised == sum(map(self._promised, places)), "outputs are promised by nobody"

    def _validate(self, request: Request, begun_ids: Seq[int]) -> object:
        """The grammar of its structure, if it has one. `begun_ids`: of its output so far."""
        check_request(request, self._weights.model, self._weights.max_positions, self._weights.block_tokens)
        try:
            return self._sampler.check(request.sampling, begun_ids)
        except (MemoryError, RuntimeError) as error:
            if not is_out_of_memory(error):
                raise
            raise Overloaded("there is no memory for its grammar", hint="try again in a while") from error

    def _enqueue(self, sequence: Sequence) -> None:
        self._check_new(sequence)
        self._check_room(1 + self._promised(sequence))
        self._put(sequence)
        self._num_promised += self._promised(sequence)
        self._loading.add(sequence)

    def _put(self, sequence: Sequence) -> None:
        self.sequences[sequence.id] = sequence
        self._by_request.setdefault(sequence.request.id, {})[sequence.choice] = sequence

    def _check_new(self, sequence: Sequence) -> None:
        """Outputs of one request are handed over one by one; else none of its id may be here."""
        outputs = self._by_request.get(sequence.request.id, {})
        taken = bool(outputs)
        if sequence.incoming is not None:
            taken = sequence.choice in outputs or any(other.num_promised for other in outputs.values())
        if taken:
            raise InvalidRequest(
                f"request {sequence.request.id!r} is already running", parameter="request_id"
            )

    def _check_room(self, count: int) -> None:
        """Whether so many more may wait."""
        most, waiting = self._config.max_waiting, self.num_waiting
        if count > most:
            raise InvalidRequest(f"n is {count}; no more than max_waiting, {most}, can wait", parameter="n")
        if waiting + count > most:
            wait_s = self.pace.refused()
            others = f", and {count} do not fit beside them" if count > 1 else ""
            raise Overloaded(
                f"{waiting} requests are waiting{others}",
                hint=f"try again in {wait_s:.0f} s", retry_after_s=wait_s,
            )  # fmt: skip

    def _place(self, parent: Sequence, child: Sequence) -> None:
        """Run a fork on its parent's blocks, or queue it."""
        if self._scheduler.fork(parent, child):
            self._weights.state.copy_slot(parent.slot, child.slot)

    def _promised(self, sequence: Sequence) -> int:
        """Outputs that it adds to the queue once its prompt is computed; a prefill worker hands them over."""
        return 0 if self._config.role == "prefill" else sequence.num_promised
