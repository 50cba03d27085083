"""One team run as a section of the page."""

from collections.abc import Sequence

from teams.report.markup import Html, join, tag
from teams.report.model import SegmentRow, ShareRow, TeamReport, TurnRow
from teams.report.timeline import css_class, timeline
from teams.report.wording import bounded, one_line, percent, plural, seconds

_LEGEND = (
    "model.queue", "model.prefill", "model.transfer", "model.decode", "tool.run", "sandbox.create", "verify",
    "wait", "harness", "handoff", "untraced",
)  # fmt: skip


def team_section(team: TeamReport) -> Html:
    """Outcome, figures, timeline, attribution, path and transcript of one run."""
    return tag(
        "section",
        tag("div", tag("h2", team.task), *_badges(team), class_="head"),
        *_remarks(team),
        _tiles(team),
        tag("h3", "Timeline"),
        timeline(team),
        _legend(),
        tag("h3", "Where the time on the critical path went"),
        _stack(team.attribution.by_kind),
        tag(
            "div",
            _share_table("Kind", team.attribution.by_kind, coloured=True),
            _share_table("Agent", team.attribution.by_agent),
            _share_table("Phase", team.attribution.by_phase),
            class_="cols",
        ),
        _what_if(team),
        tag("h3", f"The critical path, {plural(len(team.segments), 'segment')}"),
        _segments(team.segments),
        _transcript(team),
    )


def badge(label: str, tone: str = "") -> Html:
    return tag("span", label, class_=f"badge {tone}".strip())


def tile(value: str, label: str) -> Html:
    return tag("div", tag("b", value), tag("span", label), class_="tile")


def table(headings: Sequence[tuple[str, bool]], rows: Sequence[Html], *, scroll: bool = False) -> Html:
    """A table; a heading is (label, whether its column holds numbers)."""
    head = tag("tr", *(tag("th", label, class_="num" if number else None) for label, number in headings))
    found = tag("table", tag("thead", head), tag("tbody", *rows))
    return tag("div", found, class_="scroll") if scroll else found


def number(value: str) -> Html:
    return tag("td", value, class_="num")


def _badges(team: TeamReport) -> list[Html]:
    badges = [badge("solved", "good") if team.solved else badge("not solved", "bad")]
    if team.replay:
        badges.append(badge("replay of a recording"))
    if team.diverged:
        badges.append(badge("diverged", "warn"))
    return badges


def _remarks(team: TeamReport) -> list[Html]:
    remarks: list[Html] = []
    if team.verdict:
        remarks.append(tag("p", f"Hidden tests: {team.verdict}", class_="sub"))
    if team.replay:
        replay = (
            "The model's outputs come from a recording and were forced through the live engine. "
            "Tools and tests ran for real."
        )
        remarks.append(tag("p", replay, class_="sub"))
    if team.diverged:
        remarks.append(tag("p", f"Real output left the recording: {team.divergence}"))
    remarks += [tag("p", f"Left out of the analysis: {problem}", class_="note") for problem in team.problems]
    return remarks


def _tiles(team: TeamReport) -> Html:
    found = team.figures
    return tag(
        "div",
        tile(seconds(team.makespan_s), "makespan"),
        tile(seconds(team.critical_path_s), "critical path"),
        tile(f"{len(team.agents_on_path)} of {len(team.agents)}", "agents on the path"),
        tile(f"{found.parallelism:.2f}", "parallelism in the work"),
        tile(f"{found.average_concurrency:.2f} / {found.peak_concurrency}", "concurrency, mean / peak"),
        tile(f"{found.critical_steps} of {found.steps}", "critical model calls"),
        tile(percent(team.attribution.coordination_share), "coordination"),
        tile(percent(team.attribution.harness_gap_share), "harness gaps"),
        tile(percent(team.attribution.untraced_share), "untraced"),
        tile(seconds(found.wasted_s), "wasted work"),
        class_="tiles",
    )


