"""Every weight that a V4.1 config implies, by released name (fact sheet, section 11.2). Imports no torch.

Beside the sheet's list: all counts and shapes come from the config, so that a test's tiny model has an
inventory too. The release's own numbers are 96,085 tensors and 551.4, 196.6 and 14.2 billion values.
"""

from collections.abc import Iterator
from typing import Protocol

from engine.checkpoint.entries import Entry, Kind, Section, Shape
from engine.model.deepseek.config import DeepseekConfig
from engine.model.deepseek.roles import layer_roles
from engine.model.deepseek.vision_config import VisionConfig


class BlockShape(Protocol):
    """What a block's inventory needs of a config, V4.1's or V4's."""

    @property
    def hidden_size(self) -> int: ...
    @property
    def moe_intermediate_size(self) -> int: ...
    @property
    def num_attention_heads(self) -> int: ...
    @property
    def head_dim(self) -> int: ...
    @property
    def q_lora_rank(self) -> int: ...
    @property
    def o_lora_rank(self) -> int: ...
    @property
    def o_groups(self) -> int: ...
    @property
    def hc_mult(self) -> int: ...


def v41_entries(config: DeepseekConfig) -> Iterator[Entry]:
    """The text model, its Engram tables, draft blocks and vision tower, in the order of the layers."""
    c = config
    yield _plain("embed.weight", c.vocab_size, c.hidden_size)
    for role in layer_roles(c):
        prefix = f"layers.{role.layer}."
        yield from block_entries(c, prefix, c.n_routed_experts, "backbone")
        if role.owns_entries:
            yield from _compressor(c, prefix, role.ratio)
        if role.owns_selection:
            yield _dense(
                f"{prefix}attn.indexer.wq_b.weight", c.index_n_heads * c.index_head_dim, c.q_lora_rank
            )
            yield _plain(f"{prefix}attn.indexer.weights_proj.weight", c.index_n_heads, c.hidden_size)
        if role.layer in c.engram_layer_ids:
            yield from _engram(c, prefix, c.engram_num_embeddings[c.engram_layer_ids.index(role.layer)])
    yield _plain("norm.weight", c.hidden_size)
    yield _plain("head.weight", c.vocab_size, c.hidden_size)
    yield from _drafts(c)
    if c.vision_config is not None:
        yield from _vision(c)


def block_entries(c: DeepseekConfig, prefix: str, num_experts: int, section: Section) -> Iterator[Entry]:
    """Attention, hyper-connections, and a mixture of experts with two biases: of text, and of images."""
    yield from attention_entries(c, prefix, section)
    yield Entry(f"{prefix}ffn.gate.weight", (num_experts, c.hidden_size), "plain", section)
    for bias in ("bias", "bias_vl"):
        yield Entry(f"{prefix}ffn.gate.{bias}", (num_experts,), "exact", section)
    yield from mixture_entries(c, prefix, num_experts, section)


def attention_entries(c: BlockShape, prefix: str, section: Section) -> Iterator[Entry]:
    """Projections and norms of attention, and the hyper-connections of both sites."""

    def entry(name: str, kind: Kind, *shape: int) -> Entry:
        return Entry(prefix + name, shape, kind, section)

    hidden, streams = c.hidden_size, c.hc_mult
    yield entry("attn.wq_a.weight", "dense", c.q_lora_rank, hidden)
    yield entry("attn.wq_b.weight", "dense", c.num_attention_heads * c.head_dim, c.q_lora_rank)
    yield entry("attn.wkv.weight", "dense", c.head_dim, hidden)
    group = c.num_attention_heads * c.head_dim // c.o_groups
    yield entry("attn.wo_a.weight", "dense", c.o_groups * c.o_lora_rank, group)
    yield entry("attn.wo_b.weight", "dense", hidden, c.o_groups * c.o_lora_rank)
    yield entry("attn.q_norm.weight", "plain", c.q_lora_rank)
    yield entry("attn.kv_norm.weight", "plain", c.head_dim)
    yield entry("attn.attn_sink", "exact", c.num_attention_heads)
    for site in ("attn", "ffn"):
        yield entry(f"{site}_norm.weight", "plain", hidden)
        yield entry(f"hc_{site}_fn", "exact", streams * (streams + 2), streams * hidden)
        yield entry(f"hc_{site}_base", "exact", streams * (streams + 2))
        yield entry(f"hc_{site}_scale", "exact", 3)


def mixture_entries(c: BlockShape, prefix: str, num_experts: int, section: Section) -> Iterator[Entry]:
    """One shared expert, in the dense weights' format, and the routed ones."""
    yield from _expert(c, f"{prefix}ffn.shared_experts.", "dense", section)
    for expert in range(num_experts):
        yield from _expert(c, f"{prefix}ffn.experts.{expert}.", "expert", section)


