"""The layers of a llama-family decoder, composed of single operations: the reference, and PyTorch's way.

T rows (tokens) of a step, C channels, H query heads, G KV heads, D channels a head.
"""

from torch import Tensor

from kernels.operations import DecoderLayer, DecoderStack, Operations, Rows


def run_layers(ops: Operations, stack: DecoderStack, x_TC: Tensor, rows: Rows, cache: Tensor) -> Tensor:
    """What `ops.decoder(stack)` computes. `cache`: [layers, blocks, 2, block, G, D]."""
    for layer, layer_cache in zip(stack.layers, cache, strict=True):
        normed_TC = ops.rms_norm(x_TC, layer.attention_norm, stack.norm_eps)
        q, k, v = ops.linear(normed_TC, (layer.q, layer.k, layer.v))
        q_THD, k_TGD, v_TGD = (t.view(t.shape[0], -1, stack.head_channels) for t in (q, k, v))
        ops.rope_(q_THD, stack.rope, rows.positions)
        ops.rope_(k_TGD, stack.rope, rows.positions)
        ops.store_kv(layer_cache, rows, k_TGD, v_TGD)
        mixed_THD = ops.paged_attention(q_THD, layer_cache, rows, stack.head_channels**-0.5)
        x_TC = x_TC + ops.linear(mixed_THD.flatten(1), (layer.output,))[0]
        x_TC = x_TC + _feed_forward(ops, stack, layer, x_TC)
    return x_TC


def _feed_forward(ops: Operations, stack: DecoderStack, layer: DecoderLayer, x_TC: Tensor) -> Tensor:
    normed_TC = ops.rms_norm(x_TC, layer.feed_forward_norm, stack.norm_eps)
    gate, up = ops.linear(normed_TC, (layer.gate, layer.up))
    return ops.linear(ops.silu_mul(gate, up), (layer.down,))[0]