def _swatch(kind: str) -> Html:
    return tag("i", class_=f"swatch {css_class(kind)}")


def _legend() -> Html:
    marks = [tag("span", _swatch(kind), kind) for kind in _LEGEND]
    note = tag("span", "faint: off the path, fainter: nothing came of it")
    return tag("div", *marks, note, class_="legend")


def _stack(shares: Sequence[ShareRow]) -> Html:
    parts = [
        tag(
            "span",
            class_=css_class(share.key),
            style=f"width:{share.percent:.1f}%",
            title=f"{share.key} {share.percent:.1f}%",
        )
        for share in shares
    ]
    return tag("div", *parts, class_="stack")


def _share_table(title: str, shares: Sequence[ShareRow], *, coloured: bool = False) -> Html:
    rows = [
        tag(
            "tr",
            tag("td", _swatch(share.key) if coloured else Html(""), one_line(share.key, 40)),
            number(seconds(share.seconds)),
            number(f"{share.percent:.1f}%"),
        )
        for share in shares
    ]
    return table([(title, False), ("Time", True), ("Share", True)], rows)


def _what_if(team: TeamReport) -> Html:
    if not team.what_if:
        return Html("")
    rows = [
        tag(
            "tr",
            tag("td", row.change),
            number(seconds(row.makespan_s)),
            number(seconds(row.saved_s)),
            tag(
                "td",
                tag("span", class_="meter", style=_meter(row.saved_s, team.makespan_s)),
                style="width:40%",
            ),
        )
        for row in team.what_if
    ]
    headings = [("Change", False), ("Makespan", True), ("Saves", True), ("", False)]
    return join(tag("h3", "What would help, by recomputing the run"), table(headings, rows))


def _meter(part: float, whole: float) -> str:
    return f"width:{min(100.0, 100 * part / whole if whole > 0 else 0.0):.1f}%"


def _segments(segments: Sequence[SegmentRow]) -> Html:
    rows = [
        tag(
            "tr",
            number(str(position)),
            number(seconds(row.start_s)),
            number(seconds(row.duration_s)),
            tag("td", _swatch(row.kind), row.kind),
            tag("td", row.agent),
            tag("td", one_line(row.name, 120), class_="wide"),
            tag("td", row.reached_by or ""),
        )
        for position, row in enumerate(segments, start=1)
    ]
    headings = [
        ("#", True), ("From", True), ("For", True), ("Kind", False), ("Agent", False), ("What", False),
        ("Reached by", False),
    ]  # fmt: skip
    return table(headings, rows, scroll=True)


def _transcript(team: TeamReport) -> Html:
    if not team.transcript:
        return Html("")
    by_agent: dict[str, list[TurnRow]] = {agent: [] for agent in team.agents}
    for turn in team.transcript:
        by_agent.setdefault(turn.agent, []).append(turn)
    agents = [_agent_turns(agent, turns) for agent, turns in by_agent.items() if turns]
    return join(tag("h3", "Transcript"), *agents)


def _agent_turns(agent: str, turns: Sequence[TurnRow]) -> Html:
    tokens = sum(turn.completion_tokens for turn in turns)
    facts = tag("span", f"{plural(len(turns), 'turn')}, {tokens:,} tokens written", class_="sub")
    return tag("details", tag("summary", agent, facts), *(_turn(turn) for turn in turns))


def _turn(turn: TurnRow) -> Html:
    facts = (
        f"{seconds(turn.end_s - turn.start_s)}, {turn.prompt_tokens:,} → {turn.completion_tokens:,} tokens"
    )
    summary = tag(
        "summary",
        f"Turn {turn.number}{f' · {turn.action}' if turn.action else ''}",
        tag("span", facts, class_="sub"),
    )
    observed = tag("pre", bounded(turn.observation), class_="tool") if turn.observation else Html("")
    return tag("details", summary, tag("pre", bounded(turn.text)), observed)