def _expert(c: BlockShape, prefix: str, kind: Kind, section: Section) -> Iterator[Entry]:
    up, down = (c.moe_intermediate_size, c.hidden_size), (c.hidden_size, c.moe_intermediate_size)
    for name, shape in (("w1", up), ("w2", down), ("w3", up)):
        yield Entry(f"{prefix}{name}.weight", shape, kind, section)


def _compressor(c: DeepseekConfig, prefix: str, ratio: int) -> Iterator[Entry]:
    """A kv source's: the gate pools the tokens of a group, so a ratio of 1 has none (section 2.3)."""
    yield _plain(f"{prefix}attn.compressor.wkv.weight", c.head_dim, c.hidden_size)
    if ratio > 1:
        yield _plain(f"{prefix}attn.compressor.wgate.weight", c.head_dim, c.hidden_size)
    yield _plain(f"{prefix}attn.compressor.norm.weight", c.head_dim)
    yield _plain(f"{prefix}attn.indexer.wk.weight", c.index_head_dim, c.head_dim)
    yield _plain(f"{prefix}attn.indexer.k_norm.weight", c.index_head_dim)


def _engram(c: DeepseekConfig, prefix: str, rows: int) -> Iterator[Entry]:
    """The table, and the projection of a token's rows to one key a stream and one value (section 7.3)."""
    looked_up = (c.engram_max_ngram_size - 1) * c.engram_n_heads * c.engram_head_dim
    yield Entry(f"{prefix}engram.embed.weight", (rows, c.engram_head_dim), "table", "engram")
    yield _dense(f"{prefix}engram.wkv.weight", (c.hc_mult + 1) * c.hidden_size, looked_up)
    yield _plain(f"{prefix}engram.q_weight", c.hc_mult, c.hidden_size)
    yield _plain(f"{prefix}engram.k_weight", c.hc_mult, c.hidden_size)


def _drafts(c: DeepseekConfig) -> Iterator[Entry]:
    """DSpark (section 8): blocks as the backbone's; the first projects the input, the last has the heads."""
    last = c.num_nextn_predict_layers - 1
    if last < 0:
        return
    for block in range(last + 1):
        yield from block_entries(c, f"mtp.{block}.", c.dspark_n_routed_experts, "draft")

    def entry(name: str, kind: Kind, *shape: int) -> Entry:
        return Entry(f"mtp.{name}", shape, kind, "draft")

    hidden, rank = c.hidden_size, c.dspark_markov_rank
    yield entry("0.main_proj.weight", "dense", hidden, len(c.dspark_target_layer_ids) * hidden)
    yield entry("0.main_norm.weight", "plain", hidden)
    yield entry(f"{last}.norm.weight", "plain", hidden)
    yield entry(f"{last}.markov_head.embed.weight", "plain", c.vocab_size, rank)
    yield entry(f"{last}.markov_head.head.weight", "plain", c.vocab_size, rank)
    yield entry(f"{last}.confidence_head.proj.weight", "plain", 1, hidden + rank)


def _vision(c: DeepseekConfig) -> Iterator[Entry]:
    """Section 9. Attention has biases, the MLP none; the aligner joins downsample_ratio^2 patches."""
    vision = VisionConfig.of(c)
    width, inner = vision.hidden_size, vision.intermediate_size
    patch = 3 * vision.patch_size**2
    shapes: dict[str, Shape] = {"patch_embed.proj.weight": (width, patch), "patch_embed.proj.bias": (width,)}
    for block in range(vision.num_hidden_layers):
        shapes |= {
            f"blocks.{block}.attn.wqkv.weight": (3 * width, width),
            f"blocks.{block}.attn.wqkv.bias": (3 * width,),
            f"blocks.{block}.attn.wo.weight": (width, width),
            f"blocks.{block}.attn.wo.bias": (width,),
            f"blocks.{block}.mlp.w1.weight": (2 * inner, width),
            f"blocks.{block}.mlp.w2.weight": (width, inner),
            f"blocks.{block}.norm1.weight": (width,),
            f"blocks.{block}.norm2.weight": (width,),
        }
    shapes["norm.weight"] = (width,)
    yield from (Entry(f"vision.{name}", shape, "plain", "vision") for name, shape in shapes.items())
    joined = width * vision.downsample_ratio**2
    for name, columns in (("w1", joined), ("w2", c.hidden_size)):
        yield Entry(f"aligner.{name}.weight", (c.hidden_size, columns), "plain", "vision")
        yield Entry(f"aligner.{name}.bias", (c.hidden_size,), "plain", "vision")
    for name in ("image_start", "image_end", "image_newline"):
        yield Entry(name, (c.hidden_size,), "plain", "vision")


def _plain(name: str, *shape: int) -> Entry:
    return Entry(name, shape, "plain", "backbone")


def _dense(name: str, *shape: int) -> Entry:
    return Entry(name, shape, "dense", "backbone")
