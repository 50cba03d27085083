"""The profile `fast` on nano: the same bits on every path, near to float32, FP4 kept."""

from pathlib import Path

import pytest
import torch
from tokenizers import Tokenizer

from engine import Engine, EngineConfig, SamplingParams, load_model
from engine.errors import BrokenModelFile
from engine.model.deepseek.dspark_acceptance import accepted_lengths
from engine.model.deepseek.model import DeepseekModel
from engine.model.deepseek.rows import SequenceRows
from engine.model.deepseek.serving import DeepseekServed
from engine.model.registry import load_draft_model, load_vision_tower
from engine.model_path import NANO
from engine.training.corpus import standard_library

COUNT = 300


def nano(**settings: object) -> DeepseekServed:
    model = load_model("nano", threads=1, **settings)
    assert isinstance(model, DeepseekServed)
    return model


@pytest.fixture(scope="module")
def fast(cpu_library: Path) -> DeepseekServed:
    return nano(profile="fast")


@pytest.fixture(scope="module")
def ids() -> list[int]:
    text = standard_library().held_out[0].text
    return Tokenizer.from_file(str(NANO / "tokenizer.json")).encode(text).ids[:COUNT]


@pytest.mark.parametrize("chunk", [1, 7, 64, COUNT])
def test_chunks_give_the_bits_of_the_full_pass(fast: DeepseekServed, ids: list[int], chunk: int):
    if chunk == 1:
        ids = ids[:100]
    blocks = range(-(-len(ids) // 16))
    cache = fast.text.new_cache(len(blocks), 16, 1)
    parts = [
        fast.text.forward(part, [SequenceRows(0, blocks, chunk * number, len(part))], cache)
        for number, part in enumerate(torch.tensor(ids).split(chunk))
    ]
    assert torch.equal(fast.text.head(torch.cat(parts)), fast.logits(ids))


def test_two_threads_give_the_same_bits(fast: DeepseekServed, ids: list[int]):
    two = load_model("nano", threads=2, profile="fast")
    assert torch.equal(two.logits(ids), fast.logits(ids))


def test_experts_and_dense_weights_are_multiplied_as_they_ship(fast: DeepseekServed):
    for block in fast.text._blocks:
        experts = block._experts.experts
        routed = {
            w.format
            for e in experts._experts.values()
            for dense in (e.gate, e.up, e.down)
            for w in dense.parts
        }
        assert routed == {"mxfp4"}
        assert {w.format for w in experts._shared.gate.parts} == {"mxfp8"}
        assert {w.format for w in block._attention._output._wo_b.parts} == {"mxfp8"}
        assert block._experts.router.gate.parts[0].format == "bf16"


def test_is_near_to_float32_whatever_the_caches(fast: DeepseekServed, ids: list[int]):
    """Rounded caches take some rows to another code, and so make a small difference larger."""
    plain = nano(profile="fast", caches="float32")
    for ours, exact, most in ((fast, nano(), 2e-3), (plain, nano(caches="float32"), 2e-4)):
        before, after = (model.logits(ids).log_softmax(1) for model in (exact, ours))
        assert float((before.exp() * (before - after)).sum(1).mean()) < most
        assert float((before.argmax(1) == after.argmax(1)).float().mean()) > 0.97


def test_the_fallback_agrees(fast: DeepseekServed, ids: list[int]):
    """Products to the bit; what is around them is summed in another order."""
    plain = nano(profile="fast", operations="torch", caches="float32")
    ours = nano(profile="fast", caches="float32")
    found, expected = (model.logits(ids[:40]) for model in (plain, ours))
    torch.testing.assert_close(found, expected, rtol=1e-3, atol=1e-3)


def test_drafts_hold_as_often_as_in_float32(fast: DeepseekServed, ids: list[int]):
    """Loaded from the folder of the model, in its profile."""
    means: list[float] = []
    for model in (fast, nano()):
        text, drafts = model.text, load_draft_model(model)
        assert isinstance(text, DeepseekModel)
        means.append(float(accepted_lengths(text, drafts, ids, first=64, stride=8).float().mean()))
    assert means[0] > 0.5
    assert means[0] == pytest.approx(means[1], abs=0.4)


def test_nano_has_no_eyes(fast: DeepseekServed):
    with pytest.raises(BrokenModelFile, match="cannot see"):
        load_vision_tower(fast)


def test_an_engine_generates_with_it(cpu_library: Path):
    engine = Engine(EngineConfig(model="nano", threads=1, profile="fast"))
    prompt = "import os\nimport sys\n\n\ndef main():\n    if not "
    (text,) = engine.generate([prompt], SamplingParams(max_tokens=12, ignore_eos=True))
    engine.model.close()
    assert len(set(text.split())) > 1, text
