"""Decoding with drafts gives the tokens of decoding without: drafted, judged in one forward, rolled back."""

from dataclasses import dataclass, field

import pytest
import torch
from dspark_models import config_of, drafting_model, text

from engine.model.deepseek.config import Quantisation
from engine.model.deepseek.dspark import pick_likeliest
from engine.model.deepseek.dspark_acceptance import accepted_lengths
from engine.model.deepseek.dspark_context import Anchor
from engine.model.deepseek.replay import decoder_bound
from engine.model.deepseek.rows import SequenceRows
from engine.sampling.sampler import choose
from engine.speculation.request_drafts import judge_picked
from engine.speculation.schedule import admit, survivals
from protocol.sampling import SamplingParams

BLOCKS, BLOCK_TOKENS, NEW = 6, 16, 16


@dataclass(slots=True)
class Decoding:
    """A sequence that is being decoded."""

    slot: int
    prompt: list[int]
    sampling: SamplingParams
    new: list[int] = field(default_factory=list)
    bound: int = 0
    context_from: int | None = None  # the bound's, unless it comes without context

    @property
    def ids(self):
        return self.prompt + self.new

    def rows(self, start, count):
        return SequenceRows(
            self.slot,
            range(BLOCKS * self.slot, BLOCKS * (self.slot + 1)),
            start,
            count,
            decoder_from=self.bound,
        )


@pytest.fixture(scope="module", params=[Quantisation(), Quantisation.off()], ids=["released", "float32"])
def models(request, cpu_library):
    return drafting_model(config_of(request.param))


def decodings(sampled=False, replay=False):
    prompts = [text(29, 1), text(3, 2), text(44, 3)]
    samplings = [SamplingParams(temperature=0.8 if sampled else 0.0, seed=slot) for slot in range(3)]
    made = [Decoding(slot, p, s) for slot, (p, s) in enumerate(zip(prompts, samplings, strict=True))]
    for one in made if replay else ():
        one.bound = decoder_bound(0, len(one.prompt), 8)
    return made


def prefill(models, cache, context, sequences, moved=False):
    """`moved`: elsewhere, so that the context stays behind."""
    model, drafts = models
    tap = drafts.tap()
    ids = torch.tensor([i for s in sequences for i in s.prompt])
    hidden = model.forward(ids, [s.rows(0, len(s.prompt)) for s in sequences], cache, tap)
    if moved:
        context.rings_BF.fill_(1)
    else:
        drafts.write(context, tap)
    for one in sequences:
        one.context_from = len(one.prompt) if moved else one.bound
    last = torch.tensor([len(s.prompt) for s in sequences]).cumsum(0) - 1
    for one, logits in zip(sequences, model.head(hidden[last]).numpy(), strict=True):
        one.new.append(choose(logits, one.sampling, 0))


def plainly(models, sequences):
    model, drafts = models
    cache, context = model.new_cache(3 * BLOCKS, BLOCK_TOKENS, 3), drafts.new_cache(3)
    prefill(models, cache, context, sequences)
    for _ in range(NEW - 1):
        rows = [s.rows(len(s.ids) - 1, 1) for s in sequences]
        hidden = model.forward(torch.tensor([s.new[-1] for s in sequences]), rows, cache)
        for one, logits in zip(sequences, model.head(hidden).numpy(), strict=True):
            one.new.append(choose(logits, one.sampling, len(one.new)))
    return [s.new for s in sequences]


def with_drafts(models, sequences, pick_for, lengths_of, moved=False):
    """Tokens, and how many drafts held in each step of each sequence."""
    model, drafts = models
    cache, context = model.new_cache(3 * BLOCKS, BLOCK_TOKENS, 3), drafts.new_cache(3)
    prefill(models, cache, context, sequences, moved)
    accepted = []
    while min(len(s.new) for s in sequences) < NEW:
        running = [s for s in sequences if len(s.new) < NEW]
        anchors = [Anchor(s.slot, s.new[-1], len(s.ids) - 1, s.context_from) for s in running]
        proposal = drafts.propose(context, anchors, pick_for(running))
        lengths = lengths_of(proposal.confidence.tolist())
        checked = proposal.drafts(lengths)
        rows = [s.rows(len(s.ids) - 1, 1 + len(d)) for s, d in zip(running, checked, strict=True)]
        ids = [i for s, d in zip(running, checked, strict=True) for i in (s.new[-1], *d)]
        tap = drafts.tap()
        logits = model.head(model.forward(torch.tensor(ids), rows, cache, tap)).numpy()
        first, stops = 0, {}
        for one, drafted in zip(running, checked, strict=True):
            part = logits[first : first + 1 + len(drafted)]
            verdict = judge_picked(part, drafted, one.sampling, len(one.new))
            stops[one.slot] = len(one.ids) - 1 + verdict.committed
            one.new += verdict.tokens(drafted)
            first, accepted = first + 1 + len(drafted), [*accepted, verdict.accepted]
        drafts.write(context, tap, stops)
    return [s.new[:NEW] for s in sequences], accepted


