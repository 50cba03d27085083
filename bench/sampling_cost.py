"""What a token costs in the sampler, over a vocabulary as large as DeepSeek-V4.1's.

The peer is the definition: weights of all tokens, one stable sort of the vocabulary, and cuts in its order.
It chooses the same tokens, which is checked first. `value` and `peer_value` are rows a second of CPU time
with top-p, which a sort serves worst; the detail has each kind of request in CPU milliseconds a row.
"""

import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from bench.common import Comparison, Options, Surroundings, finish, parse, report, run
from engine.sampling.candidates import Logits, draw
from engine.sampling.logprobs import logprobs_of
from engine.sampling.noise import Purpose, uniform
from engine.sampling.past import Past
from engine.sampling.sampler import choose
from protocol.sampling import SamplingParams

VOCABULARY = 129_280
ENDS = (1,)
TARGET = 5.0
NUCLEUS = SamplingParams(temperature=1.0, top_p=0.95, seed=7)
KINDS: Mapping[str, SamplingParams] = {
    "greedy": SamplingParams(),
    "temperature": SamplingParams(temperature=1.0, seed=7),
    "top_k 50": SamplingParams(temperature=1.0, top_k=50, seed=7),
    "top_p 0.95": NUCLEUS,
    "min_p 0.05": SamplingParams(temperature=1.0, min_p=0.05, seed=7),
    "penalties": SamplingParams(
        temperature=1.0, top_k=50, presence_penalty=0.5, frequency_penalty=0.5, repetition_penalty=1.1, seed=7
    ),
    "grammar": SamplingParams(temperature=1.0, top_k=50, seed=7),
}


def rows(count: int) -> list[Logits]:
    """Peaked, as a model's are: probabilities fall with the square of the rank. A tenth of them are flat, so
    that top-p keeps half of the vocabulary."""
    random = np.random.default_rng(5)
    peaked = -2.0 * np.log(np.arange(1, VOCABULARY + 1))
    shapes = [peaked * 0.0 if n % 10 == 9 else peaked for n in range(count)]
    noise = [random.standard_normal(VOCABULARY) for _ in range(count)]
    return [random.permutation(a + b).astype(np.float32) for a, b in zip(shapes, noise, strict=True)]


def by_sorting(logits: Logits, sampling: SamplingParams, generated: int) -> int:
    """The definition of top-p."""
    weights = np.exp((logits.astype(np.float64) - float(logits.max())) / sampling.temperature)
    order = np.argsort(-logits, kind="stable")
    kept = weights[order]
    kept = kept[np.cumsum(kept) - kept < sampling.top_p * kept.sum()]
    return int(order[draw(kept, uniform(sampling.seed, generated, Purpose.CHOOSE))])


def choosers(past: Past, allowed: NDArray[np.bool_]) -> dict[str, Callable[[Logits, int], object]]:
    """By kind of request: what is done for one row."""

    def chooser(name: str, sampling: SamplingParams) -> Callable[[Logits, int], object]:
        mask = allowed if name == "grammar" else None
        return lambda row, index: choose(row, sampling, index, past, ends=ENDS, allowed=mask)

    found = {name: chooser(name, sampling) for name, sampling in KINDS.items()}
    return {**found, "20 logprobs": lambda row, index: logprobs_of(row, index, 20)}


def ms_a_row(work: Callable[[Logits, int], object], over: Sequence[Logits]) -> float:
    """The median, which a moment of another process does not move."""
    times: list[float] = []
    for index, row in enumerate(over):
        started = time.thread_time()
        work(row, index)
        times.append(time.thread_time() - started)
    return float(np.median(times)) * 1e3


def measure(options: Options) -> dict[str, Any]:
    surroundings = Surroundings(["numpy"])
    over = rows(20 if options.quick else 200)
    for index, row in enumerate(over[:10]):
        assert choose(row, NUCLEUS, index) == by_sorting(row, NUCLEUS, index), "the peer chooses otherwise"
    random = np.random.default_rng(6)
    prompt = random.integers(0, VOCABULARY, 8_000).tolist()
    past = Past.of(prompt, random.integers(0, VOCABULARY, 2_000).tolist())
    kinds = choosers(past, random.random(VOCABULARY) < 0.2)
    costs = {name: ms_a_row(work, over) for name, work in kinds.items()}
    peer_ms = ms_a_row(lambda row, index: by_sorting(row, NUCLEUS, index), over)
    found = Comparison(
        "sampling_cost", "rows a CPU second, top-p", 1e3 / costs["top_p 0.95"],
        "one stable sort of the vocabulary", 1e3 / peer_ms, TARGET,
    )  # fmt: skip
    detail = {
        "vocabulary": VOCABULARY,
        "rows": len(over),
        "ms_a_row": {name: round(cost, 3) for name, cost in costs.items()},
        "peer_ms_a_row": round(peer_ms, 3),
    }
    return report(found, surroundings, detail)


def main(arguments: Sequence[str] | None = None) -> int:
    options = parse("sampling_cost", __doc__, arguments)
    return finish(measure(options), options)


if __name__ == "__main__":
    run(main)
