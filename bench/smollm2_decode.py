"""Our engine against llama.cpp: the same model file, the same number of threads, side by side.

`python -m bench.smollm2_decode --json [--quick]`. The two take turns, pair by pair and in changing order, so
that a machine that slows down slows both; the figures are medians over the pairs. Measured are decoding of
one sequence (the value), prompts, and sixteen sequences at once. llama.cpp's stages are timed by its own
clock, ours around the engine's steps; sixteen at once are timed from the first submission to the last token,
on both sides. llama.cpp rounds activations to 8 bits and multiplies in integers; ours computes in float32.
"""

import os
import random
import sys
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from functools import partial
from statistics import median

from bench import common
from bench.llama_cpp_peer import LlamaCpp, llama_cpp
from engine import Engine, EngineConfig, Request, SamplingParams
from engine.model_path import model_path

TARGET = 1.0  # of llama.cpp's decode speed at batch 1
BATCH = 16
VOCABULARY = 49_152
Ids = tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Size:
    """How much is measured; tokens."""

    pairs: int
    prompt: int
    decode: int
    batch_prompt: int
    batch_decode: int


FULL = Size(pairs=9, prompt=512, decode=192, batch_prompt=32, batch_decode=96)
QUICK = Size(pairs=5, prompt=128, decode=48, batch_prompt=16, batch_decode=24)


@dataclass(frozen=True, slots=True)
class Rates:
    """Tokens a second."""

    prompt: float
    decode: float
    batch_16: float


@dataclass(frozen=True, slots=True)
class Prompts:
    """Of one pair. New ones for each, so that no prefix cache has seen them."""

    warm_up: Ids
    single: Ids
    batch: tuple[Ids, ...]


def main() -> int:
    """Measure, print, and return 1 where the target was missed."""
    options = common.parse("smollm2_decode", __doc__)
    surroundings = common.Surroundings(("torch", "numpy", "xllamacpp"))
    threads = len(os.sched_getaffinity(0))
    size = QUICK if options.quick else FULL
    ours, theirs = measure(size, threads)
    found = common.Comparison(
        name="smollm2_decode",
        unit="tokens/s",
        value=median(rates.decode for rates in ours),
        peer="llama.cpp",
        peer_value=median(rates.decode for rates in theirs),
        target=TARGET,
    )
    detail = {
        "threads": threads,
        "size": asdict(size),
        "ours": asdict(_medians(ours)),
        "llama.cpp": asdict(_medians(theirs)),
        "ratios": asdict(_ratios(_medians(ours), _medians(theirs))),
        "pairs": [{"ours": asdict(a), "llama.cpp": asdict(b)} for a, b in zip(ours, theirs, strict=True)],
    }
    return common.finish(common.report(found, surroundings, detail), options)


def measure(size: Size, threads: int) -> tuple[list[Rates], list[Rates]]:
    """Pairs of rates, ours and llama.cpp's."""
    path = model_path("smollm2")
    ours: list[Rates] = []
    theirs: list[Rates] = []
    with ExitStack() as started:
        single = started.enter_context(llama_cpp(path, threads=threads, positions=1024))
        batch = started.enter_context(llama_cpp(path, threads=threads, parallel=BATCH, positions=256))
        engine = Engine(EngineConfig(threads=threads, operations="c", token_budget=512))
        turns: list[Callable[[Prompts], None]] = [
            lambda prompts: ours.append(rates_of_ours(engine, prompts, size)),
            lambda prompts: theirs.append(rates_of_llama_cpp(single, batch, prompts, size)),
        ]
        for pair in range(size.pairs):
            for turn in turns if pair % 2 == 0 else reversed(turns):
                turn(_prompts(pair, size))
            common.progress(f"pair {pair + 1} of {size.pairs}: ours {ours[-1]}, llama.cpp {theirs[-1]}")
    return ours, theirs


def rates_of_ours(engine: Engine, prompts: Prompts, size: Size) -> Rates:
    _run(engine, [prompts.warm_up], 4)
    engine.add(_request("single", prompts.single, size.decode))
    prompt_s = _timed(engine.step)
    decode_s = _timed(lambda: _finish(engine))
    batch_s = _timed(lambda: _run(engine, prompts.batch, size.batch_decode))
    return Rates(
        prompt=size.prompt / prompt_s,
        decode=(size.decode - 1) / decode_s,
        batch_16=BATCH * size.batch_decode / batch_s,
    )


def rates_of_llama_cpp(single: LlamaCpp, batch: LlamaCpp, prompts: Prompts, size: Size) -> Rates:
    single.greedy(prompts.warm_up, 4, ignore_eos=True)
    done = single.greedy(prompts.single, size.decode, ignore_eos=True)
    greedy = partial(batch.greedy, count=size.batch_decode, ignore_eos=True)
    with ThreadPoolExecutor(BATCH) as pool:
        batch_s = _timed(lambda: list(pool.map(greedy, prompts.batch)))
    # Its clock for decoding starts when the first token is known.
    return Rates(
        prompt=size.prompt / done.prompt_s,
        decode=(size.decode - 1) / done.decode_s,
        batch_16=BATCH * size.batch_decode / batch_s,
    )


def _prompts(pair: int, size: Size) -> Prompts:
    generator = random.Random(pair)

    def ids(count: int) -> Ids:
        return tuple(generator.choices(range(100, VOCABULARY), k=count))

    return Prompts(ids(8), ids(size.prompt), tuple(ids(size.batch_prompt) for _ in range(BATCH)))


def _run(engine: Engine, prompts: Sequence[Ids], count: int) -> None:
    for number, ids in enumerate(prompts):
        engine.add(_request(f"r{number}", ids, count))
    _finish(engine)


def _finish(engine: Engine) -> None:
    while engine.has_work:
        engine.step()


def _request(name: str, ids: Ids, count: int) -> Request:
    return Request(name, ids, SamplingParams(max_tokens=count, ignore_eos=True))


def _timed(function: Callable[[], object]) -> float:
    started = time.perf_counter()
    function()
    return time.perf_counter() - started


def _medians(rates: Sequence[Rates]) -> Rates:
    return Rates(
        median(r.prompt for r in rates), median(r.decode for r in rates), median(r.batch_16 for r in rates)
    )


def _ratios(ours: Rates, theirs: Rates) -> Rates:
    return Rates(ours.prompt / theirs.prompt, ours.decode / theirs.decode, ours.batch_16 / theirs.batch_16)


if __name__ == "__main__":
    sys.exit(main())
