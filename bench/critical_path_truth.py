"""The critical path can be wrong, and is shown not to be: slow something for real, and see if it said so.

`python -m bench.critical_path_truth --json [--quick]`. Real replays on the live stack: real prefill, hand-off
and decode, real sandboxes. In each round a baseline, then

- 2 s of sleep in a tool on the path: the makespan grows by 2 s, charged to that tool;
- the same sleep in a tool with at least 3 s of slack: the makespan stays;
- decoding at half speed: the makespan is what the baseline's what-if foretold.

`--quick` runs rounds of a short team (`bench.short_team`) for as long as two minutes allow. The full form
runs more of them, and rounds of the shipped recording with its hidden tests. The order within a round goes
back and forth. Two runs that are not counted come first: every prefix is then in the cache, and nothing
starts for the first time. Each worker computes on one thread, which leaves a core to tools and harness:
else each tool that runs beside a model call slows it, and the model's time repeats less well.
"""

import asyncio
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from statistics import mean, median
from typing import Any, Literal

from bench import common, neighbours, short_team
from bench.critical_path_verdict import (
    SLEEP_S,
    Figures,
    Growth,
    Part,
    Round,
    baseline_spread_s,
    runs_of,
    verdict,
)
from bench.half_speed import HALF, ROLE, HalfSpeed, measure_half_speed
from bench.team_counts import Counts, counts_of, recorded_counts
from bench.team_replays import Replay, ReplayStack, Tool, replay_stack, tool_of, whole_recording
from bench.team_report import PACKAGES, Finding, report
from cluster.config import load_config
from teams.harness.recording import Recording, with_digests
from teams.whatif import Add, Scale

Variant = Literal["baseline", "on_path", "in_slack", "slow_decode"]
VARIANTS: tuple[Variant, ...] = ("on_path", "in_slack", "slow_decode")

QUICK_S = 112.0  # of the two minutes; the rest is for ending the server
QUICK_ROUNDS, FULL_ROUNDS, WHOLE_ROUNDS = 2, 7, 3


@dataclass(frozen=True, slots=True)
class Team:
    """A recording and the tools of it that are slowed."""

    recording: Recording
    on_path: Tool
    in_slack: Tool
    sleeps: Mapping[Tool, float]  # in every run
    hidden_tests: bool
    has_digests: bool  # else those of the first run are what the others must repeat
    growth: Growth  # by which its sleeps are judged


@dataclass(frozen=True, slots=True)
class Measured:
    """The rounds of one team."""

    rounds: tuple[Round, ...]
    counts: Counts  # of the last baseline
    half_speed: HalfSpeed
    growth: Growth

    @property
    def parts(self) -> tuple[Part, ...]:
        return verdict(self.rounds, self.growth)

    @property
    def grows_s(self) -> float:
        """Seconds that the makespan grew by for the sleep on the path."""
        return self.parts[0].found["makespan_grows_s"]

    @property
    def others(self) -> float:
        """Mean share of the machine that others used while the runs lasted."""
        return mean(run.others for run in runs_of(self.rounds))


def short() -> Team:
    return Team(
        short_team.short_recording(), short_team.ON_PATH, short_team.IN_SLACK, short_team.SLEEPS,
        hidden_tests=False, has_digests=False, growth="makespan",
    )  # fmt: skip


def whole() -> Team:
    recording = whole_recording()
    return Team(
        recording, tool_of(recording, "mender", 11), tool_of(recording, "lead", 6), {},
        hidden_tests=True, has_digests=True, growth="apart_from_model",
    )  # fmt: skip


@dataclass(frozen=True, slots=True)
class Watched:
    """A replay, and the share of the machine that others used meanwhile."""

    replay: Replay
    others: float


class Deadline:
    """Seconds that may still be spent."""

    def __init__(self, start_s: float, limit_s: float | None) -> None:
        self._end_s = None if limit_s is None else start_s + limit_s

    def allows(self, seconds: float) -> bool:
        return self._end_s is None or time.monotonic() + seconds <= self._end_s


async def measure(stack: ReplayStack, team: Team, label: str, rounds: int, deadline: Deadline) -> Measured:
    """Uncounted runs, then the rounds: the first always whole, runs of later ones if they still fit."""
    first = await _run(stack, team, "baseline", f"{label}-first")
    if not team.has_digests:
        team = replace(team, recording=with_digests(team.recording, first.replay.outcome.result.transcript))
    await _run(stack, team, "baseline", f"{label}-second")
    half = await measure_half_speed(stack)
    common.progress(f"{label}: at half speed a token takes {half.ratio:.2f} times as long")
    done: list[Round] = []
    counts = counts_of(first.replay.dag)
    for number in range(rounds):
        found = dict[Variant, Watched]()
        for variant in ("baseline", *VARIANTS[:: 1 if number % 2 == 0 else -1]):
            if number == 0 or deadline.allows(_expected_s(variant, done[0])):
                found[variant] = await _run(stack, team, variant, f"{label}-{number}-{variant}")
        if "baseline" not in found:
            break
        counts = counts_of(found["baseline"].replay.dag)
        figures = {variant: _figures(run, team) for variant, run in found.items()}
        done.append(Round(figures["baseline"], *(figures.get(variant) for variant in VARIANTS)))
    return Measured(tuple(done), counts, half, team.growth)


