"""Transformers' DeepSeek-V4 in its two namings: every weight has its released name, and none is left."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from engine.checkpoint.conversion import convert
from engine.checkpoint.source import CheckpointSource, open_checkpoint

CONFIG = {
    "vocab_size": 128, "hidden_size": 64, "moe_intermediate_size": 32, "num_hidden_layers": 5,
    "num_attention_heads": 4, "num_key_value_heads": 1, "head_dim": 32, "qk_rope_head_dim": 8,
    "q_lora_rank": 24, "o_groups": 2, "o_lora_rank": 16, "n_routed_experts": 8, "num_experts_per_tok": 2,
    "n_shared_experts": 1, "sliding_window": 16,
    "layer_types": ["sliding_attention", "compressed_sparse_attention", "heavily_compressed_attention",
                    "compressed_sparse_attention", "heavily_compressed_attention"],
    "compress_rates": {"compressed_sparse_attention": 4, "heavily_compressed_attention": 8},
    "num_hash_layers": 1, "index_n_heads": 16, "index_head_dim": 16, "index_topk": 4, "hc_mult": 4,
    "hc_sinkhorn_iters": 20, "max_position_embeddings": 4096, "rope_theta": 1e4, "compress_rope_theta": 1.6e5,
    "rope_parameters": {"rope_type": "yarn", "factor": 16, "beta_fast": 32, "beta_slow": 1,
                        "original_max_position_embeddings": 256},
    "pad_token_id": None, "num_nextn_predict_layers": 0,
}  # fmt: skip


@pytest.fixture(scope="module", params=["saved", "state"])
def saved(tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest) -> tuple[Any, Path]:
    """A random model and its folder: as transformers saves it, or with the names that it has in memory."""
    from transformers.models.deepseek_v4.configuration_deepseek_v4 import DeepseekV4Config
    from transformers.models.deepseek_v4.modeling_deepseek_v4 import DeepseekV4ForCausalLM

    torch.manual_seed(0)
    model = DeepseekV4ForCausalLM(DeepseekV4Config(**CONFIG))
    with torch.no_grad():
        for tensor in (*model.parameters(), *model.buffers()):
            if tensor.is_floating_point():
                tensor.normal_()
        model.model.layers[0].mlp.gate.tid2eid.random_(8)
    folder = tmp_path_factory.mktemp("v4") / "saved"
    model.save_pretrained(folder)
    if request.param == "state":
        save_file(model.state_dict(), folder / "model.safetensors")
    return model, folder


def weights(source: CheckpointSource) -> Iterator[tuple[str, torch.Tensor]]:
    for entry in source.family.entries:
        yield entry.name, source.take(entry.name, entry.shape)


def test_every_weight_is_found(saved: tuple[Any, Path]) -> None:
    model, folder = saved
    source = open_checkpoint(folder)
    taken = dict(weights(source))
    source.check_all_taken()
    state = model.state_dict()
    expert = taken["layers.3.ffn.experts.5.w3.weight"]
    assert torch.equal(expert, state["model.layers.3.mlp.experts.gate_up_proj"][5, 32:])
    assert torch.equal(
        taken["layers.3.ffn.experts.5.w2.weight"], state["model.layers.3.mlp.experts.down_proj"][5]
    )
    assert torch.equal(taken["layers.0.ffn.gate.tid2eid"], state["model.layers.0.mlp.gate.tid2eid"].float())
    assert torch.equal(
        taken["layers.1.attn.indexer.compressor.ape"],
        state["model.layers.1.self_attn.compressor.indexer.position_bias"],
    )
    assert sum(t.numel() for t in taken.values()) == sum(t.numel() for t in state.values())


def test_a_converted_folder_holds_the_same_weights(saved: tuple[Any, Path], tmp_path: Path) -> None:
    _, folder = saved
    convert(folder, tmp_path / "released", dense="f32", experts="f32", shard_bytes=100_000)
    before, after = (
        dict(weights(open_checkpoint(folder))),
        dict(weights(open_checkpoint(tmp_path / "released"))),
    )
    assert before.keys() == after.keys()
    assert all(torch.equal(before[name], after[name]) for name in before)
