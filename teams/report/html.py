"""The report as one HTML file: no script, no font, no image and no request to anywhere."""

from teams.report.html_team import badge, number, table, team_section, tile
from teams.report.markup import Html, join, tag
from teams.report.model import HumanEvalReport, PassRatesRow, ProblemRow, RunReport
from teams.report.style import STYLE
from teams.report.wording import one_line, percent, plural, rate

# Belt and braces: even if markup slipped through, the browser runs no script and loads nothing.
_POLICY = "default-src 'none'; style-src 'unsafe-inline'; base-uri 'none'; form-action 'none'"


def render_html(report: RunReport) -> str:
    """The whole document. Text of models and tools is escaped, and its hidden characters are shown."""
    head = tag(
        "head",
        tag("meta", charset="utf-8"),
        tag("meta", http_equiv="Content-Security-Policy", content=_POLICY),
        tag("meta", name="viewport", content="width=device-width,initial-scale=1"),
        tag("title", report.title),
        tag("style", Html(STYLE)),
    )
    main = tag(
        "main",
        tag("h1", report.title),
        tag("p", f"{report.created_at:%Y-%m-%d %H:%M:%S %Z} · model {report.model}", class_="sub"),
        _summary(report),
        _workers(report),
        _humaneval(report.humaneval) if report.humaneval else Html(""),
        *(team_section(team) for team in report.teams),
        _environment(report),
    )
    return "<!doctype html>\n" + tag("html", head, tag("body", main), lang="en").markup + "\n"


def _summary(report: RunReport) -> Html:
    tiles: list[Html] = []
    if report.humaneval:
        tiles.append(tile(percent(report.humaneval.pass_at_1), "HumanEval pass@1, of planned"))
    if report.teams:
        solved = sum(team.solved for team in report.teams)
        tiles.append(tile(f"{solved} of {len(report.teams)}", "team runs solved"))
        tiles.append(tile(str(sum(len(team.agents) for team in report.teams)), "agents"))
    if report.workers:
        tiles.append(tile(str(len(report.workers)), "model workers"))
    return tag("div", *tiles, class_="tiles")


def _workers(report: RunReport) -> Html:
    if not report.workers:
        return Html("")
    rows = [
        tag(
            "tr",
            tag("td", worker.role),
            number(str(worker.pid)),
            tag("td", worker.model or report.model),
            tag("td", worker.detail, class_="wide"),
        )
        for worker in report.workers
    ]
    headings = [("Role", False), ("Process", True), ("Model", False), ("", False)]
    return tag("section", tag("h2", "Workers"), table(headings, rows))


def _humaneval(found: HumanEvalReport) -> Html:
    ks = sorted(set(found.of_planned.pass_at) | set(found.of_scored.pass_at))
    facts = (
        f"{plural(found.problems, 'problem')}, {plural(found.attempts, 'attempt')} each: "
        f"{found.passed} attempts passed, {plural(found.solved, 'problem')} solved at least once."
    )
    scores = table(
        [("Denominator", False), *((f"pass@{k}", True) for k in ks), ("Passed", True), ("Attempts", True)],
        [
            _scores("planned: what could not be scored counts as failed", found.of_planned, ks),
            _scores("scored: only what the model answers for", found.of_scored, ks),
        ],
    )
    verdicts = ", ".join(f"{name} {count}" for name, count in sorted(found.verdicts.items()))
    return tag(
        "section",
        tag("div", tag("h2", "HumanEval"), badge(found.model), class_="head"),
        tag("p", facts, class_="sub"),
        scores,
        tag("p", f"Verdicts: {verdicts}", class_="note") if verdicts else Html(""),
        _problems(found) if found.rows else Html(""),
    )


def _scores(name: str, rates: PassRatesRow, ks: list[int]) -> Html:
    return tag(
        "tr",
        tag("td", name),
        *(number(rate(rates.pass_at.get(k))) for k in ks),
        number(str(rates.passed)),
        number(str(rates.attempts)),
    )


def _problems(found: HumanEvalReport) -> Html:
    headings = [
        ("Problem", False),
        ("Passed", True),
        ("Scored", True),
        ("Planned", True),
        ("Verdicts", False),
    ]
    rows = [_problem(row) for row in found.rows]
    return join(tag("h3", "Problems"), table(headings, rows, scroll=True))


def _problem(row: ProblemRow) -> Html:
    return tag(
        "tr",
        tag("td", row.task_id),
        number(str(row.passed)),
        number(str(row.scored)),
        number(str(row.planned)),
        tag("td", *_verdicts(row), class_="wide"),
    )


def _verdicts(row: ProblemRow) -> list[Html]:
    """A badge for each attempt; hovering tells why."""
    details = [*row.details, *[""] * (len(row.verdicts) - len(row.details))]
    return [
        join(tag("span", verdict or "not reached", class_=_tone(verdict), title=one_line(detail, 300)), " ")
        for verdict, detail in zip(row.verdicts, details, strict=False)
    ]


def _tone(verdict: str | None) -> str:
    if verdict == "passed":
        return "badge good"
    return "badge bad" if verdict == "failed" else "badge warn"


def _environment(report: RunReport) -> Html:
    if not report.environment:
        return Html("")
    rows = [
        tag("tr", tag("td", name), tag("td", value, class_="wide"))
        for name, value in report.environment.items()
    ]
    return tag("section", tag("h2", "Environment"), table([("", False), ("", False)], rows))
