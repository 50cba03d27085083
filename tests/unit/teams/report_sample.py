"""A team run as the product makes them, with hostile text in it, for the tests of the report."""

from dataclasses import dataclass
from datetime import UTC, datetime

from protocol.events import Edge, EdgeKind, Interval, IntervalKind
from teams.events import EventLog
from teams.report import HumanEvalReport, RunReport, TeamReport, WorkerRow, team_report

MS = 1_000_000
HOSTILE = "</script><script>alert(1)</script><img src=x onerror=alert(2)>\x1b[31mred\u202e\x00"


@dataclass(frozen=True, slots=True)
class SampleTurn:
    agent: str
    number: int
    text: str
    action: str
    observation: str
    prompt_tokens: int
    completion_tokens: int
    start_ns: int
    end_ns: int


class SampleRun:
    """Writes one agent after the other into a log, and the turns beside it."""

    def __init__(self) -> None:
        self.log = EventLog("run-sample")
        self.now: dict[str, int] = {}
        self.last: dict[str, str] = {}
        self.turns: list[SampleTurn] = []

    def step(self, agent: str, kind: IntervalKind, ms: int, name: str = "") -> str:
        start = self.now.get(agent, 0)
        id = f"ivl-{len(self.log.intervals)}"
        self.log.add(Interval(id, agent, kind, start, start + ms * MS, name, {"tokens": ms, "note": HOSTILE}))
        self.now[agent], self.last[agent] = start + ms * MS, id
        return id

    def turn(self, agent: str, decode_ms: int, tool_ms: int, tool: str) -> None:
        start = self.now.get(agent, 0)
        self.step(agent, "model.queue", 8)
        self.step(agent, "model.prefill", 120, "smollm2")
        self.step(agent, "model.transfer", 6)
        self.step(agent, "model.decode", decode_ms, "smollm2")
        self.step(agent, "harness", 3, "parse")
        if tool_ms:
            self.step(agent, "tool.run", tool_ms, tool)
        number = sum(t.agent == agent for t in self.turns) + 1
        text = f"I look at the failing test first.\n{HOSTILE}"
        self.turns.append(
            SampleTurn(agent, number, text, "run", f"1 failed {HOSTILE}", 420, 38, start, self.now[agent])
        )

    def spawn(self, parent: str, child: str) -> None:
        source = self.step(parent, "harness", 20, f"spawn {child}")
        self.now[child] = self.now[parent] + 4 * MS
        self.log.add(Edge("spawn", source, self.step(child, "harness", 5, "start")))
        self.step(child, "sandbox.create", 240, "container")

    def wait(self, agent: str, others: list[str], kind: EdgeKind) -> None:
        start = self.now[agent]
        end = max(start, *(self.now[other] for other in others)) + 5 * MS
        id = f"ivl-{len(self.log.intervals)}"
        self.log.add(Interval(id, agent, "wait", start, end, " and ".join(others)))
        self.log.extend(Edge(kind, self.last[other], id) for other in others)
        self.now[agent], self.last[agent] = end, id


def sample_run() -> SampleRun:
    """A lead and two teammates; a message unblocks one of them, one bystander's work is wasted."""
    run = SampleRun()
    run.step("lead", "harness", 10, "start")
    run.step("lead", "sandbox.create", 260, "container")
    run.turn("lead", 700, 300, "ls")
    for child in ("reproducer", "mender", "bystander"):
        run.spawn("lead", child)
    for decode, tool in ((600, 900), (750, 1200), (500, 400)):
        run.turn("reproducer", decode, tool, "pytest tests/test_parse.py")
    run.turn("mender", 900, 250, "grep -n parse")
    run.wait("mender", ["reproducer"], "message")
    for decode, tool in ((1100, 200), (900, 1500)):
        run.turn("mender", decode, tool, "edit and pytest")
    run.turn("bystander", 1200, 2500, "read the changelog")
    run.wait("lead", ["reproducer", "mender"], "join")
    run.turn("lead", 800, 1300, "pytest")
    run.now["lead"] += 40 * MS
    run.step("lead", "verify", 1900, "hidden tests")
    return run


def sample_team(*, replay: bool = True, divergence: str = "") -> TeamReport:
    run = sample_run()
    return team_report(
        run.log,
        task=f"h11: chunked bodies {HOSTILE}",
        replay=replay,
        solved=not divergence,
        divergence=divergence,
        verdict="42 passed",
        turns=run.turns,
    )


def sample_report() -> RunReport:
    rates = {"attempts": 12, "passed": 3, "pass_at": {1: 0.25, 4: 0.6667}, "problems_at": {1: 3, 4: 3}}
    scored = {"attempts": 11, "passed": 3, "pass_at": {1: 0.2778, 4: None}, "problems_at": {1: 3, 4: 0}}
    rows = [
        {"task_id": "HumanEval/0", "planned": 4, "scored": 4, "passed": 2,
         "verdicts": ["passed", "failed", "passed", "failed"], "details": ["", HOSTILE, "", "no"]},
        {"task_id": "HumanEval/1", "planned": 4, "scored": 3, "passed": 0,
         "verdicts": ["failed", "timeout", None, "failed"], "details": ["", "", "", ""]},
        {"task_id": f"HumanEval/2{HOSTILE}", "planned": 4, "scored": 4, "passed": 1,
         "verdicts": ["syntax", "failed", "passed", "failed"], "details": []},
    ]  # fmt: skip
    humaneval = HumanEvalReport.model_validate(
        {"model": "smollm2", "problems": 3, "attempts": 4, "passed": 3, "solved": 2, "pass_at_1": 0.25,
         "of_planned": rates, "of_scored": scored, "rows": rows,
         "verdicts": {"passed": 3, "failed": 6, "timeout": 1, "syntax": 1}}
    )  # fmt: skip
    return RunReport(
        title=f"Dockyard demo {HOSTILE}",
        created_at=datetime(2026, 11, 29, 14, 30, tzinfo=UTC),
        model="smollm2",
        workers=(
            WorkerRow(role="prefill", pid=4211, model="smollm2", detail="1 thread, 310 MB, node0/numa0"),
            WorkerRow(role="decode", pid=4212, model="smollm2", detail="1 thread, 420 MB, node0/numa0"),
        ),
        humaneval=humaneval,
        teams=(
            sample_team(replay=False),
            sample_team(divergence=f"turn 3 of mender: exit 1, not 0 {HOSTILE}"),
        ),
        environment={"python": "3.11.7", "kernel": "6.1", "hostile": HOSTILE},
    )
