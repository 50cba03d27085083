"""The report as plain text: at most 100 columns, no colours, safe for any terminal."""

from collections.abc import Sequence

from teams.report.model import (
    HumanEvalReport,
    IntervalRow,
    RunReport,
    SegmentRow,
    ShareRow,
    TeamReport,
)
from teams.report.wording import one_line, percent, plural, rate, seconds

WIDTH = 100
_LABEL = 14
_MARKS = {
    "model.queue": "q",
    "model.prefill": "P",
    "model.transfer": "X",
    "model.decode": "D",
    "tool.queue": "q",
    "tool.run": "T",
    "sandbox.create": "S",
    "verify": "V",
    "wait": ".",
    "harness": "h",
}


def render_text(report: RunReport) -> str:
    """The whole report, ending in a newline. Transcripts are left to the HTML report."""
    title = one_line(report.title, WIDTH)
    lines = [title, "=" * len(title)]
    lines += [f"{report.created_at:%Y-%m-%d %H:%M:%S %Z}   model {one_line(report.model, 60)}"]
    if report.workers:
        lines += _section("Workers")
        lines += [
            f"  {w.role:<8} pid {w.pid:<8} {one_line(f'{w.model}  {w.detail}', 70)}" for w in report.workers
        ]
    if report.humaneval:
        lines += _humaneval(report.humaneval)
    for team in report.teams:
        lines += _team(team)
    if report.environment:
        lines += _section("Environment")
        lines += [f"  {one_line(k, 20):<20} {one_line(v, 76)}" for k, v in report.environment.items()]
    return "\n".join(line.rstrip() for line in lines) + "\n"


def _section(title: str) -> list[str]:
    line = one_line(title, WIDTH)
    return ["", line, "-" * len(line)]


def _humaneval(found: HumanEvalReport) -> list[str]:
    ks = sorted(set(found.of_planned.pass_at) | set(found.of_scored.pass_at))
    lines = _section("HumanEval")
    lines.append(
        f"  {plural(found.problems, 'problem')} x {plural(found.attempts, 'attempt')}: "
        f"{found.passed} passed, {plural(found.solved, 'problem')} solved"
    )
    lines.append("  " + " " * 12 + "".join(f"{f'pass@{k}':>10}" for k in ks) + f"{'attempts':>12}")
    for name, rates in (("of planned", found.of_planned), ("of scored", found.of_scored)):
        scores = "".join(f"{rate(rates.pass_at.get(k)):>10}" for k in ks)
        lines.append(f"  {name:<12}{scores}{rates.attempts:>12}")
    lines += [""] if found.rows else []
    for row in found.rows:
        verdicts = ", ".join(verdict or "not reached" for verdict in row.verdicts)
        lines.append(
            f"  {one_line(row.task_id, 16):<16} {row.passed:>3} of {row.planned:<3} {one_line(verdicts, 70)}"
        )
    return lines


def _team(team: TeamReport) -> list[str]:
    found = team.attribution
    lines = _section(f"Team run{' [replay]' if team.replay else ''}: {team.task}")
    outcome = "solved" if team.solved else "not solved"
    lines.append(f"  {outcome}{f': {one_line(team.verdict, 80)}' if team.verdict else ''}")
    if team.diverged:
        lines.append(f"  DIVERGED from the recording: {one_line(team.divergence, 66)}")
    lines += [
        f"  makespan {seconds(team.makespan_s)}, critical path {seconds(team.critical_path_s)} "
        f"over {plural(len(team.agents_on_path), 'agent')} of {len(team.agents)}"
        f"{' by ' + ', '.join(team.edge_kinds_on_path) if team.edge_kinds_on_path else ''}",
        f"  untraced {percent(found.untraced_share)}, harness gaps {percent(found.harness_gap_share)}, "
        f"coordination {percent(found.coordination_share)}, parallelism {team.figures.parallelism:.2f}, "
        f"peak {team.figures.peak_concurrency}, wasted {seconds(team.figures.wasted_s)}",
        "",
    ]
    lines += _timeline(team)
    lines += ["", "  Where the time went"]
    lines += _side_by_side(_shares("kind", found.by_kind), _shares("agent", found.by_agent))
    lines += ["", "  The critical path", *_segments(team)]
    if team.what_if:
        lines += ["", "  What would help"]
        lines += [
            f"    {row.change:<34} {seconds(row.makespan_s):>9}   saves {seconds(row.saved_s)}"
            for row in team.what_if[:5]
        ]
    lines += [f"  left out: {one_line(problem, WIDTH - 12)}" for problem in team.problems]
    return lines


