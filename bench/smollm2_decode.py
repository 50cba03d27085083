"""Our engine against llama.cpp: the same model file, the same number of threads, side by side.

`python -m bench.smollm2_decode --json [--quick]`. Our two profiles and llama.cpp take turns, round by round
and in changing order, so that a machine that slows down slows all; the figures are medians over the rounds,
the ratios medians of the rounds' ratios. Measured are decoding of one sequence (the value is `fast`'s),
prompts, and sixteen sequences at once. llama.cpp's stages are timed by its own clock, ours around the steps
of the engine; sixteen at once are timed from the first submission to the last token, on both sides. llama.cpp
rounds activations to 8 bits and multiplies in integers, `fast` does so with 16 bits, `exact` computes in
float32. Hence a third target: on the same text, the most likely token of `fast` is that of `exact` as often
as llama.cpp's is.
"""

import os
import random
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from functools import partial
from statistics import median

from bench import common
from bench.llama_cpp_peer import LlamaCpp, llama_cpp
from bench.smollm2_quality import Quality, compare, text_ids
from engine import Engine, EngineConfig, Request, SamplingParams
from engine.model_path import model_path
from kernels.operations import Profile

TARGET, BATCH_TARGET = 1.0, 1.5  # of llama.cpp's speed with one sequence, with sixteen
BATCH = 16
VOCABULARY = 49_152
PROFILES: tuple[Profile, ...] = ("exact", "fast")
PEER = "llama.cpp"
Ids = tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Size:
    """How much is measured; tokens."""

    rounds: int
    prompt: int
    decode: int
    batch_prompt: int
    batch_decode: int
    quality: int


FULL = Size(rounds=9, prompt=512, decode=192, batch_prompt=32, batch_decode=96, quality=1000)
QUICK = Size(rounds=5, prompt=128, decode=48, batch_prompt=16, batch_decode=24, quality=300)


@dataclass(frozen=True, slots=True)
class Rates:
    """Tokens a second."""

    prompt: float
    decode: float
    batch_16: float


@dataclass(frozen=True, slots=True)
class Prompts:
    """Of one turn. New ones for each, so that no prefix cache has seen them."""

    warm_up: Ids
    single: Ids
    batch: tuple[Ids, ...]


Turn = tuple[str, Callable[[Prompts], Rates]]


def main(arguments: Sequence[str]) -> int:
    """Measure, print, and return 1 where a target was missed."""
    options = common.parse("smollm2_decode", __doc__, arguments)
    surroundings = common.Surroundings(("torch", "numpy", "xllamacpp"))
    threads = len(os.sched_getaffinity(0))
    size = QUICK if options.quick else FULL
    rates, quality = measure(size, threads)
    ratios = {profile: _ratios(rates[profile], rates[PEER]) for profile in PROFILES}
    found = common.ComparisonOfParts(
        name="smollm2_decode",
        unit="tokens/s",
        value=median(round_.decode for round_ in rates["fast"]),
        peer=PEER,
        peer_value=median(round_.decode for round_ in rates[PEER]),
        target=TARGET,
        parts={
            "decode": ratios["fast"].decode >= TARGET,
            "batch_16": ratios["fast"].batch_16 >= BATCH_TARGET,
            "top_1": quality.as_good_as_llama_cpp,
        },
    )
    detail = {
        "threads": threads,
        "size": asdict(size),
        "parts": found.parts,
        "medians": {name: asdict(_medians(of_one)) for name, of_one in rates.items()},
        "ratios": {name: asdict(of_one) for name, of_one in ratios.items()},
        "quality": asdict(quality),
        "rounds": {name: [asdict(each) for each in of_one] for name, of_one in rates.items()},
    }
    return common.finish(common.report(found, surroundings, detail), options)


def measure(size: Size, threads: int) -> tuple[dict[str, list[Rates]], Quality]:
    """Each round's rates, by profile and peer; and how near the answers are."""
    path = model_path("smollm2")
    with ExitStack() as started:
        single = started.enter_context(llama_cpp(path, threads=threads, positions=1024))
        batch = started.enter_context(llama_cpp(path, threads=threads, parallel=BATCH, positions=256))
        engines = {profile: _engine(threads, profile) for profile in PROFILES}
        turns: list[Turn] = [
            *((name, partial(rates_of_ours, engine, size=size)) for name, engine in engines.items()),
            (PEER, partial(rates_of_llama_cpp, single, batch, size=size)),
        ]
        rates: dict[str, list[Rates]] = {name: [] for name, _ in turns}
        for number in range(size.rounds):
            for name, turn in _rotated(turns, number):
                rates[name].append(turn(_prompts(number, size)))
            common.progress(f"round {number + 1} of {size.rounds}: { {n: r[-1] for n, r in rates.items()} }")
        models = (engines["exact"].model, engines["fast"].model)
        return rates, compare(*models, single, text_ids(path, size.quality))


def _engine(threads: int, profile: Profile) -> Engine:
    engine = Engine(
        EngineConfig(
            threads=threads, operations="c", profile=profile, token_budget=512, kv_cache_bytes=256 << 20
        )
    )
    running = engine.model.operations.profile
    assert running == profile, f"the engine runs {running!r}, not {profile!r}"
    return engine


def _rotated(turns: Sequence[Turn], number: int) -> Sequence[Turn]:
    """Every order of neighbours comes up: each round begins with another, every second runs backwards."""
    start = number % len(turns)
    rotated = (*turns[start:], *turns[:start])
    return rotated if number % 2 == 0 else rotated[::-1]


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


def _prompts(number: int, size: Size) -> Prompts:
    generator = random.Random(number)

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


def _ratios(ours: Sequence[Rates], theirs: Sequence[Rates]) -> Rates:
    """Medians of the rounds' ratios."""
    return _medians(
        [
            Rates(a.prompt / b.prompt, a.decode / b.decode, a.batch_16 / b.batch_16)
            for a, b in zip(ours, theirs, strict=True)
        ]
    )


if __name__ == "__main__":
    common.run(main)
