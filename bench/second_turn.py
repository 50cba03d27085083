"""The time to the first token of a conversation's second turn, against a prompt of which nothing is known.

`python -m bench.second_turn --json [--quick]`. A first turn of 32k tokens (4k with `--quick`, whose targets
are as much wider as its prompt is shorter) leaves its KV on the device, in host memory and on disk. Three
second turns, each with a tail of its own, then find it on the device, in host memory once the device has
forgotten it, and on disk from an engine that has just started. The models are nano and a random V4.1 of about
50 million parameters that a token uses. On disk no windows are kept, as replay is on: there the last one runs
again.
"""

import random
import tempfile
import time
from collections.abc import Sequence
from contextlib import closing
from dataclasses import dataclass
from typing import Any, cast

from bench.common import Options, Surroundings, finish, is_noisy, parse, progress, run
from bench.random_deepseek import Size, active_parameters, config_json, random_model
from engine import Engine, EngineConfig, Request, SamplingParams
from engine.checkpoint.folder import CheckpointFolder
from engine.model.base import Model
from engine.model.deepseek.config import DeepseekConfig
from engine.model.deepseek.serving import DeepseekServed
from engine.model.deepseek.text_model import TextModel
from engine.model.registry import load_model

TOKENS, QUICK_TOKENS, TAIL = 32_768, 4_096, 128
TARGETS = {"device": 1 / 20, "host": 1 / 15, "disk": 1 / 8}
_BLOCK = 64
_VOCABULARY = 2000  # ids that every model here has


class RandomServed(DeepseekServed):
    """A random model as an engine takes it: it has no folder, and no token that ends a text."""

    def __init__(self, text: TextModel) -> None:
        super().__init__(text, cast(CheckpointFolder, None), replay=True)

    @property
    def eos_ids(self) -> frozenset[int]:
        return frozenset()

    @property
    def fingerprint(self) -> str:
        return "random"


@dataclass(frozen=True, slots=True)
class Spent:
    """`cpu_s` of all threads of the process, which neighbours take nothing of."""

    clock_s: float
    cpu_s: float


@dataclass(frozen=True, slots=True)
class Turns:
    """To the first token. `cached`: of a second turn's tokens, those that were found."""

    model: str
    tokens: int
    cold: Spent
    second: dict[str, Spent]
    cached: dict[str, int]

    def share(self, place: str) -> float:
        return self.second[place].clock_s / self.cold.clock_s

    def cpu_share(self, place: str) -> float:
        return self.second[place].cpu_s / self.cold.cpu_s

    @property
    def met(self) -> bool:
        return all(self.share(place) <= target for place, target in targets_at(self.tokens).items())

    def as_json(self) -> dict[str, Any]:
        return {
            "model": self.model, "tokens": self.tokens, "cold_s": round(self.cold.clock_s, 3),
            "cold_cpu_s": round(self.cold.cpu_s, 3), "cached": self.cached,
            "second_s": {place: round(spent.clock_s, 4) for place, spent in self.second.items()},
            "second_cpu_s": {place: round(spent.cpu_s, 4) for place, spent in self.second.items()},
            "share": {place: round(self.share(place), 4) for place in self.second},
            "cpu_share": {place: round(self.cpu_share(place), 4) for place in self.second}, "met": self.met,
        }  # fmt: skip


def targets_at(tokens: int) -> dict[str, float]:
    """Shares of the cold time: those of 32k tokens, and wider as the tail is more of a shorter prompt."""
    return {place: target * TOKENS / tokens for place, target in TARGETS.items()}


def measure_turns(name: str, model: Model, tokens: int) -> Turns:
    draw = random.Random(7)
    first = tuple(draw.choices(range(10, _VOCABULARY), k=tokens - TAIL))
    tails = [tuple(draw.choices(range(10, _VOCABULARY), k=TAIL)) for _ in range(4)]
    cold, _ = time_to_first(_engine(name, model, tokens), first + tails[0])
    found: dict[str, tuple[Spent, int]] = {}
    with tempfile.TemporaryDirectory() as folder:
        tiers = {"host_bytes": 2 << 30, "disk_path": folder}
        with closing(_engine(name, model, tokens, tiers=tiers)) as engine:
            time_to_first(engine, first)
            found["device"] = time_to_first(engine, first + tails[1])
            engine.pool.release(engine.pool.allocate(engine.pool.num_available))  # the device forgets
            found["host"] = time_to_first(engine, first + tails[2])
        with closing(_engine(name, model, tokens, tiers=tiers)) as engine:
            found["disk"] = time_to_first(engine, first + tails[3])
    second = {place: spent for place, (spent, _) in found.items()}
    return Turns(name, tokens, cold, second, {place: cached for place, (_, cached) in found.items()})


def time_to_first(engine: Engine, prompt: tuple[int, ...]) -> tuple[Spent, int]:
    """Of one request of one token: what it took, and how many of its tokens were found."""
    started_s, cpu_s = time.perf_counter(), time.process_time()
    engine.add(Request("turn", prompt, SamplingParams(max_tokens=1, ignore_eos=True)))
    while engine.has_work:
        for output in engine.step().tokens:
            spent = Spent(time.perf_counter() - started_s, time.process_time() - cpu_s)
            return spent, output.num_cached
    raise AssertionError("a request has ended without a token")


def _engine(name: str, model: Model, tokens: int, **settings: object) -> Engine:
    num_bytes = int(model.cache_bytes_per_token() * (tokens + 16 * _BLOCK)) * 2
    config = EngineConfig.model_validate({
        "model": name, "block_tokens": _BLOCK, "kv_cache_bytes": max(num_bytes, 1 << 20), "token_budget": 512,
        "max_sequences": 2, **settings,
    })  # fmt: skip
    return Engine(config, model=model)


def models(threads: int) -> dict[str, Model]:
    """By name; their owner closes them."""
    raw = config_json(Size())
    active = active_parameters(DeepseekConfig.from_dict(raw))
    return {
        "nano": load_model("nano", threads=threads),
        f"random, {active / 1e6:.0f} M active": RandomServed(random_model(raw, threads)),
    }


def measure(options: Options) -> dict[str, Any]:
    surroundings, found = Surroundings(["torch"]), list[Turns]()
    tokens = QUICK_TOKENS if options.quick else TOKENS
    for name, model in models(threads=2).items():
        found.append(measure_turns(name, model, tokens))
        model.close()
        progress(f"{name}: {found[-1].as_json()}")
    env = surroundings.describe()
    worst = max(turns.share("device") for turns in found)
    noisy = is_noisy(env["cpu_pressure"], env["others"])
    return {
        "name": "second_turn", "value": round(worst, 4),
        "unit": "of the cold time to the first token, device",
        "peer": "cold", "peer_value": 1.0, "ratio": round(worst, 4), "target": targets_at(tokens)["device"],
        "met": None if noisy else all(turns.met for turns in found), "noisy": noisy, "env": env,
        "targets": {place: round(target, 4) for place, target in targets_at(tokens).items()},
        "turns": [turns.as_json() for turns in found],
    }  # fmt: skip


def main(arguments: Sequence[str] | None = None) -> int:
    options = parse("second_turn", __doc__, arguments)
    return finish(measure(options), options)


if __name__ == "__main__":
    run(main)
