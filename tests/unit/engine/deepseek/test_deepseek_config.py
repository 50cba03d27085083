"""A config that cannot be what it says is refused by field; layer roles follow the rule of section 1.1."""

import copy

import pytest
from golden_sets import read

from engine.errors import BrokenModelFile
from engine.model.deepseek.cache import bytes_per_slot, bytes_per_token
from engine.model.deepseek.config import DeepseekConfig, Quantisation
from engine.model.deepseek.roles import cut_layer, layer_roles

_TEXT = {
    "model_type": "deepseek_v41_text", "vocab_size": 129280, "hidden_size": 5120,
    "moe_intermediate_size": 2304, "num_hidden_layers": 40, "num_attention_heads": 64,
    "num_key_value_heads": 1, "head_dim": 512, "qk_rope_head_dim": 64, "q_lora_rank": 1280,
    "o_lora_rank": 1024, "o_groups": 8, "hidden_act": "silu", "swiglu_limit": 10.0,
    "rms_norm_eps": 1e-20, "tie_word_embeddings": False, "max_position_embeddings": 1048576,
    "rope_theta": 10000, "n_routed_experts": 384, "n_shared_experts": 1, "num_experts_per_tok": 6,
    "rope_scaling": {
        "rope_type": "yarn", "factor": 16, "beta_fast": 32, "beta_slow": 1,
        "original_max_position_embeddings": 65536,
    },
    "scoring_func": "sqrtsoftplus", "topk_method": "noaux_tc", "norm_topk_prob": True,
    "routed_scaling_factor": 1.5, "sliding_window": 128, "compress_rope_theta": 160000,
    "compress_ratios": [0, 0, *[2] * 18, *[1] * 20, 0, 0, 0], "kv_source_layer_ids": [2, 8, 14, 20],
    "index_source_layer_ids": [2, 8, 14, 20, 24, 28, 32, 36], "index_n_heads": 32, "index_head_dim": 128,
    "index_topk": 512, "candidate_source_layer_id": 20, "candidate_topk_blocks": 2048,
    "candidate_block_size": 8, "hc_mult": 4, "hc_sinkhorn_iters": 20, "hc_eps": 1e-6,
    "engram_layer_ids": [1, 14], "engram_num_embeddings": [384006168, 384016682],
    "engram_max_ngram_size": 4, "engram_vocab_size": 16000000, "engram_n_heads": 8,
    "engram_head_dim": 256, "engram_pad_token_id": 2, "engram_compressed_vocab_size": 99092,
    "num_nextn_predict_layers": 3, "dspark_block_size": 5, "dspark_noise_token_id": 128799,
    "dspark_target_layer_ids": [37, 38, 39], "dspark_markov_rank": 256, "dspark_n_routed_experts": 128,
    "dspark_num_experts_per_tok": 3,
}  # fmt: skip
RELEASE = {
    "model_type": "deepseek_v41", "bos_token_id": 0, "eos_token_id": 1, "pad_token_id": 2,
    "image_token_id": 129264, "text_config": _TEXT, "vision_config": {"patch_size": 14},
}  # fmt: skip


def _release(**fields):
    raw = copy.deepcopy(RELEASE)
    raw["text_config"].update(fields)
    return raw


def test_the_release_parses():
    config = DeepseekConfig.from_dict(RELEASE)
    assert (config.hidden_size, config.rope_scaling.factor, config.ratio(2), config.ratio(99)) == (
        5120,
        16,
        2,
        0,
    )
    assert (config.image_token_id, config.vision_config["patch_size"]) == (129264, 14)


def test_the_release_takes_890_bytes_a_token_and_its_windows_a_slot():
    config = DeepseekConfig.from_dict(RELEASE)
    assert bytes_per_token(config) == 890
    windows, spare = 40 * 128 * 528, 40 * 8 * 528
    open_groups, lookback = 3 * 9 * 1024 * 4, 11 * 8
    assert bytes_per_slot(config) == windows + spare + open_groups + lookback


