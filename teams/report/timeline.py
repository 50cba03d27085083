"""The timeline of a team run as SVG: a lane for each agent, the critical path drawn through them."""

from collections.abc import Sequence
from dataclasses import dataclass

from teams.report.markup import Html, join, tag
from teams.report.model import EdgeRow, IntervalRow, SegmentRow, TeamReport
from teams.report.wording import one_line, seconds

MAX_INTERVALS = 4_000
"""More than these make a page slow; the longest and those on the path are drawn, and the page says so."""
_WIDTH = 1200.0
_LEFT = 116.0
_TOP = 30.0
_BAR = 20.0
_LANE_GAP = 20.0
_RIBBON = 14.0


@dataclass(frozen=True, slots=True)
class _Scale:
    """Seconds to horizontal positions."""

    makespan_s: float

    def x(self, time_s: float) -> float:
        share = min(1.0, max(0.0, time_s / self.makespan_s)) if self.makespan_s > 0 else 0.0
        return _LEFT + share * (_WIDTH - _LEFT - 12)


@dataclass(frozen=True, slots=True)
class _Lanes:
    """Where each interval and each agent lies."""

    row_y: dict[str, float]  # interval id -> top of its bar
    agent_y: dict[str, float]
    height: float


def timeline(team: TeamReport) -> Html:
    """The whole drawing. Hovering shows an interval's name, times, slack and attributes."""
    scale = _Scale(team.makespan_s)
    drawn = _drawn(team.intervals)
    lanes = _lay_out(team.agents, drawn, team.makespan_s)
    by_id = {row.id: row for row in drawn}
    edges = [e for e in team.edges if e.source in by_id and e.target in by_id]
    note = (
        tag("p", f"{len(team.intervals) - len(drawn)} short intervals are not drawn.", class_="note")
        if len(drawn) < len(team.intervals)
        else Html("")
    )
    return join(
        tag(
            "div",
            tag(
                "svg",
                _grid(scale, lanes),
                _ribbon(team.segments, scale),
                *(_lane_label(agent, y) for agent, y in lanes.agent_y.items()),
                *(_bar(row, scale, lanes) for row in drawn),
                *(_edge(e, by_id, scale, lanes) for e in sorted(edges, key=lambda e: e.on_path)),
                *(_path_mark(s, scale, lanes) for s in team.segments),
                viewBox=f"0 0 {_WIDTH:.0f} {lanes.height:.0f}",
                role="img",
                aria_label=f"Timeline of {len(team.agents)} agents over {seconds(team.makespan_s)}",
            ),
            class_="timeline",
        ),
        note,
    )


def _drawn(rows: Sequence[IntervalRow]) -> Sequence[IntervalRow]:
    if len(rows) <= MAX_INTERVALS:
        return rows
    first = sorted(rows, key=lambda row: (not row.on_path, row.start_s - row.end_s))[:MAX_INTERVALS]
    return sorted(first, key=lambda row: row.start_s)


def _lay_out(agents: Sequence[str], rows: Sequence[IntervalRow], makespan_s: float) -> _Lanes:
    """Agents from top to bottom; what one agent did at the same time lies in rows of its lane."""
    row_y: dict[str, float] = {}
    agent_y: dict[str, float] = {}
    y = _TOP + _RIBBON + _LANE_GAP
    for agent in agents:
        agent_y[agent] = y
        free_from: list[float] = []  # for each row of the lane
        for row in (row for row in rows if row.agent == agent):
            fits = (n for n, free in enumerate(free_from) if row.start_s >= free - makespan_s / 2000)
            number = next(fits, len(free_from))
            free_from[number : number + 1] = [row.end_s]
            row_y[row.id] = y + number * (_BAR + 3)
        y += max(1, len(free_from)) * (_BAR + 3) + _LANE_GAP
    return _Lanes(row_y, agent_y, y)


def _grid(scale: _Scale, lanes: _Lanes) -> Html:
    step = _tick_s(scale.makespan_s)
    count = int(scale.makespan_s / step) + 1 if step else 1
    ticks: list[Html] = []
    for number in range(count):
        x = scale.x(number * step)
        ticks.append(tag("line", x1=x, x2=x, y1=_TOP - 8, y2=lanes.height - 8, class_="grid"))
        ticks.append(tag("text", _tick(number * step), x=x, y=_TOP - 13, class_="tick"))
    return join(*ticks)


