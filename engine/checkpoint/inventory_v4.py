"""Every weight that a V4 config implies, by released name. Imports no torch.

The fact sheet (appendix A.1) gives V4's mechanisms, shapes and names of parts, and transformers' model has
the backbone's tensors one by one, of which a test makes use. Inferred are: which tensors are stored in FP8
(the kinds that are in V4.1), the float32 of the position biases, and the whole of the draft block: its
names `e_proj`, `h_proj`, `enorm`, `hnorm`, `norm` and `hc_head_*` under `mtp.0`.
"""

from collections.abc import Iterator

from engine.checkpoint.entries import Entry, Kind, Section
from engine.checkpoint.inventory import attention_entries, mixture_entries
from engine.checkpoint.v4_shape import V4Layer, V4Shape


def v4_entries(shape: V4Shape) -> Iterator[Entry]:
    """The text model and its draft blocks, in the order of the layers."""
    hidden = shape.hidden_size
    yield Entry("embed.weight", (shape.vocab_size, hidden), "plain", "backbone")
    for index, layer in enumerate(shape.layers):
        prefix = f"layers.{index}."
        yield from _block(shape, prefix, "backbone", hashed=index < shape.num_hash_layers)
        yield from _compressed(shape, prefix, layer)
    yield Entry("norm.weight", (hidden,), "plain", "backbone")
    yield from _hyper_head(shape, "", "backbone")
    yield Entry("head.weight", (shape.vocab_size, hidden), "plain", "backbone")
    for block in range(shape.num_nextn_predict_layers):
        yield from _draft(shape, f"mtp.{block}.")


def _block(shape: V4Shape, prefix: str, section: Section, *, hashed: bool) -> Iterator[Entry]:
    """As V4.1's, with one bias; a hash layer has a table from token ids to experts in its place."""
    yield from attention_entries(shape, prefix, section)
    experts = shape.n_routed_experts
    yield Entry(f"{prefix}ffn.gate.weight", (experts, shape.hidden_size), "plain", section)
    if hashed:
        table = (shape.vocab_size, shape.num_experts_per_tok)
        yield Entry(f"{prefix}ffn.gate.tid2eid", table, "ids", section)
    else:
        yield Entry(f"{prefix}ffn.gate.bias", (experts,), "exact", section)
    yield from mixture_entries(shape, prefix, experts, section)


def _compressed(shape: V4Shape, prefix: str, layer: V4Layer) -> Iterator[Entry]:
    """Each layer's own compressor; an indexer, with a smaller compressor, where it selects."""
    if layer.attention == "window":
        return
    yield from _compressor(shape, f"{prefix}attn.compressor.", layer, shape.head_dim)
    if layer.attention == "csa":
        heads = shape.index_n_heads
        queries = (heads * shape.index_head_dim, shape.q_lora_rank)
        weights = (heads, shape.hidden_size)
        yield Entry(f"{prefix}attn.indexer.wq_b.weight", queries, "dense", "backbone")
        yield Entry(f"{prefix}attn.indexer.weights_proj.weight", weights, "plain", "backbone")
        yield from _compressor(shape, f"{prefix}attn.indexer.compressor.", layer, shape.index_head_dim)


def _compressor(shape: V4Shape, prefix: str, layer: V4Layer, width: int) -> Iterator[Entry]:
    """CSA pools two series, of this group and of the one before: its projections are twice as wide."""
    columns = 2 * width if layer.attention == "csa" else width
    for name in ("wkv", "wgate"):
        yield Entry(f"{prefix}{name}.weight", (columns, shape.hidden_size), "plain", "backbone")
    yield Entry(f"{prefix}ape", (layer.ratio, columns), "exact", "backbone")
    yield Entry(f"{prefix}norm.weight", (width,), "plain", "backbone")


def _hyper_head(shape: V4Shape, prefix: str, section: Section) -> Iterator[Entry]:
    streams = shape.hc_mult
    yield Entry(f"{prefix}hc_head_fn", (streams, streams * shape.hidden_size), "exact", section)
    yield Entry(f"{prefix}hc_head_base", (streams,), "exact", section)
    yield Entry(f"{prefix}hc_head_scale", (1,), "exact", section)


def _draft(shape: V4Shape, prefix: str) -> Iterator[Entry]:
    """x = h_proj(hnorm(stream)) + e_proj(enorm(embed)), one block, a head of its own."""
    hidden = shape.hidden_size
    kinds: tuple[tuple[str, Kind, tuple[int, ...]], ...] = (
        ("e_proj.weight", "dense", (hidden, hidden)),
        ("h_proj.weight", "dense", (hidden, hidden)),
        ("enorm.weight", "plain", (hidden,)),
        ("hnorm.weight", "plain", (hidden,)),
        ("norm.weight", "plain", (hidden,)),
    )
    yield from (Entry(prefix + name, size, kind, "draft") for name, kind, size in kinds)
    yield from _block(shape, prefix, "draft", hashed=False)
    yield from _hyper_head(shape, prefix, "draft")
