"""A released folder of nano, to be measured: through the serving model, and as the training's network.

T rows, V vocabulary. Rows run in the profile `exact`, on one thread.
"""

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from tokenizers import Tokenizer
from torch import Tensor

from engine.checkpoint.source import open_checkpoint
from engine.model.deepseek.cache import DeepseekCache
from engine.model.deepseek.config import DeepseekConfig, Quantisation
from engine.model.deepseek.dspark import DraftModel
from engine.model.deepseek.engram_hash import compress_ids
from engine.model.deepseek.model import DeepseekModel
from engine.model.deepseek.replay import decoder_bound, resume_after_hit
from engine.model.deepseek.rows import SequenceRows
from engine.model.tensor_source import TensorsInMemory
from engine.training.batches import BatchMaker
from engine.training.network import Network
from engine.training.parameters import Parameters, released_tensors, stacked
from engine.training.rounding import released_rounding
from engine.training.trainer import Task
from kernels.operations import select_operations

_CHUNK = 512  # rows at a time
Read = Callable[[DeepseekModel, Sequence[int]], Tensor]
"""How a text is run: logits [T, V] of all its rows; those of rows before its prompt's end may be zeros."""


@dataclass(frozen=True, slots=True)
class Shipped:
    """`parameters`: all weights, dequantised, as a training has them."""

    config: DeepseekConfig
    tokenizer: Tokenizer
    compressed: Tensor
    parameters: Parameters

    def task(self, length: int) -> Task:
        """For the training's network."""
        batches = BatchMaker.of(self.config, self.compressed)
        return Task(Network.of(self.config, length), batches, released_rounding(self.config))

    def served(self, quantisation: Quantisation, parameters: Parameters) -> DeepseekModel:
        """The serving model; its weights are the parameters' memory where no product needs another form."""
        config = replace(self.config, quantisation=quantisation)
        source = TensorsInMemory(dict(released_tensors(parameters)), "nano")
        return DeepseekModel(config, source, select_operations(1), self.compressed)

    def drafts(self, model: DeepseekModel) -> DraftModel:
        return DraftModel(model, TensorsInMemory(dict(released_tensors(self.parameters)), "nano"))


@functools.cache
def open_shipped(folder: Path) -> Shipped:
    """Raises BrokenModelFile. Stays in memory: some 80 MB."""
    source = open_checkpoint(folder)
    released = {entry.name: source.take(entry.name, entry.shape) for entry in source.family.entries}
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    config = DeepseekConfig.from_dict(source.folder.config)
    return Shipped(config, tokenizer, compress_ids(tokenizer), stacked(released))


def read_whole(model: DeepseekModel, ids: Sequence[int]) -> Tensor:
    """Every row through every layer."""
    return model.logits(ids)


def read_replayed(model: DeepseekModel, ids: Sequence[int]) -> Tensor:
    """The first half is a prompt, of which decoder layers see the last window (section 1.3)."""
    bound = decoder_bound(0, len(ids) // 2, model.config.sliding_window)
    blocks = range(-(-len(ids) // model.block_tokens))
    cache = model.new_cache(len(blocks), model.block_tokens, 1)
    return _run(model, cache, ids, SequenceRows(0, blocks, 0, len(ids), decoder_from=bound))


def read_behind_hit(model: DeepseekModel, ids: Sequence[int]) -> Tensor:
    """The first half is in the prefix cache, whose windows are replayed (section 1.4)."""
    return _resumed(model, ids, cached=len(ids) // 2, decoder_from=0)


def read_as_served(model: DeepseekModel, ids: Sequence[int]) -> Tensor:
    """The first half is a prompt whose first half is in the prefix cache: both replays, as requests run."""
    prompt = len(ids) // 2
    bound = decoder_bound(0, prompt, model.config.sliding_window)
    return _resumed(model, ids, cached=prompt // 2, decoder_from=bound)


def _resumed(model: DeepseekModel, ids: Sequence[int], *, cached: int, decoder_from: int) -> Tensor:
    """`cached` is cut to whole blocks. The first slot leaves its entries, the second starts behind them."""
    cached = cached // model.block_tokens * model.block_tokens
    blocks = range(-(-len(ids) // model.block_tokens))
    cache = model.new_cache(len(blocks), model.block_tokens, 2)
    resumed = resume_after_hit(cached, model.config.sliding_window)
    if resumed.start:
        _run(model, cache, ids[:cached], SequenceRows(0, blocks, 0, cached))
        cache.seed_lookback(1, ids[: resumed.start])
    rows = SequenceRows(
        1, blocks, resumed.start, len(ids) - resumed.start, decoder_from=decoder_from,
        window_from=resumed.window_from, write_from=resumed.write_from,
    )  # fmt: skip
    behind = _run(model, cache, ids[resumed.start :], rows)
    return torch.cat((torch.zeros(resumed.start, behind.shape[1]), behind))


def _run(model: DeepseekModel, cache: DeepseekCache, ids: Sequence[int], rows: SequenceRows) -> Tensor:
    """All rows in chunks: logits [T, V]."""
    parts: list[Tensor] = []
    for start in range(0, len(ids), _CHUNK):
        chunk = torch.tensor(ids[start : start + _CHUNK])
        these = replace(rows, start=rows.start + start, count=len(chunk))
        parts.append(model.head(model.forward(chunk, [these], cache)))
    return torch.cat(parts)
