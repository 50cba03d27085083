"""What a V4 sequence leaves behind: entries of compressed layers in paged blocks, bounded state in a slot.

It is V4.1's cache with other sources (appendix A.1): each layer with a ratio has its own. A CSA layer keeps
values and gates of single tokens, main and index side by side, for eight positions, since entries overlap.
"""

from math import lcm

from engine.checkpoint.v4_shape import V4Layer
from engine.model.deepseek.cache import SequenceCache, SourceShape, record_bytes
from engine.model.deepseek_v4.config import DeepseekV4Config
from engine.model.deepseek_v4.records import v4_records


class DeepseekV4Cache(SequenceCache):
    """Window rings of the draft blocks come after the layers'."""

    def __init__(self, config: DeepseekV4Config, num_blocks: int, block_tokens: int, num_slots: int) -> None:
        super().__init__(
            config,
            v4_records(config),
            {i: source_shape(config, layer) for i, layer in enumerate(config.layers) if layer.ratio},
            config.num_hidden_layers + config.num_nextn_predict_layers,
            num_blocks=num_blocks,
            block_tokens=block_tokens,
            num_slots=num_slots,
            num_window_layers=config.num_hidden_layers + config.num_nextn_predict_layers,
        )


def source_shape(config: DeepseekV4Config, layer: V4Layer) -> SourceShape:
    """CSA pools two series over two groups, each with value and gate; HCA one series over its group."""
    if layer.attention == "csa":
        channels = 4 * (config.head_dim + config.index_head_dim)
        return SourceShape(layer.ratio, 2 * layer.ratio, channels)
    return SourceShape(layer.ratio, layer.ratio, 2 * config.head_dim, indexed=False)


def bytes_per_token(config: DeepseekV4Config) -> float:
    """Of global entries: 3514.25 for Flash with FP8 records and MXFP4 index keys (section 3)."""
    records = v4_records(config)
    main, index = record_bytes(records.main), record_bytes(records.index)
    layers = (layer for layer in config.layers if layer.ratio)
    return sum((main + index * (layer.attention == "csa")) / layer.ratio for layer in layers)


def bytes_per_slot(config: DeepseekV4Config) -> int:
    """Of the bounded state of one sequence."""
    block = lcm(1, *(layer.ratio for layer in config.layers if layer.ratio))
    return DeepseekV4Cache(config, 0, block, 1).slot_bytes()
