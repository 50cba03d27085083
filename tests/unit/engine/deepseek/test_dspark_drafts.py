"""Drafts: what is trained is what is served, a sequence's bits are its own, and what is not verified goes."""

import json
from functools import lru_cache
from pathlib import Path

import pytest
import torch
from dspark_models import (
    COMPRESSED_IDS,
    config_of,
    drafting_model,
    raw_config,
    read_context,
    text,
    whole_tensors,
)
from golden_sets import RandomTensors

from engine.errors import BrokenHandoff, BrokenModelFile
from engine.model import configs
from engine.model.deepseek.config import DeepseekConfig, Quantisation
from engine.model.deepseek.dspark import DraftModel, pick_each, pick_likeliest
from engine.model.deepseek.dspark_context import Anchor, DraftCache, DraftPlan
from engine.model.deepseek.model import DeepseekModel
from engine.model.deepseek.rope import RotaryTables
from engine.model.deepseek.rows import SequenceRows
from engine.model.tensor_source import TensorsInMemory
from engine.speculation.distribution import probabilities
from engine.speculation.request_drafts import SampledDrafts
from engine.training.batches import BatchMaker
from engine.training.draft import Anchors, DraftPass, initial_drafts
from engine.training.network import Mode, Network
from engine.training.parameters import initial_parameters, released_tensors
from engine.training.rounding import released_rounding
from engine.training.sublayers import Rounding
from kernels.operations import select_operations
from protocol.sampling import SamplingParams

TEXT = text(64)
QUANTISED = {"released": Quantisation(), "float32": Quantisation.off()}


@lru_cache
def drafting(kind: str = "released"):
    return drafting_model(config_of(QUANTISED[kind]))


def same(a, b) -> bool:
    return all(torch.equal(getattr(a, n), getattr(b, n)) for n in ("token_ids", "logits", "confidence"))


@pytest.fixture(scope="module", params=QUANTISED)
def models(request, cpu_library):
    return drafting(request.param)


def stirred(parameters, seed):
    """Everything moved that starts out plain: norms, sinks, biases."""
    noise = torch.Generator().manual_seed(seed)
    return {
        name: tensor + 0.1 * torch.randn(tensor.shape, generator=noise) if tensor.dim() < 2 else tensor
        for name, tensor in parameters.items()
    }


@pytest.mark.parametrize("kind", QUANTISED)
def test_training_and_serving_draft_alike(kind, cpu_library):
    config = config_of(QUANTISED[kind])
    parameters = stirred(initial_parameters(config, 0) | initial_drafts(config, 1), 2)
    ids, places = torch.tensor([TEXT]), [1, 5, 8, 17, 40, 55]
    previous = ids[0][torch.tensor(places)[:, None] + torch.arange(config.dspark_block_size)]
    found = released_rounding(config)
    rounding = Rounding(found.window, found.main, found.index)
    network = Network.of(config, len(TEXT))
    with torch.no_grad():
        batch = BatchMaker.of(config, COMPRESSED_IDS)(ids.numpy().astype("uint16"))
        _, seen = network.forward(parameters, batch, Mode(rounding, sparse=True))
        anchors = Anchors(torch.tensor([places]), ids[0][places][None], previous[None])
        trained = DraftPass(network, parameters, rounding, seen.streams).run(anchors)
    source = TensorsInMemory(dict(released_tensors(parameters)), "training")
    model = DeepseekModel(config, source, select_operations(1), COMPRESSED_IDS)
    drafts = DraftModel(model, source)
    source.check_all_taken()
    far = 0
    for number, place in enumerate(places):
        cache = read_context(model, drafts, TEXT[:place], 13)
        said = [*TEXT[place + 1 :], 0, 0, 0, 0, 0][: config.dspark_block_size]
        anchor = Anchor(0, TEXT[place], place)
        served = drafts.propose(cache, [anchor], lambda k, _, said=said: torch.tensor([said[k]]))
        far += int(((trained.logits[0, number] - served.logits[0]).abs().amax(-1) > 1e-3).sum())
        difference = (trained.confidence[0, number].sigmoid() - served.confidence[0]).abs()
        far += int((difference > 1e-4).sum())
    # A value on a rounding's threshold may fall on either side; without rounding nothing may differ.
    assert far <= (6 if kind == "released" else 0)


@pytest.mark.parametrize("chunk", [1, 7, 64])
def test_chunks_of_the_text_change_no_bit(models, chunk):
    model, drafts = models
    anchor = [Anchor(0, 9, len(TEXT))]
    whole = drafts.propose(read_context(model, drafts, TEXT, 30), anchor)
    assert same(whole, drafts.propose(read_context(model, drafts, TEXT, chunk), anchor))


