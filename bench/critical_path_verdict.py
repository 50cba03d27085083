"""What replays with a sleep or a slow worker must show, if the critical path tells the truth. Pure.

Runs come in rounds: a baseline, then its variants. A figure of a variant is compared with the baseline of its
own round, so that a machine which grows slower over minutes changes nothing; the verdict is about medians.

Two tenths of a second can be told only where runs repeat as well. A short team's do. A shipped recording is
twenty seconds of model calls, which repeat to some percent: of its sleeps the growth of all but the path's
model calls is judged, and the makespan's is said beside it.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median
from typing import Literal

Growth = Literal["makespan", "apart_from_model"]
"""What a sleep is judged by: the run's length, or that less the model calls on its path."""

SLEEP_S = 2.0
SLEEP_TOLERANCE_S = 0.2
MIN_SLACK_S = 3.0
WHAT_IF_TOLERANCE = 0.10
MAX_UNTRACED = 0.01
MAX_GAPS = 0.05
MAX_LENGTH_ERROR_S = 0.001


@dataclass(frozen=True, slots=True)
class Figures:
    """One run. Seconds, and shares (0..1) of the makespan."""

    makespan_s: float
    wall_s: float  # by a stopwatch outside of the events
    length_error_s: float  # critical path against makespan
    untraced: float
    gaps: float
    model_s: float  # of the path, in model calls
    path_tool_s: float  # of the path, charged to the tool that lies on it
    slack_tool_s: float  # of the path, charged to the tool that has slack
    slack_s: float  # of that tool
    what_if_slow_s: float  # the makespan foretold for slow decoding
    what_if_path_s: float  # the makespan foretold for the sleep in the tool on the path
    what_if_slack_s: float  # the makespan foretold for the sleep in the tool with slack
    others: float  # share of the machine that processes of others used meanwhile
    diverged: bool

    @property
    def unattributed(self) -> float:
        """Share of the stopwatch's time that no segment of the path explains."""
        return (self.wall_s - self.makespan_s * (1.0 - self.untraced)) / self.wall_s

    @property
    def is_sound(self) -> bool:
        """Holds in every run, whatever was slowed."""
        return (
            self.length_error_s <= MAX_LENGTH_ERROR_S
            and self.unattributed <= MAX_UNTRACED
            and self.gaps <= MAX_GAPS
            and not self.diverged
        )


@dataclass(frozen=True, slots=True)
class Round:
    """A baseline and the variants that ran next to it; None where time ran out."""

    baseline: Figures
    on_path: Figures | None = None
    in_slack: Figures | None = None
    slow_decode: Figures | None = None


@dataclass(frozen=True, slots=True)
class Part:
    """One claim: what was found against what it should be."""

    name: str
    met: bool
    found: dict[str, float]
    each: tuple[float, ...]  # of every round
    target: str


def verdict(rounds: Sequence[Round], growth: Growth = "makespan") -> tuple[Part, ...]:
    """The claims, judged. Each variant must have run at least once."""
    return (_on_path(rounds, growth), _in_slack(rounds, growth), _slow_decode(rounds), _sound(rounds))


def baseline_spread_s(rounds: Sequence[Round]) -> float:
    """Slowest minus fastest baseline: differences below this say little."""
    makespans = [each.baseline.makespan_s for each in rounds]
    return max(makespans) - min(makespans)


def runs_of(rounds: Sequence[Round]) -> list[Figures]:
    """Every run that took place."""
    return [
        run
        for each in rounds
        for run in (each.baseline, each.on_path, each.in_slack, each.slow_decode)
        if run is not None
    ]


