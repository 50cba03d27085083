"""A million short requests of every fate through one engine: its books balance, and its memory stays flat.

`python -m bench.engine_soak --json [--quick]` (40,000 with `--quick`). One nano, on one thread, with a device
cache, host memory and a disk so small that blocks are evicted, swapped and loaded all the time. Most requests
are a token or a few and one new one; others share longer prompts, have two outputs, fork, are aborted while
they wait or run, take others' places, are sampled with penalties and log probabilities, or are refused. Every
10,000 requests all end, `check_integrity` counts every block, slot, pin, byte and sequence, and memory is
looked at: resident bytes, how many objects there are of each class of the engine, and over the last 10,000,
with caches empty before and after, what Python has allocated and not given back (tracemalloc).
"""

import gc
import random
import tempfile
import time
import tracemalloc
from collections import Counter
from collections.abc import Sequence
from contextlib import closing
from dataclasses import dataclass, field
from typing import Any

from bench import resident_memory
from bench.common import Options, Surroundings, finish, parse, progress, run
from engine import Engine, EngineConfig, Request, SamplingParams
from engine.errors import InvalidRequest, Overloaded
from engine.model.base import Model
from engine.model.registry import load_model

REQUESTS, QUICK_REQUESTS, EVERY = 1_000_000, 40_000, 10_000
MOST_GROWTH_BYTES = 24 << 20  # of resident memory, from a tenth of the way to the end
MOST_TRACED_BYTES = 128 << 10  # over the last 10,000 requests: 13 bytes each
_IN_FLIGHT = 48
_SEQUENCES = 32
_CROWD_EVERY = 1_000
_SHARED = 400  # longer prompts, more than device and host memory hold
_BOUNDED = {"engine.cache.host_tier._Entry", "engine.cache.folder_index.File"}  # by bytes, which are checked


@dataclass(slots=True)
class Memory:
    """At a moment when no request is here. `objects` by class."""

    requests: int
    resident_bytes: int
    objects: Counter[str]
    traced_bytes: int

    @classmethod
    def now(cls, requests: int) -> "Memory":
        gc.collect()
        ours = Counter(name for thing in gc.get_objects() if (name := _kind(thing)).startswith("engine."))
        traced = tracemalloc.get_traced_memory()[0] if tracemalloc.is_tracing() else 0
        return cls(requests, resident_memory.now_bytes(), ours, traced)


def _kind(thing: object) -> str:
    kind = type(thing)
    return f"{kind.__module__}.{kind.__qualname__}"


