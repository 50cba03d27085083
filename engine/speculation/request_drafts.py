"""One request's side of speculation: its drafts drawn, and judged, by its own sampling parameters.

| drafts are | `plain` requests | penalties, bias, minimum length, grammars |
|---|---|---|
| picked, the likeliest each | `judge_picked` | `judge_followed`: they see each draft as a token |
| drawn from q | `SampledDrafts` | refused by name: q would have to follow them too |

Shapes: m drafts, V vocabulary.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field

from engine.sampling.adjustments import check_plain
from engine.sampling.noise import Purpose, uniform
from engine.sampling.sampler import choose
from engine.sampling.step_sampler import StepSampler
from engine.speculation.distribution import LogitRows, Logits, Probabilities, draw, probabilities
from engine.speculation.verification import Verdict, verify_chosen, verify_sampled
from protocol.sampling import SamplingParams


@dataclass(slots=True)
class SampledDrafts:
    """Draws a request's drafts from q, and keeps q for the verdict. Of one step: the next has a new one.

    Raises InvalidRequest for a request that is not plain: it takes picked drafts, or none.
    """

    sampling: SamplingParams
    generated: int  # tokens before the first draft
    token_ids: list[int] = field(default_factory=list[int])
    drawn_from: list[Probabilities] = field(default_factory=list[Probabilities])

    def __post_init__(self) -> None:
        check_plain(self.sampling)

    def pick(self, logits: Logits) -> int:
        """The next draft, from the draft model's logits behind the drafts before it."""
        index = self.generated + len(self.token_ids)
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
    Raises InvalidRequest for a request that is not plain: `judge_followed` takes it.
    """
    check_plain(sampling)
    return verify_chosen(lambda k: choose(logits[k], sampling, generated + k), drafts)


def judge_followed(
    sampler: StepSampler,
    logits: LogitRows,
    drafts: Sequence[int],
    *,
    request_id: str,
    sampling: SamplingParams,
    token_ids: Sequence[int],
    prompt: int,
) -> Verdict:
    """As `judge_picked`, of any request: `token_ids` are its tokens so far, the first `prompt` the prompt.

    A row is looked at only where all drafts before it hold, so counts and grammar follow tokens alone and
    nothing is taken back. Drafts behind one that ends the output are left out: no grammar goes on there.
    Raises GrammarStuck, as choosing without drafts does.
    """
    ends = sampler.ends(sampling)
    count = next((k for k, draft in enumerate(drafts) if draft in ends), len(drafts))

    def chosen(k: int) -> int:
        known = [*token_ids, *drafts[:k]]
        return sampler.choose(logits[k], request_id, sampling, known, prompt).token_id

    return verify_chosen(chosen, drafts[:count])
