"""What decoder bounded replay saves of a prompt: the same code with it and without, in turns.

`python -m bench.ced_prefill --json [--quick] [--model PATH …]`. A prompt goes through a DeepSeek-V4.1 in
chunks of 512 rows, up to the logits of its last row. With replay the decoder runs the last window of rows
alone, behind the keys that its first layer makes of all; without, every row runs every layer. Whatever a
prompt needs is in the time: keys, selections, Engram, the replayed rows. The value is the ratio of the two
times at 8,192 tokens, the median of the pairs' ratios; other lengths are beside it. Beside the times stand
the multiply-adds of both, worked out from the config. The model is random, with about 50 million parameters
that a token uses and as many layers in its decoder as in its encoder; the full form has nano beside it, and
`--model` adds folders.

That both runs leave the same global entries is checked in every pair: the target is not met without.
"""

import argparse
import os
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from statistics import median

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from bench import common
from bench.random_deepseek import Size as ModelSize
from bench.random_deepseek import active_parameters, config_json, random_model
from engine.checkpoint.entries import Entry
from engine.checkpoint.inventory import v41_entries
from engine.checkpoint.parts import Part
from engine.errors import UnknownModel
from engine.model.deepseek.cache import DeepseekCache
from engine.model.deepseek.config import DeepseekConfig
from engine.model.deepseek.model import DeepseekModel
from engine.model.deepseek.replay import decoder_bound
from engine.model.deepseek.roles import LayerRole, cut_layer, layer_roles
from engine.model.deepseek.rows import SequenceRows
from engine.model.deepseek.serving import DeepseekServed
from engine.model.registry import load_model

TARGET, JUDGED = 0.55, 8192  # of the time without replay, at that many tokens
CHUNK, BLOCK = 512, 64
RANDOM = "random"
FULL = {2048: 7, 8192: 5, 32_768: 5}  # pairs by tokens
QUICK = {2048: 3, 8192: 3}
Positions = NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class Pair:
    """Seconds of one prompt, both ways. `same_entries`: the global entries left behind are equal."""

    replay_s: float
    full_s: float
    same_entries: bool


@dataclass(frozen=True, slots=True)
class Length:
    """Of one model and prompt length. `flops_ratio` is what the time's ratio would be at the same speed."""

    tokens: int
    ratio: float
    flops_replay: int
    flops_full: int
    pairs: tuple[Pair, ...]

    @property
    def flops_ratio(self) -> float:
        return self.flops_replay / self.flops_full

    @property
    def met(self) -> bool:
        return self.ratio <= TARGET and all(pair.same_entries for pair in self.pairs)


@dataclass(frozen=True, slots=True)
class Verdict(common.Comparison):
    """Less is better."""

    parts: Mapping[str, bool]

    @property
    def met(self) -> bool:
        return all(self.parts.values())


def main(arguments: Sequence[str]) -> int:
    """Measure, print, and return 1 where the target was missed."""
    own = argparse.ArgumentParser(add_help=False)
    own.add_argument("--model", nargs="+", default=[], dest="models", help="folders of weights, too")
    chosen, options = common.parse_own("ced_prefill", __doc__, arguments, own)
    surroundings = common.Surroundings(("torch", "numpy"))
    threads = len(os.sched_getaffinity(0))
    torch.set_num_threads(threads)
    lengths = QUICK if options.quick else FULL
    names = chosen.models if options.quick else ["nano", *chosen.models]
    found = {name: measure(name, model, lengths) for name, model in models(names, threads)}
    judged = {name: length for name, of in found.items() for length in of if length.tokens == JUDGED}
    verdict = Verdict(
        name="ced_prefill",
        unit=f"of the time without replay, {JUDGED} tokens",
        value=judged[RANDOM].ratio,
        peer="every row through every layer",
        peer_value=1.0,
        target=TARGET,
        parts={name: length.met for name, length in judged.items()},
    )
    detail = {
        "threads": threads,
        "active_parameters": active_parameters(DeepseekConfig.from_dict(config_json(ModelSize()))),
        "parts": verdict.parts,
        "models": {name: [describe(length) for length in of] for name, of in found.items()},
    }
    return common.finish(common.report(verdict, surroundings, detail), options)


def models(names: Sequence[str], threads: int) -> Iterator[tuple[str, DeepseekModel]]:
    """The random one, then built-in ones and folders, one at a time. Raises UnknownModel, BrokenModelFile."""
    yield RANDOM, random_model(config_json(ModelSize()), threads)
    for name in names:
        served = load_model(name, threads=threads)
        if not isinstance(served, DeepseekServed) or not isinstance(served.text, DeepseekModel):
            raise UnknownModel(
                f"model {name}: not a DeepSeek-V4.1", hint="only it has an encoder and a decoder"
            )
        yield name, served.text
        served.close()


