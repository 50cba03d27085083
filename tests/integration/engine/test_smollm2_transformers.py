"""Ours against Hugging Face's Llama in float32 with the weights of the file, dequantised."""

import gguf
import pytest
import torch
from gguf import GGMLQuantizationType
from smollm2_prompts import QUESTIONS, chat_ids
from torch import Tensor

from engine.chat.template import ChatTemplate
from engine.chat.tokenizer import ChatTokenizer
from engine.gguf_file import GgufFile
from engine.model.llama import LlamaModel

_NAMES = {
    "attn_q": "self_attn.q_proj", "attn_k": "self_attn.k_proj", "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj", "ffn_gate": "mlp.gate_proj", "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj", "attn_norm": "input_layernorm", "ffn_norm": "post_attention_layernorm",
}  # fmt: skip


@pytest.fixture(scope="module")
def reference(smollm2: LlamaModel) -> torch.nn.Module:
    transformers = pytest.importorskip("transformers")
    config = smollm2.config
    model = transformers.LlamaForCausalLM(
        transformers.LlamaConfig(
            vocab_size=config.vocabulary, hidden_size=config.channels, intermediate_size=config.feed_forward,
            num_hidden_layers=config.num_layers, num_attention_heads=config.num_heads,
            num_key_value_heads=config.num_kv_heads, head_dim=config.head_channels,
            max_position_embeddings=config.max_positions, rms_norm_eps=config.norm_eps,
            rope_parameters={"rope_type": "default", "rope_theta": config.rope_theta},
            tie_word_embeddings=True, attn_implementation="eager", dtype="float32",
        )
    )  # fmt: skip
    missing, unexpected = model.load_state_dict(_weights(smollm2), strict=False)
    assert (list(missing), list(unexpected)) == (["lm_head.weight"], [])
    model.tie_weights()
    return model.eval()


def _weights(model: LlamaModel) -> dict[str, Tensor]:
    config, file = model.config, model.file
    weights = {
        "model.embed_tokens.weight": _dequantised(file, "token_embd.weight"),
        "model.norm.weight": _dequantised(file, "output_norm.weight"),
    }
    for layer in range(config.num_layers):
        for ours, theirs in _NAMES.items():
            tensor = _dequantised(file, f"blk.{layer}.{ours}.weight")
            if ours in ("attn_q", "attn_k"):
                tensor = _half_split(tensor, config.head_channels)
            weights[f"model.layers.{layer}.{theirs}.weight"] = tensor
    return weights


def _dequantised(file: GgufFile, name: str) -> Tensor:
    tensor = file.tensors[name]
    values = gguf.quants.dequantize(tensor.data, GGMLQuantizationType[tensor.format])
    return torch.from_numpy(values).reshape(tensor.shape)


def _half_split(rows: Tensor, head_channels: int) -> Tensor:
    """GGUF pairs neighbouring rows of a head for the rotation, transformers pairs row i with i + D/2."""
    heads = rows.unflatten(0, (-1, head_channels // 2, 2))
    return heads.transpose(1, 2).flatten(0, 2).contiguous()


@torch.inference_mode()
def test_logits_and_greedy_ids_agree(
    smollm2: LlamaModel, reference: torch.nn.Module, tokenizer: ChatTokenizer, template: ChatTemplate
) -> None:
    for question in QUESTIONS[:6]:
        ids = chat_ids(template, tokenizer, question)
        ids += tokenizer.encode("Sure: the answer has 3 parts.\n\n```python\nprint('hello')\n```\n" * 2)
        ours, theirs = smollm2.logits(ids), reference(torch.tensor([ids])).logits[0]
        assert float((ours - theirs).abs().max()) < 2e-3
        top = theirs.topk(2).values
        clear = (top[:, 0] - top[:, 1]) > 1e-3
        assert torch.equal(ours.argmax(1)[clear], theirs.argmax(1)[clear])


@torch.inference_mode()
def test_free_running_greedy_ids_agree(
    smollm2: LlamaModel, reference: torch.nn.Module, tokenizer: ChatTokenizer, template: ChatTemplate
) -> None:
    """Ours, step by step; theirs over the whole afterwards gives the same ids wherever there is no tie."""
    ids = chat_ids(template, tokenizer, QUESTIONS[1])
    start = len(ids)
    for _ in range(24):
        ids.append(int(smollm2.logits(ids, last_only=True).argmax()))
    theirs = reference(torch.tensor([ids])).logits[0, start - 1 : -1]
    top = theirs.topk(2).values
    clear = (top[:, 0] - top[:, 1]) > 1e-3
    assert bool(clear.any())
    assert torch.equal(torch.tensor(ids[start:])[clear], theirs.argmax(1)[clear])