def _segments(team: TeamReport) -> list[str]:
    lines = [f"    {'from':>9} {'for':>9}  {'kind':<15} {'agent':<14} {'what':<28} reached by"]
    for run in _folded(team):
        first, duration_s = run[0], sum(row.duration_s for row in run)
        kind = first.kind if len(run) == 1 else plural(len(run), "short step")
        what = first.name if len(run) == 1 else ", ".join(dict.fromkeys(row.kind for row in run))
        reached_by = next((row.reached_by for row in run if row.reached_by), "")
        lines.append(
            f"    {seconds(first.start_s):>9} {seconds(duration_s):>9}  {kind:<15} "
            f"{one_line(first.agent, 14):<14} {one_line(what, 28):<28} {reached_by}"
        )
    return lines


def _folded(team: TeamReport) -> list[list[SegmentRow]]:
    """Segments as they follow each other; an agent's neighbours under 1% of the makespan share a line."""
    short_s = team.makespan_s / 100
    runs: list[list[SegmentRow]] = []
    for row in team.segments:
        last = runs[-1][-1] if runs else None
        if last and last.agent == row.agent and max(last.duration_s, row.duration_s) < short_s:
            runs[-1].append(row)
        else:
            runs.append([row])
    return runs


def _shares(title: str, rows: Sequence[ShareRow]) -> list[str]:
    lines = [f"{title:<16} {'time':>9} {'share':>7}"]
    return lines + [f"{one_line(r.key, 16):<16} {seconds(r.seconds):>9} {r.percent:>6.1f}%" for r in rows]


def _side_by_side(left: Sequence[str], right: Sequence[str]) -> list[str]:
    count = max(len(left), len(right))
    padded = [*left, *[""] * (count - len(left))], [*right, *[""] * (count - len(right))]
    return [f"    {a:<44}{b}" for a, b in zip(*padded, strict=True)]


def _timeline(team: TeamReport) -> list[str]:
    """A lane for each agent, and under it what of it lies on the critical path."""
    width = WIDTH - _LABEL - 4
    by_agent: dict[str, list[IntervalRow]] = {agent: [] for agent in team.agents}
    for row in team.intervals:
        by_agent[row.agent].append(row)
    lines: list[str] = []
    for agent, rows in by_agent.items():
        lane, path = _Lane(width, team.makespan_s), _Lane(width, team.makespan_s)
        for row in rows:
            lane.cover(row.start_s, row.end_s, _MARKS[row.kind])
        for segment in team.segments:
            if segment.agent == agent:
                path.cover(segment.start_s, segment.end_s, "=")
        lines += [f"  {one_line(agent, _LABEL):<{_LABEL}} {lane}", f"  {'':<{_LABEL}} {path}"]
    lines.append(f"  {'':<{_LABEL}} 0{seconds(team.makespan_s):>{width - 1}}")
    lines.append(
        "  P prefill  X transfer  D decode  T tool  S sandbox  V verify  h harness  q queue  . wait  = path"
    )
    return lines


class _Lane:
    """One line of characters over the makespan; each shows what covers most of its stretch of time."""

    def __init__(self, width: int, makespan_s: float) -> None:
        self._covered: list[dict[str, float]] = [{} for _ in range(width)]
        self._column_s = makespan_s / width

    def cover(self, start_s: float, end_s: float, mark: str) -> None:
        if self._column_s <= 0:
            return
        first = int(start_s / self._column_s)
        last = min(len(self._covered) - 1, int(end_s / self._column_s))
        for column in range(first, last + 1):
            begin_s = column * self._column_s
            inside_s = min(end_s, begin_s + self._column_s) - max(start_s, begin_s)
            if inside_s > 0:
                covered = self._covered[column]
                covered[mark] = covered.get(mark, 0.0) + inside_s

    def __str__(self) -> str:
        return "".join(max(marks, key=lambda mark: marks[mark]) if marks else " " for marks in self._covered)
