"""Memory of a long pass is bounded: no tensor grows with the square of the length."""

import torch
from golden_sets import changed, golden_config, random_model
from torch.utils._python_dispatch import TorchDispatchMode

from engine.model.deepseek.config import Quantisation

HIDDEN, HEAD, VOCABULARY = 32, 32, 64


class LargestTensor(TorchDispatchMode):
    """Notes the most bytes that any result takes."""

    def __init__(self):
        super().__init__()
        self.largest_bytes = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        for tensor in result if isinstance(result, tuple | list) else (result,):
            if isinstance(tensor, torch.Tensor):
                self.largest_bytes = max(self.largest_bytes, tensor.untyped_storage().nbytes())
        return result


def tiny_config(quantised: bool):
    """Every mechanism but Engram, in six layers of the least widths."""
    return changed(
        golden_config("b"), quantisation=Quantisation() if quantised else Quantisation.off(),
        vocab_size=VOCABULARY, hidden_size=HIDDEN, num_hidden_layers=6, num_attention_heads=1,
        head_dim=HEAD, qk_rope_head_dim=8, q_lora_rank=32, o_lora_rank=32, o_groups=1, sliding_window=8,
        compress_ratios=(0, 2, 2, 1, 1, 1), kv_source_layer_ids=(1, 3), index_source_layer_ids=(1, 3, 4),
        candidate_source_layer_id=3, candidate_topk_blocks=8, candidate_block_size=8, index_n_heads=1,
        index_head_dim=32, index_topk=16, moe_intermediate_size=32, n_routed_experts=2, num_experts_per_tok=1,
        max_position_embeddings=1 << 20,
    )  # fmt: skip


def largest_bytes(length: int, quantised: bool) -> int:
    model = random_model(tiny_config(quantised))
    ids = [i * 7 % VOCABULARY for i in range(length)]
    with LargestTensor() as seen:
        logits = model.logits(ids, last_only=True)
    assert logits.shape == (VOCABULARY,)
    assert logits.isfinite().all()
    return seen.largest_bytes


def test_the_largest_tensor_of_a_long_pass_is_bounded(cpu_library):
    """16 MiB of scores, 32 MiB of gathered entries, or what the cache itself takes; 512 x 6,144 would be less
    than a row of heads times length times length, which is what must not be there."""
    length = 6144
    bound = 40 << 20
    assert length * length * 4 > 3 * bound
    assert largest_bytes(length, quantised=True) < bound


def test_a_short_pass_takes_little(cpu_library):
    assert largest_bytes(64, quantised=False) < 1 << 20