def test_sequences_leave_each_other_alone(models):
    """Drafted together and alone, with contexts written in one step and apart."""
    model, drafts = models
    texts = {0: TEXT, 1: text(3, 1), 2: text(23, 2)}
    rows = [SequenceRows(slot, range(9 * slot, 9 * slot + 5), 0, len(t)) for slot, t in texts.items()]
    tap, cache = drafts.tap(), drafts.new_cache(3)
    model.forward(torch.tensor([*TEXT, *texts[1], *texts[2]]), rows, model.new_cache(27, 16, 3), tap)
    drafts.write(cache, tap)
    anchors = [Anchor(slot, 7 + slot, len(t)) for slot, t in texts.items()]
    together = drafts.propose(cache, anchors)
    for number, (slot, one) in enumerate(texts.items()):
        alone = drafts.propose(read_context(model, drafts, one, 11, slot), [anchors[number]])
        for name in ("token_ids", "logits", "confidence"):
            assert torch.equal(getattr(together, name)[number], getattr(alone, name)[0]), (slot, name)


@pytest.mark.parametrize("kind", ["c", "torch"])
@pytest.mark.parametrize("threads", [1, 2])
def test_the_number_of_sequences_changes_no_bit(kind, threads, cpu_library):
    config = config_of()
    model = DeepseekModel(config, RandomTensors(), select_operations(threads, kind), COMPRESSED_IDS)
    drafts, count = DraftModel(model, RandomTensors()), 13
    cache, before = drafts.new_cache(count), torch.get_num_threads()
    cache.rings_BF.copy_(
        torch.randint(0, 120, cache.rings_BF.shape, generator=torch.Generator().manual_seed(1))
    )
    anchors = [Anchor(slot, 20 + slot, 2 + 3 * slot) for slot in range(count)]
    torch.set_num_threads(threads)
    try:
        together = drafts.propose(cache, anchors)
        for slot, anchor in enumerate(anchors):
            alone = drafts.propose(cache, [anchor])
            assert torch.equal(together.logits[slot], alone.logits[0])
            assert torch.equal(together.confidence[slot], alone.confidence[0])
        few = drafts.propose(cache, anchors[3:8])
        assert torch.equal(together.logits[3:8], few.logits)
    finally:
        torch.set_num_threads(before)


def test_what_is_not_verified_leaves_nothing(models):
    """Steps whose last five rows are rejected leave the bytes of a text that never had them."""
    model, drafts = models
    model_cache, cache, start = model.new_cache(5, 16, 1), drafts.new_cache(3), 0
    for count in (17, 1, 3, 9, 2, 11):
        tap, run = drafts.tap(), TEXT[start : start + count] + text(5, 5)
        model.forward(torch.tensor(run), [SequenceRows(0, range(5), start, len(run))], model_cache, tap)
        start += count
        drafts.write(cache, tap, {0: start - count})  # nothing
        drafts.write(cache, tap, {0: start})
        expected = read_context(model, drafts, TEXT[:start], 16)
        assert (cache.export_slot(0, start) == expected.export_slot(0, start)).all()


def test_a_draft_sees_the_window_before_its_anchor_alone(models):
    model, drafts = models
    window, place = drafts.config.sliding_window, 40
    plain = read_context(model, drafts, TEXT[:place], 16)
    anchor = [Anchor(0, 9, place)]
    expected = drafts.propose(plain, anchor)
    for position in (place - 1, place - window):
        cache = read_context(model, drafts, TEXT[:place], 16)
        cache.rings_BF[:, position % window, : drafts.config.head_dim] = 0
        assert not same(expected, drafts.propose(cache, anchor))
    bounded = drafts.propose(plain, [Anchor(0, 9, place, context_from=place - 3)])
    blank = read_context(model, drafts, TEXT[:place], 16)
    for position in range(place - window, place - 3):
        blank.rings_BF[:, position % window] = 0
    assert same(bounded, drafts.propose(blank, [Anchor(0, 9, place, context_from=place - 3)]))
    assert not same(bounded, expected)


def test_positions_of_a_plan():
    table = RotaryTables.of(config_of()).window
    plan = DraftPlan.of([Anchor(2, 9, 3), Anchor(0, 9, 11, 6)], 2, 8, table)
    context = plan.context_ring[plan.index[0, 5:8] - 1].tolist()
    assert context == [16, 17, 18]
    assert plan.index[0].tolist() == [0, 0, 0, 0, 0, 6, 7, 8, 17, 18]
    assert torch.equal(plan.index[0], plan.index[1])
    assert plan.index[2].tolist() == [0, 0, 0, 12, 13, 14, 15, 16, 19, 20]
    assert plan.context_ring[plan.index[2, 3:8] - 1].tolist() == [6, 7, 0, 1, 2]
    assert torch.equal(plan.angles.cos, table.angles(torch.tensor([3, 4, 11, 12])).cos)


def test_a_replayed_prompt_leaves_the_context_of_the_rows_that_the_decoder_saw(models):
    model, drafts = models
    start = len(TEXT) - drafts.config.sliding_window
    whole = read_context(model, drafts, TEXT, 64, decoder_from=start)
    parts = read_context(model, drafts, TEXT, 10, decoder_from=start)
    anchor = [Anchor(0, 9, len(TEXT), start)]
    assert same(drafts.propose(whole, anchor), drafts.propose(parts, anchor))