def _tick_s(makespan_s: float) -> float:
    """A round step that gives five to twelve ticks."""
    if makespan_s <= 0:
        return 0.0
    step = 1e-9
    for _ in range(20):
        for factor in (1, 2, 5):
            if makespan_s / (step * factor) <= 12:
                return step * factor
        step *= 10
    return makespan_s


def _tick(time_s: float) -> str:
    return f"{time_s:g} s" if time_s >= 1 or time_s == 0 else f"{time_s * 1000:g} ms"


def _ribbon(segments: Sequence[SegmentRow], scale: _Scale) -> Html:
    """The critical path in one bar: every nanosecond of the makespan has its colour."""
    bars = [
        tag(
            "rect",
            tag("title", _segment_title(segment)),
            x=scale.x(segment.start_s),
            y=_TOP,
            width=max(0.6, scale.x(segment.end_s) - scale.x(segment.start_s)),
            height=_RIBBON,
            class_=f"bar {css_class(segment.kind)}",
        )
        for segment in segments
    ]
    return join(tag("text", "critical path", x=_LEFT - 10, y=_TOP + 11, class_="lane strong"), *bars)


def _lane_label(agent: str, y: float) -> Html:
    return tag("text", tag("title", agent), one_line(agent, 15), x=_LEFT - 10, y=y + 14, class_="lane")


def _bar(row: IntervalRow, scale: _Scale, lanes: _Lanes) -> Html:
    state = "on" if row.on_path else "wasted" if row.wasted else "off"
    return tag(
        "rect",
        tag("title", _interval_title(row)),
        x=scale.x(row.start_s),
        y=lanes.row_y[row.id],
        width=max(0.8, scale.x(row.end_s) - scale.x(row.start_s)),
        height=_BAR,
        rx=2,
        class_=f"bar {css_class(row.kind)} {state}",
    )


def _path_mark(segment: SegmentRow, scale: _Scale, lanes: _Lanes) -> Html:
    """A line under the part of the lane that the path runs through; dashed where nothing is known."""
    y = lanes.row_y.get(segment.interval, lanes.agent_y[segment.agent]) + _BAR + 4
    dashed = "dashed" if segment.kind in ("handoff", "untraced") or not segment.interval else ""
    return tag(
        "line",
        tag("title", _segment_title(segment)),
        x1=scale.x(segment.start_s),
        x2=max(scale.x(segment.end_s), scale.x(segment.start_s) + 0.8),
        y1=y,
        y2=y,
        class_=f"path {dashed}",
    )


def _edge(edge: EdgeRow, by_id: dict[str, IntervalRow], scale: _Scale, lanes: _Lanes) -> Html:
    """From where the source was left to where the target went on."""
    source, target = by_id[edge.source], by_id[edge.target]
    arrives_s = min(max(source.end_s, target.start_s), target.end_s)
    leaves_s = min(source.end_s, arrives_s)
    x1, x2 = scale.x(leaves_s), scale.x(arrives_s)
    y1, y2 = lanes.row_y[source.id] + _BAR / 2, lanes.row_y[target.id] + _BAR / 2
    down = 1 if y2 >= y1 else -1
    y1, y2 = y1 + down * _BAR / 2, y2 - down * _BAR / 2
    middle = (y1 + y2) / 2
    return tag(
        "g",
        tag("title", f"{edge.kind}: {source.agent} → {target.agent} at {seconds(arrives_s)}"),
        tag("path", d=f"M{x1:.1f} {y1:.1f}C{x1:.1f} {middle:.1f} {x2:.1f} {middle:.1f} {x2:.1f} {y2:.1f}"),
        tag("circle", cx=x2, cy=y2, r=2.5),
        class_="edge on" if edge.on_path else "edge",
    )


def css_class(kind: str) -> str:
    """The class that gives a kind its colour; kinds are a closed set, so nothing hostile gets in."""
    return "k-" + kind.replace(".", "-")


def _segment_title(segment: SegmentRow) -> str:
    return (
        f"{segment.kind} {segment.name} · {segment.agent}\n"
        f"{seconds(segment.duration_s)} from {seconds(segment.start_s)}"
    )


def _interval_title(row: IntervalRow) -> str:
    state = "on the critical path" if row.on_path else f"slack {seconds(row.slack_s)}"
    lines = [
        f"{row.kind} {one_line(row.name, 80)} · {row.agent}",
        f"{seconds(row.end_s - row.start_s)} from {seconds(row.start_s)}, {state}",
    ]
    lines += ["nothing came of it"] if row.wasted else []
    lines += [f"{key}: {one_line(str(value), 80)}" for key, value in row.attributes.items()]
    return "\n".join(lines)
