"""What Dockyard adds on top of the model and the tools.

`python -m bench.demo_overhead --json [--quick]`. The value is the share of a replayed team run's critical
path that is neither model, tool, sandbox nor waiting for those: the harness, gaps in which nothing was
recorded, hand-overs between agents, time without a trace. Beside it the parts that one can time alone:

- the gateway: a client's latency minus the engine's own timeline of the same request;
- a sandbox: creation with a workspace of one file, a command that does nothing, the end;
- the KV hand-off from prefill to decode worker, as its own time and per 1,000 tokens.

No other product has all of these planes, so there is no peer. `--quick` replays a short team, whose calls are
so small that the overhead weighs most; the full form replays the shipped recording too, and times more.
"""

import asyncio
import math
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import asdict, dataclass
from statistics import median
from typing import Any

import httpx

from bench import common, neighbours, short_team
from bench.model_calls import Call, call
from bench.team_replays import Replay, ReplayStack, replay_stack, whole_recording
from bench.team_report import PACKAGES, Finding, report
from cluster.config import load_config
from teams.attribution import Attribution
from teams.workspace import AgentSandbox, Tree

MAX_SHARE = 0.05
OVERHEAD = ("harness", "handoff", "wait", "untraced")
PROMPT_WORDS = 900


@dataclass(frozen=True, slots=True)
class Quantiles:
    """Of a sample, by nearest rank; milliseconds."""

    p50_ms: float
    p99_ms: float
    samples: int


@dataclass(frozen=True, slots=True)
class Share:
    """Where the critical path of one replay went, in shares (0..1) of the makespan."""

    makespan_s: float
    overhead: float
    harness_gaps: float
    untraced: float
    by_kind: dict[str, float]


def quantiles(values_ms: Sequence[float]) -> Quantiles:
    """The value at or below which 50% and 99% lie. There must be one at least."""
    ordered = sorted(values_ms)

    def at(q: float) -> float:
        return ordered[max(math.ceil(q * len(ordered)) - 1, 0)]

    return Quantiles(at(0.50), at(0.99), len(ordered))


def share_of(makespan_s: float, found: Attribution) -> Share:
    """The overhead in an attribution, and everything beside it."""
    by_kind = {each.key: each.seconds / makespan_s for each in found.by_kind}
    return Share(
        makespan_s=makespan_s,
        overhead=sum(by_kind.get(kind, 0.0) for kind in OVERHEAD),
        harness_gaps=found.harness_gap_share,
        untraced=found.untraced_share,
        by_kind=by_kind,
    )


async def calls(stack: ReplayStack, words: int, count: int) -> list[Call]:
    """The same request again and again on one connection, after one that is not counted."""
    async with httpx.AsyncClient(base_url=stack.url, timeout=300.0) as http:
        return [await call(http, "on " * words, 4) for _ in range(count + 1)][1:]


async def timed(work: Callable[[], Awaitable[object]], into: list[float]) -> None:
    """Notes how many milliseconds it took."""
    start_s = time.perf_counter()
    await work()
    into.append((time.perf_counter() - start_s) * 1e3)


async def sandboxes(stack: ReplayStack, count: int, commands: int) -> dict[str, Quantiles]:
    """Creation, commands and the end of sandboxes, one after the other."""
    boxes, create, execute, end = stack.bench.boxes(), list[float](), list[float](), list[float]()
    tree = Tree({"a.txt": b"a\n"})
    for number in range(count):
        made: list[AgentSandbox] = []

        async def make(name: str = f"overhead.{number}", made: list[AgentSandbox] = made) -> None:
            made.append(await boxes(name, tree))

        await timed(make, create)
        try:
            for _ in range(commands):
                await timed(lambda box=made[0]: box.run("true", timeout_s=30.0), execute)
        finally:
            await timed(made[0].kill, end)
    return {"create": quantiles(create), "exec": quantiles(execute), "kill": quantiles(end)}


async def team(stack: ReplayStack, quick: bool) -> dict[str, list[Share]]:
    """Replays of the short team, and of the shipped recording in the full form."""

    def share(replay: Replay) -> Share:
        return share_of(replay.makespan_s, replay.dag.attribution())

    recording, num = short_team.short_recording(), 2 if quick else 5
    short = [
        share(await stack.replay(recording, f"overhead-short-{n}", hidden_tests=False)) for n in range(num)
    ]
    if quick:
        return {"short": short}
    whole = [share(await stack.replay(whole_recording(), f"overhead-whole-{n}")) for n in range(2)]
    return {"short": short, "whole": whole}


async def bench(quick: bool) -> dict[str, Any]:
    """Everything that is measured, and the share of the machine that others used meanwhile."""
    async with replay_stack(load_config()) as stack:
        before = neighbours.sample()
        shares = await team(stack, quick)
        small = await calls(stack, 8, 50 if quick else 300)
        large = await calls(stack, PROMPT_WORDS, 5 if quick else 30)
        boxes = await sandboxes(stack, *((10, 5) if quick else (50, 10)))
        others = neighbours.share(before, neighbours.sample())
    overhead = {name: median(share.overhead for share in found) for name, found in shares.items()}
    per_1k = [call.transfer_ms / call.prompt_tokens * 1e3 for call in large]
    return {
        "overhead": overhead,
        "team": {name: [asdict(share) for share in found] for name, found in shares.items()},
        "gateway": asdict(quantiles([call.latency_ms - call.engine_ms for call in small])),
        "sandbox": {name: asdict(found) for name, found in boxes.items()},
        "handoff": asdict(quantiles([call.transfer_ms for call in small])),
        "handoff_per_1k_tokens": asdict(quantiles(per_1k)) | {"prompt_tokens": large[0].prompt_tokens},
        "others": others,
    }


def main(arguments: Sequence[str]) -> int:
    options = common.parse("demo_overhead", __doc__, arguments)
    surroundings = common.Surroundings(PACKAGES)  # before there is load of our own
    found = asyncio.run(bench(options.quick))
    worst = max(found["overhead"].values())
    finding = Finding("demo_overhead", worst, "share of a team run's makespan", MAX_SHARE, worst <= MAX_SHARE)
    others = found.pop("others")
    said = {"quick": options.quick, **found}
    return common.finish(report(finding, surroundings, others, said), options)


if __name__ == "__main__":
    common.run(main)
