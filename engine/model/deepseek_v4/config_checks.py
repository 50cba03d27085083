"""What must hold between the fields of a DeepSeek-V4 config, so that a wrong one does not run."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from engine.model.deepseek.config_checks import INDEX_GROUP
from engine.model.deepseek.config_fields import refuse

if TYPE_CHECKING:
    from engine.model.deepseek_v4.config import DeepseekV4Config

Fault = tuple[str, str]  # field, what is expected
FP8_GROUP = 64  # channels that share a scale in V4's record (section 3)


def check_config(config: DeepseekV4Config) -> None:
    """Raises BrokenModelFile for the first fault: field, value, and what is expected."""
    for check in (_layers, _attention, _mixture, _quantisation):
        for field, expected in check(config):
            raise refuse(field, getattr(config, field), expected)


def _layers(c: DeepseekV4Config) -> Iterator[Fault]:
    if c.num_hash_layers > c.num_hidden_layers:
        yield "num_hash_layers", f"at most num_hidden_layers, which is {c.num_hidden_layers}"
    selecting = [layer.ratio for layer in c.layers if layer.attention == "csa"]
    if selecting and max(selecting) > c.sliding_window:
        yield (
            "sliding_window",
            f"at least {max(selecting)}, the ratio: a resumed sequence rebuilds the group before",
        )


def _attention(c: DeepseekV4Config) -> Iterator[Fault]:
    if c.num_attention_heads % c.o_groups:
        yield "o_groups", f"a divisor of num_attention_heads, which is {c.num_attention_heads}"
    if c.qk_rope_head_dim % 2 or c.qk_rope_head_dim > c.head_dim:
        yield "qk_rope_head_dim", f"an even number up to head_dim, which is {c.head_dim}"
    if c.qk_rope_head_dim > c.index_head_dim:
        yield "index_head_dim", f"at least qk_rope_head_dim, which is {c.qk_rope_head_dim}"
    if c.rope_scaling is not None and c.rope_scaling.factor < 1:
        yield "rope_scaling", "a factor of at least 1"
    if c.rope_scaling is not None and c.compress_rope_theta <= 1:
        yield "compress_rope_theta", "a number above 1: YaRN divides by its logarithm"


def _mixture(c: DeepseekV4Config) -> Iterator[Fault]:
    if c.num_experts_per_tok > c.n_routed_experts:
        yield "num_experts_per_tok", f"at most n_routed_experts, which is {c.n_routed_experts}"


def _quantisation(c: DeepseekV4Config) -> Iterator[Fault]:
    """Only where the caches are quantised: each group of channels is full."""
    on, plain = c.quantisation, c.head_dim - c.qk_rope_head_dim
    if (on.window or on.main) and plain % FP8_GROUP:
        yield (
            "head_dim",
            f"qk_rope_head_dim, which is {c.qk_rope_head_dim}, and a multiple of {FP8_GROUP} beside it, "
            "the group of the FP8 record, or caches='float32' (serve: workers.caches)",
        )
    if on.index == "mxfp4" and c.index_head_dim % INDEX_GROUP:
        yield (
            "index_head_dim",
            f"a multiple of {INDEX_GROUP}, the group of the MXFP4 index cache, or caches='float32' "
            "(serve: workers.caches)",
        )