def _on_path(rounds: Sequence[Round], growth: Growth) -> Part:
    pairs = [(each.baseline, each.on_path) for each in rounds if each.on_path is not None]
    grows = _growth_s(pairs)
    judged_s = grows[growth]
    charged = median(slowed.path_tool_s - base.path_tool_s for base, slowed in pairs)
    return Part(
        "sleep in a tool on the path",
        abs(median(judged_s) - SLEEP_S) <= SLEEP_TOLERANCE_S and abs(charged - SLEEP_S) <= SLEEP_TOLERANCE_S,
        {
            **_medians(grows),
            "charged_to_it_s": charged,
            "what_if_s": median(base.what_if_path_s - base.makespan_s for base, _ in pairs),
        },
        judged_s,
        f"{_NAMES[growth]} grows by {SLEEP_S:g} ± {SLEEP_TOLERANCE_S:g} s, charged to that tool",
    )


def _in_slack(rounds: Sequence[Round], growth: Growth) -> Part:
    pairs = [(each.baseline, each.in_slack) for each in rounds if each.in_slack is not None]
    grows = _growth_s(pairs)
    judged_s = grows[growth]
    slack = min(base.slack_s for base, _ in pairs)
    charged = max(slowed.slack_tool_s for _, slowed in pairs)
    return Part(
        "sleep in a tool with slack",
        abs(median(judged_s)) <= SLEEP_TOLERANCE_S and slack >= MIN_SLACK_S and charged == 0.0,
        {
            **_medians(grows),
            "slack_s": slack,
            "charged_to_it_s": charged,
            "what_if_s": median(base.what_if_slack_s - base.makespan_s for base, _ in pairs),
        },
        judged_s,
        f"with {MIN_SLACK_S:g} s of slack {_NAMES[growth]} stays within {SLEEP_TOLERANCE_S:g} s",
    )


_NAMES: dict[Growth, str] = {
    "makespan": "the makespan",
    "apart_from_model": "the makespan apart from the path's model calls",
}


def _growth_s(pairs: Sequence[tuple[Figures, Figures]]) -> dict[Growth, tuple[float, ...]]:
    """Seconds by which each slowed run is longer than its baseline."""
    makespan_s = tuple(slowed.makespan_s - base.makespan_s for base, slowed in pairs)
    model_s = (slowed.model_s - base.model_s for base, slowed in pairs)
    apart_s = tuple(whole - model for whole, model in zip(makespan_s, model_s, strict=True))
    return {"makespan": makespan_s, "apart_from_model": apart_s}


def _medians(grows: dict[Growth, tuple[float, ...]]) -> dict[str, float]:
    return {
        "makespan_grows_s": median(grows["makespan"]),
        "apart_from_model_s": median(grows["apart_from_model"]),
    }


def _slow_decode(rounds: Sequence[Round]) -> Part:
    pairs = [(each.baseline, each.slow_decode) for each in rounds if each.slow_decode is not None]
    errors = tuple(slowed.makespan_s / base.what_if_slow_s - 1.0 for base, slowed in pairs)
    return Part(
        "decoding at half speed",
        abs(median(errors)) <= WHAT_IF_TOLERANCE,
        {
            "what_if_s": median(base.what_if_slow_s for base, _ in pairs),
            "real_s": median(slowed.makespan_s for _, slowed in pairs),
            "error": median(errors),
        },
        errors,
        f"what-if and reality agree within {WHAT_IF_TOLERANCE:.0%}",
    )


def _sound(rounds: Sequence[Round]) -> Part:
    runs = runs_of(rounds)
    return Part(
        "every run",
        all(run.is_sound for run in runs),
        {
            "runs": len(runs),
            "unattributed": max(run.unattributed for run in runs),
            "untraced": max(run.untraced for run in runs),
            "harness_gaps": max(run.gaps for run in runs),
            "length_error_s": max(run.length_error_s for run in runs),
            "diverged": sum(run.diverged for run in runs),
        },
        tuple(run.gaps for run in runs),
        f"unattributed ≤ {MAX_UNTRACED:.0%}, harness gaps ≤ {MAX_GAPS:.0%}, path = makespan, none diverged",
    )
