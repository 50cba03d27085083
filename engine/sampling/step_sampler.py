"""Chooses the tokens of a step, and keeps what sequences in flight need for it from one step to the next."""

from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass

from engine.errors import GrammarStuck, InvalidRequest
from engine.sampling.adjustments import needs_past
from engine.sampling.candidates import Logits
from engine.sampling.grammars import Grammars
from engine.sampling.logprobs import logprobs_of
from engine.sampling.matcher import GrammarMatcher
from engine.sampling.past import NOTHING, Past
from engine.sampling.prompt_logprobs import PromptLogprobs
from engine.sampling.sampler import choose
from engine.sampling.validation import check_sampling
from protocol.clock import Clock
from protocol.sampling import SamplingParams, Structure
from protocol.sampling_reply import TokenLogprobs


@dataclass(frozen=True, slots=True)
class Choice:
    """`logprobs`: where the request asks for them."""

    token_id: int
    logprobs: TokenLogprobs | None = None


@dataclass(slots=True)
class _Progress:
    past: Past
    matcher: GrammarMatcher | None


class StepSampler:
    """Owned by the engine's thread; `grammars` is thread-safe.

    What it keeps of a sequence follows from that sequence's tokens, so it is lost and made again at will:
    preemption and hand-offs carry none of it.
    """

    def __init__(
        self,
        vocabulary: int,
        eos_ids: Collection[int],
        tokens: Callable[[], Sequence[bytes]],
        clock: Clock | None = None,
    ) -> None:
        """`tokens`: see `Grammars`; asked for at the first grammar."""
        self._vocabulary = vocabulary
        self._eos_ids = frozenset(eos_ids)
        self.grammars = Grammars(lambda: _padded(tokens(), vocabulary), eos_ids, clock=clock)
        self._progress: dict[str, _Progress] = {}
        self._prompts: dict[str, PromptLogprobs] = {}

    def check(self, sampling: SamplingParams, begun_ids: Sequence[int] = ()) -> object:
        """Raises InvalidRequest. Blocks to compile a grammar that is not known yet.

        `begun_ids`: of an output that goes on, which they must fit. The compiled grammar, if there is one:
        while somebody holds it, it is not compiled again.
        """
        check_sampling(sampling, self._vocabulary)
        if sampling.structure is None or sampling.forced_ids:
            return None
        grammar = self.grammars.compile(sampling.structure)
        if begun_ids:
            self._check_begun(sampling.structure, begun_ids)
        return grammar

    def ends(self, sampling: SamplingParams) -> frozenset[int]:
        """The tokens that end an output."""
        named = frozenset(sampling.stop_token_ids)
        return named if sampling.ignore_eos else named | self._eos_ids

    def choose(
        self, logits: Logits, request_id: str, sampling: SamplingParams, token_ids: Sequence[int], prompt: int
    ) -> Choice:
        """The token after `token_ids`, of which the first `prompt` are the prompt."""
        past, allowed = NOTHING, None
        if needs_past(sampling) or (sampling.structure is not None and not sampling.forced_ids):
            progress = self._followed(request_id, sampling, token_ids, prompt)
            past = progress.past
            allowed = progress.matcher.allowed() if progress.matcher is not None else None
        ends = self.ends(sampling)
        token = choose(logits, sampling, len(token_ids) - prompt, past, ends=ends, allowed=allowed)
        if sampling.logprobs < 0:
            return Choice(token)
        return Choice(token, logprobs_of(logits, token, sampling.logprobs))

    def take_in_prompt(
        self,
        request_id: str,
        sampling: SamplingParams,
        prompt_ids: Sequence[int],
        start: int,
        rows: Sequence[Logits],
    ) -> None:
        """Rows of a prompt whose logprobs the request asks for, of positions from `start` on."""
        told = self._prompts.get(request_id)
        if told is None:
            told = self._prompts[request_id] = PromptLogprobs(prompt_ids, sampling.prompt_logprobs)
        told.take_in(start, rows)

    def prompt_logprobs(self, request_id: str) -> tuple[TokenLogprobs, ...]:
        """Of a prompt that has been computed; nothing where nobody has asked, or twice."""
        told = self._prompts.pop(request_id, None)
        return told.whole() if told is not None else ()

    def forget(self, request_id: str) -> None:
        """The sequence has ended, or goes on elsewhere."""
        self._progress.pop(request_id, None)
        self._prompts.pop(request_id, None)

    def check_integrity(self, request_ids: Iterable[str]) -> None:
        """Raises AssertionError where something is kept of a sequence that is none of these."""
        left = (self._progress.keys() | self._prompts.keys()) - set(request_ids)
        assert not left, f"the sampler keeps the state of {min(left)}, which has ended"

    def close(self) -> None:
        """End what compiles grammars. Blocks until it has ended."""
        self.grammars.close()

    def _check_begun(self, structure: Structure, begun_ids: Sequence[int]) -> None:
        try:
            self.grammars.matcher(structure).follow(begun_ids)
        except GrammarStuck as error:
            raise InvalidRequest(
                f"generated_ids do not fit {error}", parameter="generated_ids",
                hint="give those that came out under this very structure",
            ) from error  # fmt: skip

    def _followed(
        self, request_id: str, sampling: SamplingParams, token_ids: Sequence[int], prompt: int
    ) -> _Progress:
        progress = self._progress.get(request_id)
        if progress is None:
            structure = None if sampling.forced_ids else sampling.structure
            matcher = self.grammars.matcher(structure) if structure is not None else None
            past = Past.of(token_ids[:prompt]) if needs_past(sampling) else Past.of(())
            progress = self._progress[request_id] = _Progress(past, matcher)
        progress.past.extend(token_ids[prompt + progress.past.num_counted :])
        if progress.matcher is not None:
            progress.matcher.follow(token_ids[prompt + progress.matcher.num_followed :])
        return progress


def _padded(tokens: Sequence[bytes], vocabulary: int) -> list[bytes]:
    """Of every id of the model: vocabularies of models are often rounded up."""
    return [*tokens, *[b""] * (vocabulary - len(tokens))][:vocabulary]
