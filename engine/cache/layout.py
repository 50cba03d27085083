"""How many bytes a model's caches take, from its shape alone. Imports no torch.

Source: fact sheet, section 3 (records) and appendix A.1 (V4's records). Global entries are kept for every
token; windows, open groups and the streams at the cut are bounded, one set a sequence. What crosses in a
hand-off is that of an encoder-only prefill worker: design, section 3. The worker that takes over runs the
layer at the cut for a window of rows, each of which reads a window back: so twice a window less one of that
layer crosses.
"""

from dataclasses import dataclass

from engine.checkpoint.v4_shape import V4Shape
from engine.model.deepseek.config import DeepseekConfig
from engine.model.deepseek.config_checks import INDEX_GROUP, MAIN_GROUP, WINDOW_GROUP
from engine.model.deepseek.roles import cut_layer

_FLOAT32, _BFLOAT16, _ID = 4, 2, 8
_V4_GROUP, _V4_ALIGNMENT = 64, 8  # channels a scale of V4's record; a record's end is padded


@dataclass(frozen=True, slots=True)
class HandoffLayout:
    """Bytes that cross from prefill to decode beside the global entries, which `CacheLayout` has."""

    window_bytes: int  # a window of each encoder layer, and of the layer at the cut what its rows read
    stream_bytes: int  # streams (in bfloat16, as released) and mix that enter the layer at the cut
    open_group_bytes: int  # values and gates of compressor groups that are not full
    lookback_bytes: int  # token ids that the next token's n-grams reach back to


@dataclass(frozen=True, slots=True)
class CacheLayout:
    """Of one model. `handoff` is None where no encoder is set apart."""

    bytes_per_token: float  # global entries: persistent, and shared by a prefix
    window_bytes: int  # of one live sequence, all layers
    draft_window_bytes: int  # of its draft blocks
    handoff: HandoffLayout | None


def v41_layout(config: DeepseekConfig) -> CacheLayout:
    """Release: 890 bytes a token, 2.70 MB of windows a sequence; quantisation as the config has it."""
    on = config.quantisation
    main = _packed(config.head_dim, MAIN_GROUP) if on.main else config.head_dim * _FLOAT32
    index = _packed(config.index_head_dim, INDEX_GROUP) if on.index else config.index_head_dim * _FLOAT32
    window = config.head_dim + config.head_dim // WINDOW_GROUP if on.window else config.head_dim * _FLOAT32
    rows = config.sliding_window * window
    return CacheLayout(
        bytes_per_token=sum((main + index) / config.ratio(layer) for layer in config.kv_source_layer_ids),
        window_bytes=config.num_hidden_layers * rows,
        draft_window_bytes=config.num_nextn_predict_layers * rows,
        handoff=_handoff(config, window) if config.kv_source_layer_ids else None,
    )


def fills_groups(shape: V4Shape) -> bool:
    """Whether the released records take a V4's widths."""
    plain = shape.head_dim - shape.qk_rope_head_dim
    return plain % _V4_GROUP == 0 and shape.index_head_dim % INDEX_GROUP == 0


def v4_layout(shape: V4Shape, *, released: bool = True) -> CacheLayout:
    """Flash: 3514.25 bytes a token: records of 584 bytes, of the window too, and FP4 index keys.

    Otherwise than `released` all are in float32.
    """
    plain = shape.head_dim - shape.qk_rope_head_dim
    record = plain + shape.qk_rope_head_dim * _BFLOAT16 + -(-plain // _V4_GROUP)
    record += -record % _V4_ALIGNMENT
    index = _packed(shape.index_head_dim, INDEX_GROUP)
    if not released:
        record, index = shape.head_dim * _FLOAT32, shape.index_head_dim * _FLOAT32
    kept = [layer for layer in shape.layers if layer.ratio]
    rows = shape.sliding_window * record
    return CacheLayout(
        bytes_per_token=sum((record + index * (layer.attention == "csa")) / layer.ratio for layer in kept),
        window_bytes=shape.num_hidden_layers * rows,
        draft_window_bytes=shape.num_nextn_predict_layers * rows,
        handoff=None,
    )


def llama_bytes_per_token(num_layers: int, num_kv_heads: int, head_dim: int) -> int:
    """Keys and values of every layer in float32, as our engine keeps them."""
    return num_layers * 2 * num_kv_heads * head_dim * _FLOAT32


def _packed(channels: int, group: int) -> int:
    """Two values a byte, and a byte for each group's scale."""
    return channels // 2 + channels // group


def _handoff(config: DeepseekConfig, record: int) -> HandoffLayout:
    per_position = config.hc_mult * (config.hidden_size * _BFLOAT16 + _FLOAT32)
    pending = sum(config.ratio(layer) - 1 for layer in config.kv_source_layer_ids)
    rows = cut_layer(config) * config.sliding_window + 2 * config.sliding_window - 1
    return HandoffLayout(
        window_bytes=rows * record,
        stream_bytes=config.sliding_window * per_position,
        open_group_bytes=pending * 2 * config.head_dim * _FLOAT32,
        lookback_bytes=max(config.engram_max_ngram_size - 1, 0) * _ID,
    )