def measure(name: str, model: DeepseekModel, lengths: Mapping[int, int]) -> list[Length]:
    """Pairs at each length that the model takes, after a short prompt that warms up."""
    config = model.config
    prefill(model, prompt(config, 2 * config.sliding_window, 0), replay=True)
    found: list[Length] = []
    for tokens, count in lengths.items():
        if tokens > config.max_position_embeddings:
            continue
        pairs = tuple(pair(model, prompt(config, tokens, number), number) for number in range(count))
        bound = decoder_bound(0, tokens, config.sliding_window)
        ratio = median(each.replay_s / each.full_s for each in pairs)
        found.append(Length(tokens, ratio, flops(config, tokens, bound), flops(config, tokens, 0), pairs))
        common.progress(f"{name}: {describe(found[-1])}")
    return found


def pair(model: DeepseekModel, ids: Tensor, number: int) -> Pair:
    """Replay first in even rounds."""
    runs = {replay: prefill(model, ids, replay=replay) for replay in ((True, False)[:: (1, -1)[number % 2]])}
    with_replay, without = (runs[replay][1].sources for replay in (True, False))
    same = all(
        torch.equal(entries.main, without[layer].main) and torch.equal(entries.index, without[layer].index)
        for layer, entries in with_replay.items()
    )
    return Pair(runs[True][0], runs[False][0], same)


def prefill(model: DeepseekModel, ids: Tensor, *, replay: bool) -> tuple[float, DeepseekCache]:
    """Seconds up to the logits of the last row, and the cache with what the prompt left."""
    blocks = range(-(-len(ids) // BLOCK))
    cache = model.new_cache(len(blocks), BLOCK, 1)
    bound = decoder_bound(0, len(ids), model.config.sliding_window) if replay else 0
    hidden_TC = torch.empty(0)
    start_s = time.perf_counter()
    for start in range(0, len(ids), CHUNK):
        chunk = ids[start : start + CHUNK]
        rows = SequenceRows(0, blocks, start, len(chunk), decoder_from=bound)
        hidden_TC = model.forward(chunk, [rows], cache)
    logits_1V = model.head(hidden_TC[-1:])
    taken_s = time.perf_counter() - start_s
    assert bool(logits_1V.isfinite().all()), "the logits are not numbers"
    return taken_s, cache


def prompt(config: DeepseekConfig, count: int, seed: int) -> Tensor:
    """Random ids, of no image."""
    noise = torch.Generator().manual_seed(seed)
    ids = torch.randint(0, config.vocab_size - 1, (count,), generator=noise)
    image = config.vocab_size if config.image_token_id is None else config.image_token_id
    return torch.where(ids >= image, ids + 1, ids)


def flops(config: DeepseekConfig, tokens: int, decoder_from: int) -> int:
    """Of a prompt, two for each multiply-add: products with weights, index scores, attention.

    Sections 1.3 and 2. Decoder layers see rows from `decoder_from` on; what the cut layer makes keys with
    sees all. Left out is what is elementwise. Attention counts the entries that a row sees.
    """
    positions: Positions = np.arange(tokens, dtype=np.int64)
    kept = positions[decoder_from:]
    encoder, cut = Part(encoder_only=True), cut_layer(config)
    total = 2 * config.vocab_size * config.hidden_size  # the head, of one row
    for entry in v41_entries(config):
        rows = len(positions) if encoder.holds(entry.name, cut) else len(kept)
        if ".indexer.wk." in entry.name:  # of whole groups
            rows //= config.ratio(int(entry.name.split(".")[1]))
        total += rows * _product_flops(config, entry)
    for role in layer_roles(config):
        lowest = decoder_from if role.layer > cut else 0
        total += _mixing_flops(config, role, positions if role.layer < cut else kept, lowest)
    return total


def _product_flops(config: DeepseekConfig, entry: Entry) -> int:
    """A row's share of a weight: an expert takes part for some of the rows."""
    elementwise = len(entry.shape) != 2 or entry.name.endswith((".q_weight", ".k_weight"))
    read_alone = entry.kind == "table" or entry.name in {"embed.weight", "head.weight"}
    if elementwise or read_alone or entry.section not in {"backbone", "engram"}:
        return 0
    if ".ffn.experts." in entry.name:
        return 2 * entry.num_values * config.num_experts_per_tok // config.n_routed_experts
    return 2 * entry.num_values


def _mixing_flops(config: DeepseekConfig, role: LayerRole, positions: Positions, lowest: int) -> int:
    """Index scores and attention of a layer's rows; windows reach no further down than `lowest`."""
    entries = np.minimum(positions - lowest + 1, config.sliding_window)
    scored = 0
    if role.ratio:
        visible = (positions + 1) // role.ratio
        entries = entries + np.minimum(visible, config.index_topk)
        if role.owns_selection:
            scored = int(visible[visible > config.index_topk].sum())
    attended = 4 * config.num_attention_heads * config.head_dim * int(entries.sum())
    return attended + 2 * config.index_n_heads * config.index_head_dim * scored


def describe(length: Length) -> dict[str, object]:
    """For the result, both ratios rounded."""
    return {
        **asdict(length),
        "ratio": round(length.ratio, 3),
        "flops_ratio": round(length.flops_ratio, 3),
    }


if __name__ == "__main__":
    common.run(main)
