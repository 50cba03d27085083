"""Where the time of a critical path went: by kind, by agent and by phase."""

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from teams.critical_path import NS_PER_S, Path, SegmentKind

PHASES: Mapping[SegmentKind, str] = {
    "model.queue": "model",
    "model.prefill": "model",
    "model.transfer": "model",
    "model.decode": "model",
    "tool.queue": "tool",
    "tool.run": "tool",
    "sandbox.create": "sandbox",
    "verify": "verify",
    "harness": "harness",
    "wait": "coordination",
    "handoff": "coordination",
    "untraced": "untraced",
}


@dataclass(frozen=True, slots=True)
class Share:
    """A part of the path. The `duration_ns` of a table sum to the makespan, its `percent` to 100.0."""

    key: str
    duration_ns: int
    percent: float  # in tenths, rounded so that the table sums to 100.0

    @property
    def seconds(self) -> float:
        return self.duration_ns / NS_PER_S


@dataclass(frozen=True, slots=True)
class Attribution:
    """Three tables over the same time, each with its largest share first."""

    by_kind: tuple[Share, ...]
    by_agent: tuple[Share, ...]
    by_phase: tuple[Share, ...]
    untraced_share: float  # of the makespan, 0..1
    harness_share: float  # harness work and gaps
    harness_gap_share: float  # gaps alone: time of an agent in which nothing was recorded
    coordination_share: float  # handoffs and waits: what working as a team cost on the path


def attribute(path: Path) -> Attribution:
    """Charge every segment of the path to its kind, its agent and its phase."""
    by_kind: defaultdict[str, int] = defaultdict(int)
    by_agent: defaultdict[str, int] = defaultdict(int)
    by_phase: defaultdict[str, int] = defaultdict(int)
    gap_ns = 0
    for segment in path.segments:
        by_kind[segment.kind] += segment.duration_ns
        by_agent[segment.agent] += segment.duration_ns
        by_phase[PHASES[segment.kind]] += segment.duration_ns
        gap_ns += segment.duration_ns if segment.is_harness_gap else 0
    total_ns = path.makespan_ns or 1
    return Attribution(
        by_kind=_shares(by_kind),
        by_agent=_shares(by_agent),
        by_phase=_shares(by_phase),
        untraced_share=by_kind["untraced"] / total_ns,
        harness_share=by_kind["harness"] / total_ns,
        harness_gap_share=gap_ns / total_ns,
        coordination_share=by_phase["coordination"] / total_ns,
    )


def _shares(durations: Mapping[str, int]) -> tuple[Share, ...]:
    ordered = sorted(((key, ns) for key, ns in durations.items() if ns), key=lambda item: (-item[1], item[0]))
    tenths = _tenths([ns for _, ns in ordered])
    return tuple(Share(key, ns, tenth / 10) for (key, ns), tenth in zip(ordered, tenths, strict=True))


def _tenths(parts: Sequence[int]) -> list[int]:
    """The parts in tenths of a percent, by largest remainder, so that they sum to 1,000."""
    total = sum(parts)
    if total == 0:
        return [0] * len(parts)
    tenths = [1000 * part // total for part in parts]
    by_remainder = sorted(range(len(parts)), key=lambda i: (-(1000 * parts[i] % total), i))
    for index in by_remainder[: 1000 - sum(tenths)]:
        tenths[index] += 1
    return tenths
