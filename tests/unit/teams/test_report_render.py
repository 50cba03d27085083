"""The report says what the run was, in both forms, and nothing that a model wrote can act on the reader."""

import re
from html.parser import HTMLParser

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from report_sample import HOSTILE, sample_report, sample_run, sample_team

from protocol.events import Edge, Interval
from teams.dag import Dag
from teams.events import EventLog
from teams.report import RunReport, render_html, render_text, team_report
from teams.report.markup import tag
from teams.report.timeline import MAX_INTERVALS, timeline
from teams.report.wording import bounded, one_line, seconds, visible

ALLOWED_TAGS = {
    "html", "head", "meta", "title", "style", "body", "main", "section", "h1", "h2", "h3", "p", "div", "span",
    "b", "i", "table", "thead", "tbody", "tr", "th", "td", "details", "summary", "pre", "svg", "g", "rect",
    "line", "text", "path", "circle",
}  # fmt: skip
HIDDEN = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u202a-\u202e\u2066-\u2069]")


class Page(HTMLParser):
    """Checks that elements nest, and gathers their names, attributes and text."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.tags: list[str] = []
        self.attributes: list[tuple[str, str | None]] = []
        self.text = ""
        self.open: list[str] = []
        self.feed(page)
        self.close()
        assert self.open == []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.attributes += attrs
        if tag not in ("meta", "br", "hr"):
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.text += data


@pytest.fixture(scope="module")
def report() -> RunReport:
    return sample_report()


@pytest.fixture(scope="module")
def page(report: RunReport) -> Page:
    return Page(render_html(report))


def test_the_page_has_no_element_and_no_attribute_that_could_act(page: Page):
    assert set(page.tags) <= ALLOWED_TAGS
    names = {name for name, _ in page.attributes}
    assert not {name for name in names if name.startswith("on")} | names & {"href", "src", "srcset", "action"}
    assert page.text.count("<script>alert(1)</script>") > 10  # shown as text


def test_the_page_asks_the_network_for_nothing(report: RunReport):
    html = render_html(report)
    style = html[html.index("<style>") : html.index("</style>")]
    assert "url(" not in style
    assert "@import" not in style
    assert "@font-face" not in style
    assert "default-src &#x27;none&#x27;" in html
    assert not re.search(r"https?://", html)


def test_nothing_hidden_reaches_page_or_terminal(report: RunReport):
    for rendered in (render_html(report), render_text(report)):
        assert not HIDDEN.search(rendered)
        rendered.encode("utf-8")


def test_the_page_tells_the_run(page: Page, report: RunReport):
    for expected in (
        "replay of a recording", "diverged", "solved", "not solved", "4211", "4212", "pass@4", "27.8%",
        "HumanEval/1", "not reached", "tool.run", "critical path", "makespan", "Transcript", "reproducer",
        "hidden tests", "Environment", "3.11.7", "tool.run in half the time",
    ):  # fmt: skip
        assert expected in page.text, expected
    classes = [value for name, value in page.attributes if name == "class"]
    assert "edge on" in classes
    assert "bar k-model-decode on" in classes
    assert "bar k-tool-run wasted" in classes
    assert page.tags.count("svg") == 2
    assert page.text.count("replay of a recording") == 1


def test_the_text_fits_in_a_hundred_columns_and_tells_the_run(report: RunReport):
    text = render_text(report)
    assert max(len(line) for line in text.splitlines()) <= 100
    for expected in (
        "prefill  pid 4211", "of planned       25.0%", "[replay]", "DIVERGED", "not solved",
        "makespan 14.6 s", "by join, message, spawn", "=======", "tool.run", "What would help", "3.11.7",
    ):  # fmt: skip
        assert expected in text, expected


def test_a_team_report_is_the_dag_in_seconds():
    run = sample_run()
    dag, report = Dag(run.log), sample_team()
    path = dag.critical_path()
    assert report.makespan_s == report.critical_path_s == path.makespan_s
    assert sum(row.duration_s for row in report.segments) == pytest.approx(report.makespan_s, abs=1e-9)
    assert [row.kind for row in report.segments] == [s.kind for s in path.segments]
    assert {row.id for row in report.intervals if row.on_path} == path.intervals
    assert {row.agent for row in report.intervals if row.wasted} == {"bystander"}
    assert sum(edge.on_path for edge in report.edges) == len(path.crossings) == 3
    assert {row.reached_by for row in report.segments} == {None, "spawn", "message", "join"}
    assert report.agents == ("lead", "reproducer", "mender", "bystander")
    assert set(report.edge_kinds_on_path) == {"spawn", "message", "join"}
    assert sum(row.percent for row in report.attribution.by_agent) == pytest.approx(100)
    assert [row.saved_s for row in report.what_if] == sorted(
        (r.saved_s for r in report.what_if), reverse=True
    )
    assert len(report.transcript) == len(run.turns)
    assert (report.diverged, sample_team(divergence="turn 3").diverged) == (False, True)


def test_a_report_survives_json(report: RunReport):
    assert RunReport.model_validate_json(report.model_dump_json()) == report


def test_an_impossible_edge_is_reported_and_not_drawn():
    log = EventLog("run-1")
    log.extend([Interval("a", "lead", "tool.run", 0, 5), Edge("join", "ghost", "a")])
    report = team_report(log, task="t", replay=False, solved=False)
    assert "ghost" in report.problems[0]
    assert "ghost" in render_html(RunReport.model_validate(empty() | {"teams": (report,)}))


def empty() -> dict[str, object]:
    return {"title": "Nothing", "created_at": "2026-01-01T00:00:00Z", "model": "none"}


def test_a_report_of_nothing_still_reads():
    report = RunReport.model_validate(empty())
    assert "Nothing" in render_text(report)
    assert "Nothing" in Page(render_html(report)).text


def test_a_run_of_no_length_can_be_drawn():
    log = EventLog("run-1")
    log.add(Interval("a", "lead", "tool.run", 7, 7))
    report = RunReport.model_validate(
        empty() | {"teams": (team_report(log, task="t", replay=False, solved=True),)}
    )
    Page(render_html(report))
    assert "0 s" in render_text(report)


def test_a_huge_run_is_drawn_in_part_and_says_so():
    log = EventLog("run-1")
    log.extend(Interval(f"i{n}", "lead", "tool.run", n * 10, n * 10 + 10) for n in range(MAX_INTERVALS + 5))
    drawn = timeline(team_report(log, task="t", replay=False, solved=True)).markup
    assert "5 short intervals are not drawn" in drawn


@given(st.text())
@settings(deadline=None)
def test_any_text_is_only_text(text: str):
    page = Page(tag("p", text, title=text).markup)
    assert page.tags == ["p"]
    assert page.text.replace("\r", "") == visible(text).replace("\r", "")


@pytest.mark.parametrize(
    ("value", "reads"),
    [(0, "0 s"), (0.0002, "0.2 ms"), (0.045, "45 ms"), (1.234, "1.23 s"), (12.34, "12.3 s"), (123.4, "123 s"),
     (-0.5, "-500 ms")],
)  # fmt: skip
def test_lengths_of_time_read_in_three_digits(value: float, reads: str):
    assert seconds(value) == reads


def test_text_is_bounded():
    assert one_line("a\n b\tc", 20) == "a b c"
    assert one_line("abcdef", 4) == "abc…"
    assert bounded("x" * 20_010).endswith("10 more characters")
    assert HOSTILE not in one_line(HOSTILE, 200)
