"""The verdict on `fast`: every part by its own target, and rounds compared with their own."""

from pathlib import Path

import pytest

from bench.nano_fast import Quality, Rates, judge, measure_quality, measure_speed, ratios
from bench.nano_fast import Size as BenchSize
from engine.training.judging import Measured
from engine.training.paired import Effect
from kernels.operations import Profile

NAMES = ("decode 1", "decode 4", "decode 16", "prompt")


def rates(*speeds: float) -> list[Rates]:
    """Rounds in which everything has one speed."""
    return [dict.fromkeys(NAMES, speed) for speed in speeds]


def quality(disagreement: float) -> Quality:
    some = Measured(1.0, 0.1)
    return Quality(some, some, Effect("fast", some, some, some, Measured(disagreement, 0.0), 100))


def verdict(found: dict[Profile, list[Rates]], disagreement: float = 0.01) -> dict[str, bool]:
    both = {"released": quality(disagreement), "float32": quality(0.0)}
    return dict(judge(found, both).parts)  # pyright: ignore[reportArgumentType]


def test_ratios_are_those_of_the_rounds() -> None:
    """A machine that slows down from round to round changes no ratio."""
    found: dict[Profile, list[Rates]] = {"exact": rates(100, 10, 1), "fast": rates(150, 15, 1.5)}
    assert ratios(found) == pytest.approx(dict.fromkeys(NAMES, 1.5))
    assert all(verdict(found).values())


def test_each_part_can_be_missed() -> None:
    slow: dict[Profile, list[Rates]] = {"exact": rates(1.0), "fast": rates(1.1)}
    assert verdict(slow) == {**dict.fromkeys(NAMES, True), "decode 16": False, "top_1": True}
    slower: dict[Profile, list[Rates]] = {"exact": rates(1.0), "fast": [{**rates(2.0)[0], "prompt": 0.9}]}
    assert not verdict(slower)["prompt"]
    assert not verdict(slower, disagreement=0.03)["top_1"]


def test_a_small_measurement_of_the_real_thing(cpu_library: Path) -> None:
    found = measure_speed(BenchSize(rounds=1, windows=1, decode=2, prompt=32, batch_prompt=4), threads=1)
    assert {profile: [set(each) for each in of_one] for profile, of_one in found.items()} == {
        "exact": [set(NAMES)],
        "fast": [set(NAMES)],
    }
    near = measure_quality(2, 1, "float32")
    assert near.difference.agreement > 0.99
    assert near.perplexity_fast.value == pytest.approx(near.perplexity_exact.value, rel=1e-3)
