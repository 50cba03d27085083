"""V4's config under the release's names and transformers'; what cannot be is refused by field."""

import copy
import json
from importlib import resources

import pytest
from tiny_v4 import TINY, tiny_config

from engine.cache.layout import v4_layout
from engine.checkpoint.v4_shape import V4Layer
from engine.errors import BrokenModelFile
from engine.model.deepseek_v4.cache import bytes_per_slot, bytes_per_token
from engine.model.deepseek_v4.config import DeepseekV4Config, V4Quantisation

CONFIGS = resources.files("engine.model.configs")
FLASH = json.loads(CONFIGS.joinpath("deepseek-v4-flash.json").read_text("utf-8"))


def test_the_release_parses():
    config = DeepseekV4Config.from_dict(FLASH)
    kinds = [layer.attention for layer in config.layers]
    assert (kinds.count("window"), kinds.count("csa"), kinds.count("hca")) == (2, 21, 20)
    assert (config.ratio(2), config.ratio(3), config.ratio(42), config.ratio(43)) == (4, 128, 4, 0)
    assert (config.num_hash_layers, config.num_nextn_predict_layers) == (3, 1)
    assert (config.rope_scaling.factor, config.compress_rope_theta) == (16, 160000)


def test_the_release_takes_the_published_bytes():
    """Section 3: 3514.25 bytes a token with FP8 records and MXFP4 keys; windows of 584 bytes a row."""
    config = DeepseekV4Config.from_dict(FLASH)
    assert bytes_per_token(config) == 3514.25 == v4_layout(config).bytes_per_token
    fp8 = DeepseekV4Config.from_dict(FLASH, V4Quantisation(index="fp8"))
    assert bytes_per_token(fp8) == 21 * (584 + 132) / 4 + 20 * 584 / 128
    windows, spare = 44 * 128 * 584, 44 * 8 * 584
    open_groups = 21 * (7 + 8) * 4 * (512 + 128) * 4 + 20 * (127 + 8) * 2 * 512 * 4
    assert bytes_per_slot(config) == windows + spare + open_groups + 8 * 8


def test_transformers_names_say_the_same():
    raw = copy.deepcopy(TINY)
    for name in ("compress_ratios", "num_hash_layers", "rope_scaling"):
        del raw[name]
    csa, hca = "compressed_sparse_attention", "heavily_compressed_attention"
    raw |= {
        "layer_types": ["sliding_attention", csa, hca, csa, hca],
        "compress_rates": {csa: 4, hca: 8},
        "mlp_layer_types": ["hash_moe", *["moe"] * 4],
        "rope_parameters": {
            "main": {"rope_type": "default", "rope_theta": 10000, "partial_rotary_factor": 0.25},
            "compress": {**TINY["rope_scaling"], "rope_theta": 160000, "attention_factor": 1.0},
        },
    }  # fmt: skip
    assert DeepseekV4Config.from_dict(raw, V4Quantisation.off()) == tiny_config()
    raw["rope_parameters"]["compress"] = {"rope_theta": 160000}
    assert DeepseekV4Config.from_dict(raw, V4Quantisation.off()).rope_scaling is None
    raw["rope_parameters"] = TINY["rope_scaling"]
    assert DeepseekV4Config.from_dict(raw, V4Quantisation.off()) == tiny_config()


def test_layer_types_may_have_any_rate():
    csa = "compressed_sparse_attention"
    raw = {**TINY, "layer_types": [csa] * 5, "compress_rates": {csa: 3}}
    assert DeepseekV4Config.from_dict(raw, V4Quantisation.off()).layers == (V4Layer("csa", 3),) * 5


FAULTS = [
    ({"num_hash_layers": 9}, r"num_hash_layers' is 9, expected at most num_hidden_layers, which is 5"),
    ({"sliding_window": 2}, r"sliding_window' is 2, expected at least 4, the ratio"),
    ({"o_groups": 3}, r"o_groups' is 3, expected a divisor of num_attention_heads, which is 4"),
    ({"qk_rope_head_dim": 7}, r"qk_rope_head_dim' is 7, expected an even number up to head_dim"),
    ({"qk_rope_head_dim": 40}, r"index_head_dim' is 32, expected at least qk_rope_head_dim, which is 40"),
    ({"num_experts_per_tok": 9}, r"num_experts_per_tok' is 9, expected at most n_routed_experts"),
    ({"scoring_func": "softmax"}, r"scoring_func' is 'softmax'"),
    ({"topk_method": "greedy"}, r"topk_method' is 'greedy'"),
    ({"hidden_act": "gelu"}, r"hidden_act' is 'gelu'"),
    ({"attention_bias": True}, r"attention_bias' is True"),
    ({"num_key_value_heads": 2}, r"num_key_value_heads' is 2"),
    ({"n_shared_experts": 2}, r"n_shared_experts' is 2"),
    ({"tie_word_embeddings": True}, r"tie_word_embeddings' is True"),
    ({"hc_eps": 0}, r"hc_eps' is 0, expected a positive number"),
    ({"index_topk": None}, r"index_topk' is missing|index_topk' is None"),
    ({"compress_ratios": [0, 4]}, r"num_hidden_layers' is 5"),
    ({"rope_scaling": {"rope_type": "linear"}}, r"rope_scaling.rope_type' is 'linear', expected 'yarn'"),
    ({"rope_scaling": {"type": "yarn", "factor": 16}}, r"rope_scaling.rope_type' is missing"),
    ({"rope_scaling": {**TINY["rope_scaling"], "factor": 0.5}}, r"rope_scaling'.*a factor of at least 1"),
    ({"rope_scaling": {**TINY["rope_scaling"], "attention_factor": 1.2}}, r"attention_factor' is 1.2"),
]  # fmt: skip


@pytest.mark.parametrize(("fields", "message"), FAULTS)
def test_what_cannot_be_is_refused_by_field(fields, message):
    with pytest.raises(BrokenModelFile, match=message):
        tiny_config(**fields)


def test_widths_that_do_not_fill_a_record_are_refused_where_it_is_on():
    narrow = {**TINY, "head_dim": 48}
    with pytest.raises(BrokenModelFile, match=r"head_dim' is 48, .*a multiple of 64 beside it"):
        DeepseekV4Config.from_dict(narrow)
    with pytest.raises(BrokenModelFile, match=r"index_head_dim' is 24, expected a multiple of 32"):
        DeepseekV4Config.from_dict({**TINY, "index_head_dim": 24})
    only_index = V4Quantisation(window=False, main=False)
    assert DeepseekV4Config.from_dict(narrow, only_index).head_dim == 48
    keys = V4Quantisation(index="fp8")
    assert DeepseekV4Config.from_dict({**TINY, "index_head_dim": 24}, keys).index_head_dim == 24
