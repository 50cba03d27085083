"""Our DeepSeek-V4 against transformers': the same random weights in float32, the same threads, side by side.

`python -m bench.v4_against_transformers --json [--quick]`. The model has V4-Flash's proportions at an eighth
of its width: eight layers of every kind, with fewer experts, heads and index heads, so that a laptop holds
transformers' attention. The two take turns in changing order; figures are medians over the rounds, ratios
medians of the rounds' ratios. Measured are decoding of one sequence (the value), a prompt of 512 tokens and a
long one, each up to the logits of its last row, which must be equal to within 1e-3. Transformers runs it in
eager mode, the only one it has for V4, and a prompt in one pass, as its `generate` does; we take 512 rows at
a time. Rows of a long prompt in which rounding decides what is chosen are counted, and settled for the
comparison of logits in a pass of its own, which is not timed (`bench/v4_ties.py`).

Weights take values of bfloat16, as those of every release do, and both compute in float32. Transformers holds
them in four bytes a value; ours are held in two where that loses nothing, which is part of what is compared.
`decode_wide` is the same with weights that need four bytes in both. `plain_products` is the share of each
side's time that the products of weights alone take in torch (`bench/plain_products.py`).
"""

import os
import tempfile
import time
from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median
from typing import Any, TypeVar

import torch
from torch import Tensor

from bench import common
from bench.plain_products import products_of, seconds_of
from bench.v4_ties import TIE, Choices, TieCounts, settled, told
from engine.checkpoint.source import open_checkpoint
from engine.model.deepseek.rows import SequenceRows
from engine.model.deepseek.step import Observer
from engine.model.deepseek_v4.config import DeepseekV4Config, V4Quantisation
from engine.model.deepseek_v4.model import DeepseekV4Model
from kernels.operations import select_operations

DECODE_TARGET, PROMPT_TARGET, LONG_TARGET = 5.0, 2.0, 5.0  # of transformers' speed
TOLERANCE = 1e-3  # of logits
PEER = "transformers"
WINDOW, CSA, HCA = "sliding_attention", "compressed_sparse_attention", "heavily_compressed_attention"
FIELDS: dict[str, Any] = {
    "vocab_size": 4096, "hidden_size": 512, "moe_intermediate_size": 128, "num_hidden_layers": 8,
    "num_attention_heads": 32, "num_key_value_heads": 1, "head_dim": 64, "qk_rope_head_dim": 8,
    "q_lora_rank": 128, "o_groups": 4, "o_lora_rank": 128, "n_routed_experts": 32, "num_experts_per_tok": 6,
    "n_shared_experts": 1, "sliding_window": 128, "layer_types": [WINDOW, WINDOW, *[CSA, HCA] * 3],
    "compress_rates": {CSA: 4, HCA: 128}, "num_hash_layers": 2, "index_n_heads": 16, "index_head_dim": 32,
    "index_topk": 64, "hc_mult": 4, "hc_sinkhorn_iters": 20, "max_position_embeddings": 8192,
    "rope_theta": 1e4, "compress_rope_theta": 1.6e5, "initializer_range": 0.05, "pad_token_id": None,
    "rope_parameters": {"rope_type": "yarn", "factor": 16, "beta_fast": 32, "beta_slow": 1,
                        "original_max_position_embeddings": 512},
    "num_nextn_predict_layers": 0,
}  # fmt: skip
CHUNK, BLOCK = 512, 128
_LONG = 1000  # seeds of long prompts, from here
T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Size:
    """How much is measured; tokens. `long_rounds`: transformers' time grows with the square of the prompt."""

    rounds: int
    prompt: int
    decode: int
    long_prompt: int
    long_rounds: int


FULL = Size(rounds=7, prompt=512, decode=32, long_prompt=4096, long_rounds=2)
QUICK = Size(rounds=3, prompt=512, decode=12, long_prompt=2048, long_rounds=1)


@dataclass(frozen=True, slots=True)
class Times:
    """Seconds: a token decoded, a prompt."""

    decode: float
    prompt: float


