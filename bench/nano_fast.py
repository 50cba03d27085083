"""The profile `fast` on nano: how much faster than `exact` it is, and what it costs in quality.

`python -m bench.nano_fast --json [--quick]`. Two engines of nano, one a profile, take turns round by round,
in changing order, on the same new prompts: one sequence, four and sixteen decoding at once, and a prompt of
512 tokens in one step. Figures are medians over the rounds, ratios medians of the rounds' ratios. The value
is `fast`'s decoding of sixteen, the peer `exact`. Quality is measured on held-out windows of 1,024 tokens,
which both models read: perplexity of each, the paired difference in nats, the divergence from `exact`, and
how often the likeliest token stays, with standard errors over windows; with caches as released, whose codes
make a small difference larger, and with caches in float32.

`met`: `fast` is not slower anywhere, at sixteen at least a fifth faster, and its likeliest token is that of
`exact` at 98% of positions or more, with released caches.
"""

import os
import random
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from math import exp
from statistics import median
from typing import Any

from tokenizers import Tokenizer
from torch import tensor
from torch.nn.functional import cross_entropy

from bench import common
from engine import Engine, EngineConfig, Request, SamplingParams, load_model
from engine.model.registry import Caches
from engine.model_path import NANO
from engine.training.corpus import standard_library
from engine.training.judging import Measured, Window, evenly, ratio, windows_of
from engine.training.paired import Difference, Effect, compared, effect
from engine.training.vocabulary import encode_texts
from kernels.operations import Profile

TARGET, LEAST_RATIO, LEAST_AGREEMENT = 1.2, 1.0, 0.98
BATCHES = (1, 4, 16)
PROFILES: tuple[Profile, ...] = ("exact", "fast")
CACHES: tuple[Caches, ...] = ("released", "float32")
WINDOW = 1024
Ids = tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Size:
    """How much is measured; tokens, but for rounds and windows."""

    rounds: int
    windows: int
    decode: int
    prompt: int = 512
    batch_prompt: int = 16


FULL, QUICK = Size(rounds=15, windows=48, decode=96), Size(rounds=5, windows=10, decode=48)


@dataclass(frozen=True, slots=True)
class Prompts:
    """Of one turn. New ones for each, so that no prefix cache has seen them."""

    batches: Mapping[int, tuple[Ids, ...]]
    long: Ids


@dataclass(frozen=True, slots=True)
class Quality:
    """Of `fast`, on the same windows as `exact`."""

    perplexity_exact: Measured
    perplexity_fast: Measured
    difference: Effect


Rates = Mapping[str, float]  # tokens a second: "decode 1", "decode 4", "decode 16", "prompt"


def main(arguments: Sequence[str]) -> int:
    """Measure, print, and return 1 where a target was missed."""
    options = common.parse("nano_fast", __doc__, arguments)
    surroundings = common.Surroundings(("torch", "numpy", "tokenizers"))
    threads, size = len(os.sched_getaffinity(0)), QUICK if options.quick else FULL
    rates = measure_speed(size, threads)
    quality: dict[Caches, Quality] = {
        caches: measure_quality(size.windows, threads, caches) for caches in CACHES
    }
    found = judge(rates, quality)
    detail = {
        "threads": threads,
        "size": asdict(size),
        "parts": found.parts,
        "medians": {profile: medians(of_one) for profile, of_one in rates.items()},
        "ratios": ratios(rates),
        "quality": {caches: describe(of_one) for caches, of_one in quality.items()},
        "rounds": rates,
    }
    return common.finish(common.report(found, surroundings, detail), options)


def judge(
    rates: Mapping[Profile, Sequence[Rates]], quality: Mapping[Caches, Quality]
) -> common.ComparisonOfParts:
    """Every part by its own target."""
    speed, many = ratios(rates), f"decode {BATCHES[-1]}"
    parts = {name: of_one >= LEAST_RATIO for name, of_one in speed.items()}
    parts[many] = speed[many] >= TARGET
    parts["top_1"] = quality["released"].difference.agreement >= LEAST_AGREEMENT
    return common.ComparisonOfParts(
        name="nano_fast",
        unit="tokens/s, sixteen sequences",
        value=medians(rates["fast"])[many],
        peer="exact",
        peer_value=medians(rates["exact"])[many],
        target=TARGET,
        parts=parts,
    )


