"""Bytes of caches: published figures, and agreement with what the model's own caches take."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from tiny_deepseek import TINY, TINY_TEXT

from engine.cache.layout import v4_layout, v41_layout
from engine.checkpoint.family import read_family
from engine.checkpoint.v4_shape import V4Shape
from engine.errors import BrokenModelFile
from engine.model import configs
from engine.model.deepseek.cache import bytes_per_token
from engine.model.deepseek.config import DeepseekConfig, Quantisation

CONFIGS = Path(configs.__file__).parent


def raw(name: str) -> dict[str, Any]:
    return json.loads((CONFIGS / f"{name}.json").read_text())


def test_v41_flash() -> None:
    layout = v41_layout(DeepseekConfig.from_dict(raw("deepseek-v4.1-flash")))
    assert layout.bytes_per_token == 890
    assert layout.window_bytes == 40 * 128 * 528
    assert layout.draft_window_bytes == 3 * 128 * 528
    assert layout.handoff is not None
    assert layout.handoff.window_bytes == (20 * 128 + 255) * 528  # rows of the cut read back too
    assert layout.handoff.stream_bytes == 128 * (4 * 5120 * 2 + 4 * 4)
    assert layout.handoff.open_group_bytes == 3 * 1024 * 4
    assert layout.handoff.lookback_bytes == 3 * 8


def test_v4_flash() -> None:
    layout = v4_layout(V4Shape.from_dict(raw("deepseek-v4-flash")))
    assert layout.bytes_per_token == 21 * (584 + 68) / 4 + 20 * 584 / 128 == 3514.25
    assert layout.window_bytes == 43 * 128 * 584


@pytest.mark.parametrize("quantisation", [Quantisation(), Quantisation.off(), Quantisation(main=False)])
@pytest.mark.parametrize("config", [TINY, raw("deepseek-v4.1-flash")], ids=["tiny", "flash"])
def test_the_models_caches_take_what_the_layout_says(
    config: dict[str, Any], quantisation: Quantisation
) -> None:
    read = DeepseekConfig.from_dict(config, quantisation)
    assert v41_layout(read).bytes_per_token == bytes_per_token(read)


def test_without_quantisation_entries_are_float32() -> None:
    read = DeepseekConfig.from_dict(TINY, Quantisation.off())
    assert v41_layout(read).bytes_per_token == (32 + 32) * 4 / 2 + (32 + 32) * 4
    assert v41_layout(read).window_bytes == 6 * 8 * 32 * 4


def test_a_model_without_global_entries_hands_over_nothing() -> None:
    text = TINY_TEXT | {
        "compress_ratios": [0] * 8, "kv_source_layer_ids": [], "index_source_layer_ids": [],
        "candidate_source_layer_id": -1,
    }  # fmt: skip
    layout = v41_layout(DeepseekConfig.from_dict(TINY | {"text_config": text}))
    assert (layout.bytes_per_token, layout.handoff) == (0, None)


def test_widths_that_fill_no_groups_are_described_as_they_can_be_loaded_in_float32() -> None:
    text = TINY_TEXT | {"head_dim": 48}
    config = read_family(TINY | {"text_config": text}).config
    assert isinstance(config, DeepseekConfig)
    assert config.quantisation == Quantisation.off()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"num_hidden_layers": 44, "compress_ratios": [0, 0, 4]}, "'num_hidden_layers' is 44, expected .* 3"),
        ({"layer_types": ["linear"], "compress_rates": {}}, "'layer_types' is 'linear'"),
        ({"layer_types": 3, "compress_rates": {}}, "'layer_types' is 3, expected a list"),
        (
            {"layer_types": ["compressed_sparse_attention"], "compress_rates": {}},
            "compressed_sparse_attention",
        ),
        ({"n_shared_experts": 2}, "n_shared_experts"),
        ({"hidden_size": None}, "hidden_size"),
    ],
)
def test_a_v4_field_that_does_not_fit_is_named(change: dict[str, object], message: str) -> None:
    with pytest.raises(BrokenModelFile, match=message):
        V4Shape.from_dict(raw("deepseek-v4-flash") | change)


def test_transformers_layer_types_say_the_same_as_ratios() -> None:
    ratios = V4Shape.from_dict(raw("deepseek-v4-flash"))
    names = {
        "window": "sliding_attention",
        "csa": "compressed_sparse_attention",
        "hca": "heavily_compressed_attention",
    }
    types = V4Shape.from_dict(
        raw("deepseek-v4-flash")
        | {
            "compress_ratios": None,
            "layer_types": [names[layer.attention] for layer in ratios.layers],
            "compress_rates": {"compressed_sparse_attention": 4, "heavily_compressed_attention": 128},
        }
    )
    assert types == replace(ratios)