class Ours:
    """One sequence in a cache of its own."""

    def __init__(self, model: DeepseekV4Model) -> None:
        self._model, self._blocks = model, range(FIELDS["max_position_embeddings"] // BLOCK)
        self._cache, self._position = model.new_cache(len(self._blocks), BLOCK, 1), 0

    def begin(self) -> None:
        self._position = 0

    def run(self, ids: Tensor, observer: Observer | None = None) -> Tensor:
        """Logits [V] of the last row."""
        hidden = torch.empty(0)
        for part in _parts(ids, CHUNK):
            rows = SequenceRows(0, self._blocks, self._position, len(part))
            hidden = self._model.forward(part, [rows], self._cache, observer)
            self._position = rows.stop
        return self._model.head(hidden[-1:])[0]

    def run_told(self, ids: Tensor, choices: Choices) -> Tensor:
        """Logits [V] of a prompt's last row; `choices` is told of all that layers choose."""
        self.begin()
        with told(self._model, choices):
            return self.run(ids, choices)


class Theirs:
    """One sequence in transformers' own cache."""

    def __init__(self, model: Any) -> None:
        self.model, self._cache = model, None

    def begin(self) -> None:
        from transformers import DynamicCache

        self._cache = DynamicCache(config=self.model.config)

    def run(self, ids: Tensor) -> Tensor:
        """Logits [V] of the last row."""
        return self.model(ids[None], cache=self._cache, logits_to_keep=1).logits[0, -1]

    def run_settled(self, ids: Tensor, ours: Choices, counts: TieCounts) -> Tensor:
        """Logits [V] of a prompt's last row, with our choices in tied rows."""
        self.begin()
        with settled(self.model, ours, counts):
            return self.run(ids)


def main(arguments: Sequence[str]) -> int:
    """Measure, print, and return 1 where a target was missed."""
    options = common.parse("v4_against_transformers", __doc__, arguments)
    surroundings = common.Surroundings(("torch", "transformers", "numpy"))
    threads = len(os.sched_getaffinity(0))
    torch.set_num_threads(threads)
    size = QUICK if options.quick else FULL
    with torch.inference_mode(), models(threads, rounded=True) as (ours, theirs):
        rounds, differences = measure(ours, theirs, size)
        long = measure_long(ours, theirs, size)
        counts = TieCounts()
        differences += compare_long(ours, theirs, size, counts)
        products = [seconds_of(products_of(theirs.model, count)) for count in (1, size.prompt)]
    with torch.inference_mode(), models(threads, rounded=False) as (ours, theirs):
        wide, _ = measure(ours, theirs, size)
    ratios = {
        "decode": median(b.decode / a.decode for a, b in rounds),
        f"prompt_{size.prompt}": median(b.prompt / a.prompt for a, b in rounds),
        f"prompt_{size.long_prompt}": median(b / a for a, b in long),
    }
    targets = dict(zip(ratios, (DECODE_TARGET, PROMPT_TARGET, LONG_TARGET), strict=True))
    parts = {name: ratio >= targets[name] for name, ratio in ratios.items()}
    found = common.ComparisonOfParts(
        name="v4_against_transformers",
        unit="tokens/s",
        value=1 / median(a.decode for a, _ in rounds),
        peer=PEER,
        peer_value=1 / median(b.decode for _, b in rounds),
        target=DECODE_TARGET,
        parts={**parts, "logits": max(differences) <= TOLERANCE and counts.unexplained == 0},
    )
    detail = {
        "threads": threads,
        "size": asdict(size),
        "parts": found.parts,
        "targets": targets,
        "ratios": {name: round(ratio, 2) for name, ratio in ratios.items()},
        "decode_wide": round(median(b.decode / a.decode for a, b in wide), 2),
        "plain_products": _shares(rounds, Times(*products)),
        "largest_difference": max(differences),
        "ties": {"at_most": TIE, **asdict(counts)},
        "seconds": {"ours": [asdict(a) for a, _ in rounds], PEER: [asdict(b) for _, b in rounds]},
        "long_seconds": {"ours": [a for a, _ in long], PEER: [b for _, b in long]},
    }
    return common.finish(common.report(found, surroundings, detail), options)


def _shares(rounds: list[tuple[Times, Times]], products: Times) -> dict[str, dict[str, float]]:
    """Of decoding and of the prompt: the products' share of ours and of theirs."""
    return {
        part: {
            side: round(getattr(products, part) / median(getattr(times, part) for times in column), 3)
            for side, column in zip(("ours", PEER), zip(*rounds, strict=True), strict=True)
        }
        for part in ("decode", "prompt")
    }


@contextmanager
def models(threads: int, *, rounded: bool) -> Generator[tuple[Ours, Theirs]]:
    """Both from the folder that transformers saves; `rounded`: weights are bfloat16's."""
    from transformers.models.deepseek_v4.configuration_deepseek_v4 import (
        DeepseekV4Config as TheirConfig,
    )
    from transformers.models.deepseek_v4.modeling_deepseek_v4 import DeepseekV4ForCausalLM

    config: Any = TheirConfig(**FIELDS)
    config._attn_implementation = "eager"
    torch.default_generator.manual_seed(0)
    theirs: Any = DeepseekV4ForCausalLM(config).eval()
    _randomise(theirs, rounded=rounded)
    with tempfile.TemporaryDirectory() as folder:
        theirs.save_pretrained(folder)
        source = open_checkpoint(Path(folder))
        shape = DeepseekV4Config.from_dict(source.folder.config, V4Quantisation.off())
        ours = DeepseekV4Model(shape, source, select_operations(threads))
        source.check_all_taken()
    yield Ours(ours), Theirs(theirs)


def _randomise(model: Any, *, rounded: bool) -> None:
    """What transformers leaves at zeros and ones; then parameters may be rounded to bfloat16, as released."""
    with torch.no_grad():
        for name, tensor in (*model.named_parameters(), *model.named_buffers()):
            if name.endswith(("sinks", "position_bias", "base", "e_score_correction_bias")):
                tensor.normal_(0, 0.3)
            elif name.endswith("tid2eid"):
                experts = torch.rand(tensor.shape[0], FIELDS["n_routed_experts"]).argsort(1)
                tensor.copy_(experts[:, : tensor.shape[1]])
        for tensor in model.parameters() if rounded else ():
            tensor.copy_(tensor.bfloat16())


def measure(ours: Ours, theirs: Theirs, size: Size) -> tuple[list[tuple[Times, Times]], list[float]]:
    """Each round's times, ours and theirs, and how far the logits were apart."""
    rounds: list[tuple[Times, Times]] = []
    differences: list[float] = []
    for number in range(size.rounds + 1):
        ids = _ids(size.prompt + size.decode, number)
        runs = _in_turns(number, ours, theirs, lambda side, ids=ids: _times(side, ids, size))
        (mine, my_logits), (others, their_logits) = runs
        common.progress(f"round {number} of {size.rounds}: ours {mine}, {PEER} {others}")
        if number:  # the first one warms both up
            rounds.append((mine, others))
            differences.append(float((my_logits - their_logits).abs().max()))
    return rounds, differences


def measure_long(ours: Ours, theirs: Theirs, size: Size) -> list[tuple[float, float]]:
    """The long prompt's seconds, ours and theirs."""
    pairs: list[tuple[float, float]] = []
    for number in range(size.long_rounds):
        ids = _ids(size.long_prompt, _LONG + number)

        def once(side: Ours | Theirs, ids: Tensor = ids) -> float:
            side.begin()
            start = time.perf_counter()
            side.run(ids)
            return time.perf_counter() - start

        mine, others = _in_turns(number, ours, theirs, once)
        common.progress(f"{size.long_prompt} tokens: ours {mine:.2f} s, {PEER} {others:.2f} s")
        pairs.append((mine, others))
    return pairs


def compare_long(ours: Ours, theirs: Theirs, size: Size, counts: TieCounts) -> list[float]:
    """The largest difference of each long prompt's logits, tied rows settled and counted."""
    differences: list[float] = []
    for number in range(size.long_rounds):
        ids, choices = _ids(size.long_prompt, _LONG + number), Choices()
        mine = ours.run_told(ids, choices)
        others = theirs.run_settled(ids, choices, counts)
        differences.append(float((mine - others).abs().max()))
        common.progress(f"{size.long_prompt} tokens: logits within {differences[-1]:.1e}, {counts}")
    return differences


def _in_turns(number: int, ours: Ours, theirs: Theirs, once: Callable[[Ours | Theirs], T]) -> tuple[T, T]:
    """Ours first in even rounds."""
    if number % 2 == 0:
        return once(ours), once(theirs)
    others = once(theirs)
    return once(ours), others


def _times(side: Ours | Theirs, ids: Tensor, size: Size) -> tuple[Times, Tensor]:
    side.begin()
    start = time.perf_counter()
    side.run(ids[: size.prompt])
    prompt_s = time.perf_counter() - start
    logits, steps = torch.empty(0), list[float]()
    for token in _parts(ids[size.prompt :], 1):
        start = time.perf_counter()
        logits = side.run(token)
        steps.append(time.perf_counter() - start)
    return Times(median(steps), prompt_s), logits


def _parts(ids: Tensor, count: int) -> list[Tensor]:
    return [ids[start : start + count] for start in range(0, len(ids), count)]


def _ids(count: int, seed: int) -> Tensor:
    return torch.randint(0, FIELDS["vocab_size"], (count,), generator=torch.Generator().manual_seed(seed))


if __name__ == "__main__":
    common.run(main)
