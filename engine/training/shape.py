"""nano's shape: every mechanism of DeepSeek-V4.1 at a size that two cores can train (fact sheet, 11.3)."""

from typing import Any

from tokenizers import Tokenizer

from engine.training.vocabulary import BOS, EOS, IMAGE, NOISE, PAD, SIZE, token_id

LAYERS = 12


def nano_config(tokenizer: Tokenizer, compressed_vocabulary: int, engram_rows: list[int]) -> dict[str, Any]:
    """config.json of the released form. `dockyard model info nano` counts: 3.5 million active parameters at
    prefill, 7.4 million at decode, and the Engram tables.

    `compressed_vocabulary` is the number of ids that Engram's compression leaves of the tokenizer's, and
    `engram_rows` the rows of each Engram layer's table, both by section 7.
    """
    text = {
        "model_type": "deepseek_v41_text",
        "vocab_size": SIZE,
        "hidden_size": 256,
        "num_hidden_layers": LAYERS,
        "max_position_embeddings": 262_144,
        "rms_norm_eps": 1e-20,
        "hidden_act": "silu",
        "tie_word_embeddings": False,
        "num_attention_heads": 4,
        "num_key_value_heads": 1,
        "head_dim": 64,
        "qk_rope_head_dim": 16,
        "q_lora_rank": 96,
        "o_lora_rank": 64,
        "o_groups": 2,
        "sliding_window": 64,
        "rope_theta": 10_000,
        "compress_rope_theta": 160_000,
        "rope_scaling": {
            "rope_type": "yarn", "factor": 16, "beta_fast": 32, "beta_slow": 1,
            "original_max_position_embeddings": 16_384,
        },
        "compress_ratios": [0, 0, 2, 2, 2, 2, 1, 1, 1, 1, 1, 1, 0, 0, 0],
        "kv_source_layer_ids": [2, 4, 6],
        "index_source_layer_ids": [2, 4, 6, 8, 10],
        "index_n_heads": 16,
        "index_head_dim": 32,
        "index_topk": 64,
        "candidate_source_layer_id": 6,
        "candidate_topk_blocks": 32,
        "candidate_block_size": 8,
        "moe_intermediate_size": 128,
        "n_routed_experts": 8,
        "n_shared_experts": 1,
        "num_experts_per_tok": 2,
        "scoring_func": "sqrtsoftplus",
        "topk_method": "noaux_tc",
        "norm_topk_prob": True,
        "routed_scaling_factor": 1.5,
        "swiglu_limit": 10.0,
        "hc_mult": 4,
        "hc_sinkhorn_iters": 20,
        "hc_eps": 1e-6,
        "engram_layer_ids": [1, 3],
        "engram_num_embeddings": engram_rows,
        "engram_max_ngram_size": 4,
        "engram_vocab_size": 8_192,
        "engram_n_heads": 2,
        "engram_head_dim": 32,
        "engram_pad_token_id": token_id(tokenizer, PAD),
        "engram_compressed_vocab_size": compressed_vocabulary,
        "num_nextn_predict_layers": 3,
        "dspark_block_size": 5,
        "dspark_noise_token_id": token_id(tokenizer, NOISE),
        "dspark_target_layer_ids": [9, 10, 11],
        "dspark_markov_rank": 64,
        "dspark_n_routed_experts": 4,
        "dspark_num_experts_per_tok": 2,
    }  # fmt: skip
    return {
        "architectures": ["DeepseekV41ForCausalLM"],
        "model_type": "deepseek_v41",
        "dtype": "bfloat16",
        "bos_token_id": token_id(tokenizer, BOS),
        "eos_token_id": token_id(tokenizer, EOS),
        "pad_token_id": token_id(tokenizer, PAD),
        "image_token_id": token_id(tokenizer, IMAGE),
        "quantization_config": {
            "quant_method": "fp8", "activation_scheme": "dynamic", "weight_block_size": [32, 32],
            "scale_fmt": "ue8m0", "expert_dtype": "fp4",
        },
        "text_config": text,
    }  # fmt: skip