def test_roles_of_the_release():
    config = DeepseekConfig.from_dict(RELEASE)
    roles = layer_roles(config)
    names = [role.role for role in roles]
    assert {name: names.count(name) for name in names} == {"window": 2, "full": 4, "reuse": 30, "reindex": 4}
    assert [r.layer for r in roles if r.role == "full"] == [2, 8, 14, 20]
    assert [r.layer for r in roles if r.role == "reindex"] == [24, 28, 32, 36]
    assert [r.layer for r in roles if r.uses_candidates] == [24, 28, 32, 36]
    assert [r.layer for r in roles if r.makes_candidates] == [20]
    assert (roles[7].kv_source, roles[7].index_source) == (2, 2)
    assert (roles[31].kv_source, roles[31].index_source) == (20, 28)
    assert cut_layer(config) == 20


def test_the_other_spelling_of_the_padding_token():
    raw = _release()
    raw["text_config"]["engram_pad_id"] = raw["text_config"].pop("engram_pad_token_id")
    assert DeepseekConfig.from_dict(raw).engram_pad_token_id == 2


def test_a_negative_candidate_source_turns_the_level_off():
    config = DeepseekConfig.from_dict(_release(candidate_source_layer_id=-1))
    assert not any(r.makes_candidates or r.uses_candidates for r in layer_roles(config))


FAULTS = [
    ({"compress_ratios": [2] * 43}, r"compress_ratios.*expected 0 for every draft block"),
    ({"compress_ratios": [0, 2, *[2] * 18, *[1] * 20]}, r"compress_ratios.*no kv source comes before it"),
    ({"compress_ratios": [0, 0, *[2] * 18, *[1] * 19, 2]}, r"compress_ratios.*1 for layer 39, as its"),
    ({"compress_ratios": [0] * 7}, r"compress_ratios.*expected 40 ratios, one a layer, or 43"),
    ({"compress_ratios": "all"}, r"compress_ratios' is 'all', expected a list of integers"),
    ({"kv_source_layer_ids": [1, 2, 8, 14, 20]}, r"kv_source_layer_ids.*compress_ratios\[1\] is 0"),
    ({"kv_source_layer_ids": [2, 14, 8, 20]}, r"kv_source_layer_ids.*ascending order"),
    ({"kv_source_layer_ids": [2, 8, 14, 20, 44]}, r"kv_source_layer_ids.*below num_hidden_layers"),
    ({"index_source_layer_ids": [2, 8, 14, 24]}, r"index_source_layer_ids.*layer 20 is missing"),
    ({"candidate_source_layer_id": 21}, r"candidate_source_layer_id' is 21, expected one of kv_source"),
    ({"candidate_source_layer_id": 14}, r"candidate_source_layer_id' is 14, expected 20, the last"),
    ({"candidate_block_size": 0}, r"candidate_block_size' is 0, expected at least 1"),
    ({"scoring_func": "softmax"}, r"scoring_func' is 'softmax', expected 'sqrtsoftplus'"),
    ({"topk_method": "greedy"}, r"topk_method' is 'greedy', expected 'noaux_tc'"),
    ({"norm_topk_prob": False}, r"norm_topk_prob' is False"),
    ({"hidden_act": "gelu"}, r"hidden_act' is 'gelu'"),
    ({"num_key_value_heads": 8}, r"num_key_value_heads' is 8"),
    ({"tie_word_embeddings": True}, r"tie_word_embeddings' is True"),
    ({"rope_scaling": {"rope_type": "linear"}}, r"rope_scaling.rope_type' is 'linear', expected 'yarn'"),
    ({"rope_scaling": {"rope_type": "yarn"}}, r"rope_scaling.factor' is missing, expected a positive number"),
    ({"head_dim": 520}, r"head_dim' is 520, expected a multiple of 32, the group of the FP8 window"),
    ({"index_head_dim": 72}, r"index_head_dim' is 72, expected a multiple of 32, the group of the MXFP4"),
    ({"qk_rope_head_dim": 63}, r"qk_rope_head_dim' is 63, expected an even number"),
    ({"o_groups": 7}, r"o_groups' is 7, expected a divisor of num_attention_heads"),
    ({"num_experts_per_tok": 385}, r"num_experts_per_tok' is 385, expected at most n_routed_experts"),
    ({"engram_num_embeddings": [5]}, r"engram_num_embeddings.*expected 2 numbers"),
    ({"engram_n_heads": 0}, r"engram_n_heads' is 0, expected at least 1"),
    ({"engram_layer_ids": [1, 40]}, r"engram_layer_ids.*below num_hidden_layers"),
    ({"dspark_num_experts_per_tok": 0}, r"dspark_num_experts_per_tok' is 0, expected 1 to"),
    ({"hidden_size": "5120"}, r"hidden_size' is '5120', expected an integer of at least 1"),
    ({"hidden_size": True}, r"hidden_size' is True, expected an integer"),
    ({"vocab_size": 1000}, r"expected more than image_token_id"),
    ({"rms_norm_eps": -1e-6}, r"rms_norm_eps' is -1e-06, expected a positive number"),
    ({"rope_theta": 10**400}, r"rope_theta' is 10+, expected a positive number"),
    ({"compress_rope_theta": 1}, r"compress_rope_theta' is 1.0, expected a number above 1"),
    ({"gate_temp": 2.0}, r"gate_temp' is 2.0, expected 1.0: nothing else is supported"),
    ({"rope_scaling": _TEXT["rope_scaling"] | {"attention_factor": 1.3}}, r"attention_factor' is 1.3"),
    ({"rope_scaling": _TEXT["rope_scaling"] | {"mscale_all_dim": 1.0}}, r"mscale_all_dim' is 1.0"),
    ({"num_hash_layers": 2}, r"num_hash_layers' is 2, expected 0"),
    ({"first_k_dense_replace": 1}, r"first_k_dense_replace' is 1, expected 0"),
    ({"n_group": 8}, r"n_group' is 8, expected 1"),
]  # fmt: skip