@dataclass(slots=True)
class Soak:
    """Keeps an engine full, and knows what has become of whom."""

    engine: Engine
    fates: Counter[str] = field(default_factory=Counter[str])
    memory: list[Memory] = field(default_factory=list[Memory])
    tokens: int = 0
    ended: int = 0
    _forks: list[str] = field(default_factory=list[str])

    def run(self, count: int) -> None:
        """Blocks. Raises AssertionError where the books do not balance."""
        for first in range(0, count, EVERY):
            if first == count - 3 * EVERY:  # two to trace all files on disk in, one to look at
                tracemalloc.start()
            for number in range(first, min(first + EVERY, count)):
                while len(self.engine.requests) >= _IN_FLIGHT:
                    self._step()
                if number % _CROWD_EVERY == 0:
                    self._crowd(number)
                self._send(number)
            self._settle(min(first + EVERY, count))
        tracemalloc.stop()

    def _settle(self, done: int) -> None:
        while self.engine.has_work:
            self._step()
        self.engine.check_integrity()
        counts = self.engine.statistics()
        assert counts.pool.held == 0, "a block stays held"
        assert counts.tiers.blocks.reserved_bytes == counts.tiers.blocks.pinned == 0
        if tracemalloc.is_tracing():
            # Empties memory's caches: older entries would give way to traced ones, for 100,000 requests.
            self.engine.update_weights(f"after-{done}")
        self.memory.append(Memory.now(done))
        progress(f"{done} requests, {self.memory[-1].resident_bytes >> 20} MiB, {dict(self.fates)}")

    def _crowd(self, number: int) -> None:
        """All places are taken by requests of several tokens when urgent ones come, unless there is so little
        room that the first of them have ended before the last has a place."""
        for priority, name, new in ((0, "slow", 6), (-1, "first", 1)):
            for one in range(_SEQUENCES if priority == 0 else _SEQUENCES // 4):
                sampling = SamplingParams(max_tokens=new, ignore_eos=True)
                self.engine.add(Request(f"{name}{number}-{one}", (10 + one,), sampling, priority))
            while priority == 0 and self.engine.has_work and self._num_running() < _SEQUENCES:
                self._step()
        self.fates["crowds"] += 1

    def _num_running(self) -> int:
        return self.engine.statistics().scheduler.running

    def _send(self, number: int) -> None:
        chance = random.Random(number)
        fate = FATES[chance.randrange(len(FATES))]
        self.fates[fate] += 1
        request = _request(number, fate, chance)
        try:
            self.engine.add(request)
        except InvalidRequest:
            assert fate == "refused"
            return
        except Overloaded:
            self.fates["overloaded"] += 1
            return
        if fate == "aborted at once":
            self.engine.abort(request.id)
        if fate == "aborted" and chance.random() < 0.5:
            self._step()
            self.engine.abort(request.id)
        if fate == "forked":
            self._forks.append(request.id)

    def _step(self) -> None:
        result = self.engine.step()
        assert not result.failed
        for output in result.tokens:
            self.tokens += 1
            self.ended += output.finish_reason is not None
        for request_id in self._forks:
            if request_id in self.engine.requests:
                self._fork(request_id)
        self._forks.clear()

    def _fork(self, request_id: str) -> None:
        try:
            self.engine.fork(request_id, f"{request_id}-fork")
        except (InvalidRequest, Overloaded):  # it waits still, or there is no room
            self.fates["not forked"] += 1


FATES = (
    *("short",) * 85, *("refused", "aborted at once", "aborted", "two outputs", "begun elsewhere") * 2,
    "forked", "urgent", "shared", "sampled", "three tokens",
)  # fmt: skip


def _request(number: int, fate: str, chance: random.Random) -> Request:
    ids = tuple(chance.choices(range(10, 500), k=chance.choice((1, 1, 1, 1, 2))))
    sampling = SamplingParams(max_tokens=1 if fate == "short" else 3, ignore_eos=True)
    more: dict[str, Any] = {}
    match fate:
        case "refused":
            ids = (*ids, 1 << 40)
        case "shared" | "forked":
            shared = random.Random(-1 - chance.randrange(_SHARED))
            ids = tuple(shared.choices(range(10, 500), k=shared.randrange(70, 130)))
        case "two outputs":
            more["choices"] = 2
        case "urgent":
            more["priority"] = -1
        case "sampled":
            sampling = SamplingParams(
                max_tokens=3, temperature=1.0, seed=number, top_k=20, frequency_penalty=0.5, logprobs=2
            )
        case "begun elsewhere":
            sampling = SamplingParams(max_tokens=3, ignore_eos=True)
            more["generated_ids"] = ids[:1]
        case _:
            pass
    return Request(f"r{number}", ids, sampling, slack_ms=chance.choice((0.0, 5.0)), **more)


def soak(model: Model, count: int) -> Soak:
    with tempfile.TemporaryDirectory() as folder:
        tiers = {"host_bytes": 2 << 20, "window_bytes": 2 << 20, "disk_path": folder, "disk_bytes": 2 << 20}
        config = EngineConfig.model_validate({
            "model": "nano", "threads": 1, "kv_cache_bytes": 1 << 20, "max_sequences": _SEQUENCES,
            "max_waiting": 120, "token_budget": 128, "preemption": "swap", "starvation_s": 0.2,
            "tiers": tiers,
        })  # fmt: skip
        with closing(Engine(config, model=model)) as engine:
            found = Soak(engine)
            found.run(count)
        return found


def more_objects(before: Memory, after: Memory) -> dict[str, int]:
    """Those that there are more of, by class, but for what is bounded by bytes."""
    more = after.objects - before.objects
    return {kind: count for kind, count in more.items() if kind not in _BOUNDED}


def measure(options: Options) -> dict[str, Any]:
    count = QUICK_REQUESTS if options.quick else REQUESTS
    surroundings, model = Surroundings(["torch"]), load_model("nano", threads=1)
    started_s, cpu_s = time.perf_counter(), time.process_time()
    found = soak(model, count)
    model.close()
    memory = found.memory
    early, last = memory[len(memory) // 10], memory[-1]
    growth = last.resident_bytes - early.resident_bytes
    more = more_objects(early, last)
    traced = last.traced_bytes - memory[-2].traced_bytes
    counts = found.engine.statistics()
    return {
        "name": "engine_soak", "value": round(growth / (1 << 20), 2), "unit": "MiB of growth",
        "peer": "bound", "peer_value": MOST_GROWTH_BYTES >> 20,
        "ratio": round(growth / MOST_GROWTH_BYTES, 3), "target": 1.0,
        "met": growth <= MOST_GROWTH_BYTES and traced <= MOST_TRACED_BYTES and not more,
        "env": surroundings.describe(), "requests": count, "fates": dict(found.fates),
        "tokens": found.tokens, "ended": found.ended, "seconds": round(time.perf_counter() - started_s, 1),
        "cpu_ms_a_request": round((time.process_time() - cpu_s) * 1e3 / count, 3),
        "steps": counts.steps, "rows": counts.rows, "preemptions": counts.scheduler.preemptions,
        "swapped": counts.scheduler.swapped, "evictions": counts.pool.evictions,
        "loaded_blocks": counts.scheduler.loaded_blocks,
        "integrity_checks": len(memory), "traced_growth_bytes": traced, "more_objects": more,
        "resident_mib": [round(m.resident_bytes / (1 << 20), 1) for m in memory],
    }  # fmt: skip


def main(arguments: Sequence[str] | None = None) -> int:
    options = parse("engine_soak", __doc__, arguments)
    return finish(measure(options), options)


if __name__ == "__main__":
    run(main)
