"""The nano that ships: whole, small, in the release's formats, and as good as its card says."""

import math
import os

import pytest

from engine import Engine, EngineConfig, SamplingParams, load_model
from engine.checkpoint.checksums import SUMS
from engine.checkpoint.description import describe
from engine.checkpoint.folder import WEIGHTS, read_header
from engine.model_path import NANO, model_path
from engine.training.card import LARGEST_BYTES
from engine.training.card_text import card_text
from engine.training.corpus import standard_library
from engine.training.gate import gate
from engine.training.judging import Measured
from engine.training.model_card import Card, check_bits_per_byte, read_card
from engine.training.quality import Size, measure_quality
from engine.training.variants import ZEROED

SAMPLE = Size(judged=8, compared=2, recalled=4, drafted=2, stride=32)


@pytest.fixture(scope="module")
def card() -> Card:
    found = read_card(NANO)
    assert found is not None
    return found


def test_the_folder_is_whole_and_small():
    assert model_path("nano") == NANO
    sizes = {file.name: file.stat().st_size for file in NANO.iterdir()}
    assert sizes.keys() == {"README.md", "card.json", "config.json", SUMS, WEIGHTS, "tokenizer.json"}
    assert sum(sizes.values()) <= LARGEST_BYTES


def test_weights_have_the_names_shapes_and_types_of_a_release():
    found = describe("nano")  # checks names and shapes against the config
    assert found.num_files == 1
    assert found.num_tensors == len(read_header(NANO / WEIGHTS))
    assert found.caches.bytes_per_token == 106.0
    assert 2e6 < found.active.decode < 8e6
    types = {name: tensor.dtype for name, tensor in read_header(NANO / WEIGHTS).items()}
    expected = {
        "layers.3.ffn.experts.7.w1.weight": "I8",
        "layers.3.ffn.experts.7.w1.scale": "F8_E8M0",
        "layers.11.attn.wq_b.weight": "F8_E4M3",
        "layers.1.engram.embed.weight": "F8_E4M3",
        "mtp.2.ffn.experts.3.w2.weight": "I8",
        "embed.weight": "BF16",
        "layers.0.hc_attn_fn": "F32",
    }
    assert {name: types[name] for name in expected} == expected


def test_it_speaks_as_its_card_says(card: Card):
    assert check_bits_per_byte(NANO) == pytest.approx(card.check_bits_per_byte, abs=0.002)
    assert (NANO / "README.md").read_text() == card_text(card)
    assert card.gate == gate(card.quality, card.fp4_before)


def test_it_loads_by_its_name_and_writes_python():
    model = load_model("nano", threads=1)
    assert model.logits([0], last_only=True).isfinite().all()
    model.close()
    engine = Engine(EngineConfig(model="nano", threads=1))
    prompt = "import os\nimport sys\n\n\ndef main():\n    if not "
    (text,) = engine.generate([prompt], SamplingParams(max_tokens=12, ignore_eos=True))
    engine.model.close()
    assert len(set(text.split())) > 1, text


def test_a_sample_of_what_is_measured_agrees_with_the_card(card: Card):
    """Not the same windows, and another Python has other text: within errors, and a tenth."""
    processes = len(os.sched_getaffinity(0))
    quality = measure_quality(NANO, standard_library(), SAMPLE, processes, say=print)
    pairs = {
        "bits per byte": (quality.bits_per_byte, card.quality.bits_per_byte),
        "zeroed": (quality.effect(ZEROED).nats, card.quality.effect(ZEROED).nats),
        "recall": (quality.recall, card.quality.recall),
        "drafts": (quality.drafts.by_position[0], card.quality.drafts.by_position[0]),
    }
    far = {name: both for name, both in pairs.items() if not _agree(*both)}
    assert far == {}


def _agree(found: Measured, said: Measured) -> bool:
    return abs(found.value - said.value) <= 4 * math.hypot(found.error, said.error) + 0.1 * abs(said.value)