def own_drafts(running):
    return pick_likeliest


def informed(expected):
    """Drafts that are mostly right: random weights alone would never be."""
    noise = torch.Generator().manual_seed(0)

    def pick_for(running):
        at = [(expected[s.slot], len(s.new)) for s in running]

        def pick(k, logits):
            wrong = torch.rand(len(at), generator=noise) < 0.2
            right = torch.tensor([(new + [5] * 9)[start + k] for new, start in at])
            return torch.where(wrong, pick_likeliest(k, logits), right)

        return pick

    return pick_for


def all_of_them(confidences):
    return [len(row) for row in confidences]


def some_of_them(confidences):
    return admit([survivals(row) for row in confidences], 4)


@pytest.mark.parametrize("replay", [False, True], ids=["exact", "replay"])
@pytest.mark.parametrize("sampled", [False, True], ids=["greedy", "sampled"])
def test_drafts_change_no_token(models, sampled, replay):
    expected = plainly(models, decodings(sampled, replay))
    for pick_for, lengths_of in (
        (own_drafts, all_of_them),
        (informed(expected), all_of_them),
        (informed(expected), some_of_them),
    ):
        found, accepted = with_drafts(models, decodings(sampled, replay), pick_for, lengths_of)
        assert found == expected
    assert max(accepted) > 0


def test_a_sequence_that_comes_without_context_has_its_tokens(models):
    expected = plainly(models, decodings(sampled=True))
    found, _ = with_drafts(models, decodings(sampled=True), own_drafts, all_of_them, moved=True)
    assert found == expected


def test_most_accepted_lengths_occur(models):
    expected = plainly(models, decodings())
    _, accepted = with_drafts(models, decodings(), informed(expected), all_of_them)
    assert {0, 1, 5} < set(accepted) <= set(range(6))


def test_accepted_lengths_of_a_text_by_hand(models):
    """Against full passes over the text and each run of drafts that holds."""
    model, drafts = models
    ids = text(25, 4)
    found = accepted_lengths(model, drafts, ids, first=2, stride=5)
    expected = []
    for place in range(2, len(ids), 5):
        cache, context, tap = model.new_cache(1, 64, 1), drafts.new_cache(1), drafts.tap()
        model.forward(torch.tensor(ids[:place]), [SequenceRows(0, [0], 0, place)], cache, tap)
        drafts.write(context, tap)
        proposed = drafts.propose(context, [Anchor(0, ids[place], place)]).token_ids[0].tolist()
        choices = model.logits([*ids[: place + 1], *proposed])[place:-1].argmax(1).tolist()
        pairs = zip(proposed, choices, strict=True)
        expected.append(next((k for k, (a, b) in enumerate(pairs) if a != b), len(proposed)))
    assert found.tolist() == expected
    assert torch.equal(found, accepted_lengths(model, drafts, ids, first=2, stride=5))


def test_drafts_of_the_text_itself_all_hold(models, monkeypatch):
    """A text that the model would write, and drafts that know it."""
    model, drafts = models
    one = decodings()[:1]
    written = one[0].prompt + plainly(models, one)[0]
    propose = type(drafts).propose

    def knowing(self, cache, anchors, pick=None):
        place = anchors[0].position
        return propose(self, cache, anchors, lambda k, _: torch.tensor([(written + [5] * 9)[place + 1 + k]]))

    monkeypatch.setattr(type(drafts), "propose", knowing)
    found = accepted_lengths(model, drafts, written[:-5], first=30, stride=3)
    assert found.tolist() == [5] * len(range(30, len(written) - 5, 3))
