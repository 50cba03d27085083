"""The main job: one path through the whole product, every part of it real."""

import platform
from collections.abc import Callable
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any

from cli.teams import run_live, run_replay, run_samplers, team_json
from cli.wiring import ModelAt, Workbench
from evals.bugs import recipe_names
from evals.examples import visible_examples
from evals.humaneval import Progress, run_humaneval
from evals.humaneval_config import HumanEvalConfig
from evals.humaneval_result import HumanEvalResult
from evals.problems import load_problems
from evals.store import Store
from teams.agent import AgentLimits
from teams.report.model import HumanEvalReport, RunReport, TeamReport, WorkerRow

# A fixed subset; among them some that this model solves now and then, so that the score is not always 0.
HUMANEVAL_SUBSET = tuple(f"HumanEval/{number}" for number in (7, 11, 13, 2, 23, 27, 34, 53))
ATTEMPTS = 2
MAX_TOKENS = 256
TEAM_SAMPLES = 2  # a teammate


@dataclass(frozen=True, slots=True)
class DemoResult:
    greeting: str
    humaneval: HumanEvalResult
    live: TeamReport
    bugs: tuple[TeamReport, ...]


async def run_job(
    bench: Workbench,
    endpoint: str,
    foreign: ModelAt | None,
    say: Callable[[str], None],
    on_text: Callable[[str], None],
    on_attempt: Callable[[Progress], None],
    agents: AgentLimits,
) -> DemoResult:
    """Parts A to D in order; `agents` are those of `foreign`. `on_text` is told A's reply as it comes.

    Cancelled, it leaves nothing behind.
    """
    here = ModelAt(endpoint, bench.config.model)
    say("A: a streamed chat completion through the openai SDK")
    greeting = await _greet(bench.config.model, endpoint, on_text)
    say(f"B: HumanEval, {len(HUMANEVAL_SUBSET)} problems, {ATTEMPTS} attempts each, graded in sandboxes")
    evaluated = await _evaluate(bench, endpoint, on_attempt)
    task = _first_failed(evaluated)
    say(f"C: a live team of four on {task}")
    live = await run_samplers(bench, task, here, TEAM_SAMPLES)
    bugs: list[TeamReport] = []
    for name in recipe_names():
        say(
            f"D: a team of three on the bug in {name}, "
            + ("live" if foreign else "a replay on the live stack")
        )
        live_run = run_live(bench, name, foreign, agents) if foreign else run_replay(bench, name, here)
        bugs.append(await live_run)
    return DemoResult(greeting, evaluated, live, tuple(bugs))


def demo_report(
    bench: Workbench, result: DemoResult, workers: list[dict[str, Any]], foreign: ModelAt | None
) -> RunReport:
    """What the text and the page show."""
    return RunReport(
        title="Dockyard demo",
        created_at=datetime.now(UTC),
        model=bench.config.model,
        workers=tuple(
            WorkerRow(role=w["role"], pid=w["pid"], model=bench.config.model, detail="Ray actor")
            for w in workers
        ),
        humaneval=HumanEvalReport.model_validate(result.humaneval.model_dump()),
        teams=(result.live, *result.bugs),
        environment={
            "python": platform.python_version(),
            "system": platform.platform(),
            "run": bench.run_id,
            "model of part D": f"{foreign.model} at {foreign.url}, live" if foreign else "a replay",
            "sandboxes placed": f"{bench.places.num_placed}; the first: {bench.places.reasons[0]}",
        },
    )


def demo_json(result: DemoResult, workers: list[dict[str, Any]], model: str) -> dict[str, Any]:
    """The stable fields of `dockyard demo --json`."""
    scored = result.humaneval
    return {
        "model": model,
        "greeting": result.greeting,
        "workers": {w["role"]: {"pid": w["pid"], "ray_actor": True} for w in workers},
        "humaneval": {
            "problems": scored.problems,
            "attempts": scored.attempts,
            "passed": scored.passed,
            "pass_at_1": scored.pass_at_1,
            "pass_at_k": scored.pass_at_k,
            "of_planned": scored.of_planned.model_dump(mode="json"),
            "of_scored": scored.of_scored.model_dump(mode="json"),
        },
        "live_team": team_json(result.live),
        "replayed_team": team_json(result.bugs[0]),
        "bug_teams": [team_json(team) for team in result.bugs],
    }


async def _greet(model: str, endpoint: str, on_text: Callable[[str], None]) -> str:
    from openai import AsyncOpenAI  # takes a second

    async with AsyncOpenAI(base_url=endpoint, api_key="dk-demo", max_retries=0) as client:
        stream = await client.chat.completions.create(
            model=model,
            messages=[{"role": "user", "content": "Write a Python function that returns the sum of a list."}],
            max_tokens=48, temperature=0, stream=True,
        )  # fmt: skip
        parts: list[str] = []
        async for chunk in stream:
            if chunk.choices and (text := chunk.choices[0].delta.content):
                parts.append(text)
                on_text(text)
        on_text("\n")
        return "".join(parts)


async def _evaluate(
    bench: Workbench, endpoint: str, on_attempt: Callable[[Progress], None]
) -> HumanEvalResult:
    config = HumanEvalConfig(
        base_url=endpoint, model=bench.config.model, attempts=ATTEMPTS, task_ids=HUMANEVAL_SUBSET,
        max_tokens=MAX_TOKENS, generation_concurrency=bench.config.workers.max_sequences,
        grading_concurrency=bench.config.sandbox.parallel,
    )  # fmt: skip
    with Store(bench.state.store) as store:
        return await run_humaneval(config, store, bench.grader(), on_progress=on_attempt)


def _first_failed(result: HumanEvalResult) -> str:
    """The first problem that its first attempt did not solve; the last one if all were solved.

    Only problems whose prompt shows examples: a sampler has nothing else to judge a program by.
    """
    shown = {p.task_id for p in load_problems(task_ids=HUMANEVAL_SUBSET) if visible_examples(p)}
    rows = [row for row in result.rows if row.task_id in shown]
    failed = [row.task_id for row in rows if row.verdicts[0] != "passed"]
    return failed[0] if failed else rows[-1].task_id
