"""One request's side of speculation: its drafts drawn, and judged, by its own sampling parameters.

Shapes: m drafts, V vocabulary.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field

from engine.sampling.adjustments import is_plain
from engine.sampling.noise import Purpose, uniform
from engine.sampling.sampler import choose
from engine.speculation.distribution import LogitRows, Logits, Probabilities, draw, probabilities
from engine.speculation.verification import Verdict, verify_chosen, verify_sampled
from protocol.sampling import SamplingParams


@dataclass(slots=True)
class SampledDrafts:
    """Draws a request's drafts from q, and keeps q for the verdict. Of one step: the next has a new one."""

    sampling: SamplingParams
    generated: int  # tokens before the first draft
    token_ids: list[int] = field(default_factory=list[int])
    drawn_from: list[Probabilities] = field(default_factory=list[Probabilities])

    def pick(self, logits: Logits) -> int:
        """The next draft, from the draft model's logits behind the drafts before it."""
        index = self.generated + len(self.token_ids)
        assert is_plain(self.sampling), "drafts do not follow penalties, bias and grammars yet"
        q = probabilities(logits, self.sampling)
        token = draw(q, uniform(self.sampling.seed, index, Purpose.DRAFT, self.generated))
        self.drawn_from.append(q)
        self.token_ids.append(token)
        return token

    def judge(self, logits: LogitRows, count: int) -> Verdict:
        """Of the first `count` drafts; the model's logits: count + 1 rows [V]."""
        seed = self.sampling.seed
        return verify_sampled(
            lambda k: probabilities(logits[k], self.sampling),
            self.drawn_from.__getitem__,
            self.token_ids[:count],
            lambda k: uniform(seed, self.generated + k, Purpose.ACCEPT),
            lambda k: uniform(seed, self.generated + k, Purpose.RESAMPLE),
        )


def judge_picked(
    logits: LogitRows, drafts: Sequence[int], sampling: SamplingParams, generated: int
) -> Verdict:
    """Of drafts that the draft model held for likeliest: the tokens are those of decoding without drafts.

    `logits`: the model's, len(drafts) + 1 rows [V]; `generated`: tokens before the first draft.
    """
    assert is_plain(sampling), "drafts do not follow penalties, bias and grammars yet"
    return verify_chosen(lambda k: choose(logits[k], sampling, generated + k), drafts)