@pytest.mark.parametrize(
    ("fields", "message"), FAULTS, ids=[f"{i}-{next(iter(f))}" for i, (f, _) in enumerate(FAULTS)]
)
def test_a_fault_names_field_value_and_rule(fields, message):
    with pytest.raises(BrokenModelFile, match=message):
        DeepseekConfig.from_dict(_release(**fields))


@pytest.mark.parametrize("field", ["hidden_size", "compress_ratios", "kv_source_layer_ids", "sliding_window"])
def test_a_missing_field_is_named(field):
    raw = _release()
    del raw["text_config"][field]
    with pytest.raises(BrokenModelFile, match=f"text_config.{field}' is missing, expected"):
        DeepseekConfig.from_dict(raw)


def test_a_token_that_is_none_is_refused():
    with pytest.raises(BrokenModelFile, match="eos_token_id' is 129280, expected a token, below vocab_size"):
        DeepseekConfig.from_dict({**_release(), "eos_token_id": 129_280})


@pytest.mark.parametrize("raw", [{"model_type": "deepseek_v3"}, {"model_type": "deepseek_v41"}, {}])
def test_what_is_no_such_model_is_refused(raw):
    with pytest.raises(BrokenModelFile, match=r"model_type|text_config"):
        DeepseekConfig.from_dict(raw)


def test_group_sizes_count_only_where_caches_are_quantised():
    raw = {**read("b", "config.json")}
    raw["text_config"]["head_dim"] = 24
    assert DeepseekConfig.from_dict(raw, Quantisation.off()).head_dim == 24
    with pytest.raises(BrokenModelFile, match="head_dim' is 24"):
        DeepseekConfig.from_dict(raw, Quantisation(index=False))