def _expected_s(variant: Variant, known: Round) -> float:
    figures = known.baseline if variant == "baseline" else getattr(known, variant)
    return figures.wall_s * 1.1


async def _run(stack: ReplayStack, team: Team, variant: Variant, label: str) -> Watched:
    sleeps = dict(team.sleeps)
    if variant == "on_path":
        sleeps[team.on_path] = SLEEP_S
    elif variant == "in_slack":
        sleeps[team.in_slack] = SLEEP_S
    await stack.set_pace(ROLE, HALF if variant == "slow_decode" else 1.0)
    before = neighbours.sample()
    try:
        replay = await stack.replay(team.recording, label, sleeps, hidden_tests=team.hidden_tests)
    finally:
        await stack.set_pace(ROLE, 1.0)
    others = neighbours.share(before, neighbours.sample())
    common.progress(f"{label}: {replay.makespan_s:.2f} s, others used {others:.0%} of the machine")
    return Watched(replay, others)


def _figures(run: Watched, team: Team) -> Figures:
    replay = run.replay
    dag, attribution = replay.dag, replay.dag.attribution()
    path_tool, slack_tool = replay.interval(team.on_path), replay.interval(team.in_slack)
    return Figures(
        makespan_s=replay.makespan_s,
        wall_s=replay.wall_s,
        length_error_s=abs(dag.critical_path().length_s - replay.makespan_s),
        untraced=attribution.untraced_share,
        gaps=attribution.harness_gap_share,
        model_s=sum(share.seconds for share in attribution.by_phase if share.key == "model"),
        path_tool_s=replay.on_path_s(team.on_path),
        slack_tool_s=replay.on_path_s(team.in_slack),
        slack_s=replay.slack_s(team.in_slack),
        what_if_slow_s=dag.what_if(Scale(HALF, kind="model.decode")).makespan_s,
        what_if_path_s=dag.what_if(Add(path_tool.id, SLEEP_S)).makespan_s,
        what_if_slack_s=dag.what_if(Add(slack_tool.id, SLEEP_S)).makespan_s,
        others=run.others,
        diverged=replay.outcome.diverged is not None,
    )


async def bench(quick: bool, start_s: float) -> dict[str, Measured]:
    """The measurements, by the name of their recording."""
    config = load_config()
    one_thread = config.workers.model_copy(update={"threads": 1})
    async with replay_stack(config.model_copy(update={"workers": one_thread})) as stack:
        if quick:
            return {"short": await measure(stack, short(), "short", QUICK_ROUNDS, Deadline(start_s, QUICK_S))}
        unbounded = Deadline(start_s, None)
        return {
            "short": await measure(stack, short(), "short", FULL_ROUNDS, unbounded),
            "whole": await measure(stack, whole(), "whole", WHOLE_ROUNDS, unbounded),
        }


def detail(measured: Mapping[str, Measured]) -> dict[str, Any]:
    """Everything behind the verdict."""
    return {
        name: {
            "sleeps_judged_by": each.growth,
            "parts": [asdict(part) for part in each.parts],
            "baseline_s": median(r.baseline.makespan_s for r in each.rounds),
            "baseline_spread_s": baseline_spread_s(each.rounds),
            "counts": asdict(each.counts),
            "half_speed": asdict(each.half_speed),
            "recorded": asdict(recorded_counts(whole_recording())),
            "rounds": [asdict(r) for r in each.rounds],
        }
        for name, each in measured.items()
    }


def main(arguments: Sequence[str]) -> int:
    options = common.parse("critical_path_truth", __doc__, arguments)
    surroundings = common.Surroundings(PACKAGES)  # before there is load of our own
    measured = asyncio.run(bench(options.quick, time.monotonic()))
    claims = claims_of(measured)
    finding = Finding(
        name="critical_path_truth",
        value=measured["short"].grows_s,
        unit=f"s of makespan for {SLEEP_S:g} s of sleep on the path",
        target=SLEEP_S,
        met=all(claims.values()),
    )
    others = max(each.others for each in measured.values())
    said = {"quick": options.quick, "claims": claims, **detail(measured)}
    return common.finish(report(finding, surroundings, others, said), options)


def claims_of(measured: Mapping[str, Measured]) -> dict[str, bool]:
    """Every claim, by its name."""
    claims = {f"{name}: {part.name}": part.met for name, each in measured.items() for part in each.parts}
    claims["the recording is a team's"] = recorded_counts(whole_recording()).is_team
    if "whole" in measured:
        claims["its replay is a team's"] = measured["whole"].counts.is_team
    return claims


if __name__ == "__main__":
    common.run(main)