def measure_speed(size: Size, threads: int) -> dict[Profile, list[Rates]]:
    """Each round's rates, by profile."""
    engines = {profile: _engine(threads, profile) for profile in PROFILES}
    rates: dict[Profile, list[Rates]] = {profile: [] for profile in PROFILES}
    for number in range(-1, size.rounds):
        for profile in PROFILES if number % 2 else PROFILES[::-1]:
            turn = _turn(engines[profile], _prompts(number, size), size)
            if number >= 0:  # the first warms up
                rates[profile].append(turn)
        common.progress(f"round {number + 1} of {size.rounds}: { {p: r[-1:] for p, r in rates.items()} }")
    for engine in engines.values():
        engine.model.close()
    return rates


def measure_quality(count: int, threads: int, caches: Caches) -> Quality:
    """Of the profiles on the same windows, spread over the held-out files."""
    windows = evenly(_windows(), count)
    exact, fast = (load_model("nano", threads=threads, profile=p, caches=caches) for p in PROFILES)
    nats: dict[Profile, list[float]] = {profile: [] for profile in PROFILES}
    differences: list[Difference] = []
    for window in windows:
        before, after = exact.logits(window.ids), fast.logits(window.ids)
        wanted = tensor(window.ids[1:])
        for profile, logits_TV in zip(PROFILES, (before, after), strict=True):
            nats[profile].append(float(cross_entropy(logits_TV[:-1], wanted, reduction="sum")))
        rows = slice(0, len(wanted))
        differences.append(compared(before[rows], after[rows], window, rows))
    tokens = [len(window.ids) - 1 for window in windows]
    for model in (exact, fast):
        model.close()
    perplexities = {profile: _perplexity(ratio(nats[profile], tokens)) for profile in PROFILES}
    difference = effect(f"fast, caches {caches}", differences)
    return Quality(perplexities["exact"], perplexities["fast"], difference)


def ratios(rates: Mapping[Profile, Sequence[Rates]]) -> dict[str, float]:
    """`fast` over `exact`: medians of the rounds' ratios."""
    pairs = list(zip(rates["fast"], rates["exact"], strict=True))
    return {name: median(ours[name] / theirs[name] for ours, theirs in pairs) for name in pairs[0][0]}


def medians(rates: Sequence[Rates]) -> dict[str, float]:
    return {name: median(each[name] for each in rates) for name in rates[0]}


def describe(quality: Quality) -> dict[str, Any]:
    return {**asdict(quality), "top_1": quality.difference.agreement}


def _engine(threads: int, profile: Profile) -> Engine:
    config = EngineConfig(model="nano", threads=threads, operations="c", profile=profile, token_budget=512)
    engine = Engine(config)
    assert engine.model.operations.profile == profile
    return engine


def _turn(engine: Engine, prompts: Prompts, size: Size) -> dict[str, float]:
    """Decoding is timed from the step behind the last prompt on."""
    rates: dict[str, float] = {}
    for batch, of_batch in prompts.batches.items():
        for number, ids in enumerate(of_batch):
            engine.add(_request(f"r{number}", ids, size.decode + 1))
        engine.step()
        rates[f"decode {batch}"] = batch * size.decode / _timed(lambda: _finish(engine))
    engine.add(_request("long", prompts.long, 1))
    rates["prompt"] = size.prompt / _timed(engine.step)
    _finish(engine)
    return rates


def _prompts(number: int, size: Size) -> Prompts:
    generator = random.Random(number)

    def ids(count: int) -> Ids:
        return tuple(generator.choices(range(10, 4096), k=count))

    batches = {batch: tuple(ids(size.batch_prompt) for _ in range(batch)) for batch in BATCHES}
    return Prompts(batches, ids(size.prompt))


def _windows() -> list[Window]:
    tokenizer = Tokenizer.from_file(str(NANO / "tokenizer.json"))
    files = encode_texts(tokenizer, [file.text for file in standard_library().held_out])
    return windows_of(tokenizer, files, WINDOW)


def _perplexity(nats: Measured) -> Measured:
    """Of nats a token; the error is that of first order."""
    return Measured(exp(nats.value), exp(nats.value) * nats.error)


def _request(name: str, ids: Ids, count: int) -> Request:
    return Request(name, ids, SamplingParams(max_tokens=count, ignore_eos=True))


def _finish(engine: Engine) -> None:
    while engine.has_work:
        engine.step()


def _timed(function: Callable[[], object]) -> float:
    started = time.perf_counter()
    function()
    return time.perf_counter() - started


if __name__ == "__main__":
    common.run(main)