def test_a_context_goes_on_elsewhere(models):
    model, drafts = models
    here, there = read_context(model, drafts, TEXT, 16), drafts.new_cache(2)
    payload = here.export_slot(0, len(TEXT))
    assert payload.nbytes == here.slot_bytes()
    payload.flags.writeable = False
    there.import_slot(1, len(TEXT), payload)
    expected = drafts.propose(here, [Anchor(0, 9, len(TEXT))])
    assert same(expected, drafts.propose(there, [Anchor(1, 9, len(TEXT))]))
    with pytest.raises(BrokenHandoff, match=rf"has {payload.nbytes - 1} bytes, expected {payload.nbytes}"):
        there.import_slot(1, 3, payload[1:])


def test_picks_feed_the_markov_head(models):
    model, drafts = models
    cache = read_context(model, drafts, TEXT, 16)
    anchor = [Anchor(0, 9, len(TEXT))]
    likeliest = drafts.propose(cache, anchor)
    assert torch.equal(likeliest.token_ids, likeliest.logits.argmax(-1))
    other = drafts.propose(cache, anchor, lambda k, logits: (pick_likeliest(k, logits) + (k == 1)) % 298)
    assert torch.equal(likeliest.logits[:, :2], other.logits[:, :2])
    assert not torch.equal(likeliest.logits[:, 2], other.logits[:, 2])
    assert torch.equal(likeliest.confidence[:, :2], other.confidence[:, :2])
    assert not torch.equal(likeliest.confidence[:, 2:], other.confidence[:, 2:])
    assert ((likeliest.confidence >= 0) & (likeliest.confidence <= 1)).all()


def test_drafts_are_sampled_by_each_request_as_it_samples(models):
    """Each by its own parameters and noise; q of each is kept for the verdict."""
    model, drafts = models
    cache = read_context(model, drafts, TEXT, 16, slot=1)
    anchors = [Anchor(0, 9, len(TEXT)), Anchor(1, 9, len(TEXT))]
    samplings = (SamplingParams(temperature=0.9, top_k=5, seed=3), SamplingParams(temperature=2.0, seed=4))
    requests = [SampledDrafts(sampling, 7) for sampling in samplings]
    proposal = drafts.propose(cache, anchors, pick_each([r.pick for r in requests]))
    assert [r.token_ids for r in requests] == proposal.drafts([5, 5])
    for request, logits, sampling in zip(requests, proposal.logits.numpy(), samplings, strict=True):
        for q, row, token in zip(request.drawn_from, logits, request.token_ids, strict=True):
            assert (q == probabilities(row, sampling)).all()
            assert q[token] > 0
        verdict = request.judge(logits[[0, 1, 2]], 2)  # a model that says the same accepts all
        assert verdict.accepted == 2
    assert proposal.drafts([1, 0]) == [requests[0].token_ids[:1], []]


def test_a_slot_takes_as_many_bytes_as_the_windows_of_its_blocks():
    _, drafts = drafting()
    assert drafts.new_cache(7).slot_bytes() == 3 * 8 * 33
    released = json.loads((Path(configs.__file__).parent / "deepseek-v4.1-flash.json").read_text())
    assert DraftCache(DeepseekConfig.from_dict(released), 1).slot_bytes() == 3 * 128 * 528


def test_a_whole_checkpoint_is_taken():
    raw = raw_config()
    tensors = whole_tensors(raw)
    source = TensorsInMemory(tensors, "whole")
    config = DeepseekConfig.from_dict(raw)
    model = DeepseekModel(config, source, select_operations(1), COMPRESSED_IDS)
    DraftModel(model, source)
    with pytest.raises(BrokenModelFile, match=r"'(aligner|image|vision)"):
        source.check_all_taken()
    missing = TensorsInMemory({n: t for n, t in tensors.items() if n != "mtp.2.norm.weight"}, "whole")
    with pytest.raises(BrokenModelFile, match=r"no tensor 'mtp\.2\.norm\.weight'"):
        DraftModel(model, missing)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"num_nextn_predict_layers": 0}, "num_nextn_predict_layers' is 0, expected at least 1"),
        ({"dspark_block_size": 0}, "dspark_block_size' is 0, expected at least 1"),
        ({"dspark_block_size": 9}, "dspark_block_size' is 9, expected at most 8"),
        ({"dspark_target_layer_ids": [0, 9]}, "is \\[0, 9\\], expected layers from 1 on"),
        (
            {"dspark_target_layer_ids": [6, 7]},
            "is \\[6, 7\\], expected layers from 1 on, all up to .*, 6, or",
        ),
    ],
)
def test_configs_that_cannot_draft_are_refused(fields, message):
    model, _ = drafting()
    config = config_of(**fields)
    other = DeepseekModel(config, RandomTensors(), model.operations, COMPRESSED_IDS)
    with pytest.raises(BrokenModelFile, match=message):
        DraftModel(other, RandomTensors())
