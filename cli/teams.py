"""team: run a team of agents on a task, live or replayed."""

import asyncio
from collections.abc import Generator
from contextlib import contextmanager
from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated, Any

import typer

from cli.console import JsonFlag, UrlOption, show, step
from cli.endpoint import model_endpoint
from cli.environment import EnvOption, given_environment
from cli.wiring import ModelAt, Workbench, report_of, require_toolkit
from cluster.config import DockyardConfig, load_config
from cluster.status import checked_url
from evals import team_bugs, team_humaneval
from evals.bugs import load_recipe, recipe_names
from evals.problems import load_problems
from protocol.errors import InvalidInput
from teams.agent import AgentLimits
from teams.harness.sampler import SamplerLimits
from teams.report.model import RunReport, TeamReport
from teams.report.text import render_text

AGENT_LIMITS = AgentLimits()  # made for the small model; an endpoint of a large one takes more
MaxTokensOption = Annotated[
    int, typer.Option("--max-tokens", min=1, help="Tokens of one answer of an agent, with --model.")
]
HistoryOption = Annotated[
    int,
    typer.Option(
        "--history-chars", min=1_000, help="Characters of an agent's whole conversation, with --model."
    ),
]

app = typer.Typer(
    help="Teams of agents on tasks.", no_args_is_help=True, epilog="Example: `dockyard team run h11`"
)


@app.command("list")
def list_tasks(as_json: JsonFlag = False) -> None:
    """List the tasks that ship.

    Example: dockyard team list
    """
    recipes = [load_recipe(name) for name in recipe_names()]
    tasks = [
        {
            "task": r.name,
            "package": r.package,
            "from": r.old.version,
            "fixed_in": r.new.version,
            "licence": r.licence,
        }
        for r in recipes
    ]
    text = [
        f"{t['task']}: {t['package']} {t['from']}, mended in {t['fixed_in']} ({t['licence']})" for t in tasks
    ]
    show(
        {"tasks": tasks},
        as_json,
        lambda: "\n".join([*text, "HumanEval/0 … HumanEval/163: a team of samplers"]),
    )


@app.command()
def run(
    task: Annotated[str, typer.Argument(help="A task of `team list`, a task folder, or HumanEval/N.")],
    model: Annotated[
        str | None,
        typer.Option("--model", help="Run live on this OpenAI-compatible endpoint instead of a replay."),
    ] = None,
    model_name: Annotated[str, typer.Option(help="The model's name at --model.")] = "default",
    api_key: Annotated[str | None, typer.Option(envvar="OPENAI_API_KEY", help="Key for --model.")] = None,
    max_tokens: MaxTokensOption = AGENT_LIMITS.max_tokens,
    history_chars: HistoryOption = AGENT_LIMITS.history_chars,
    samples: Annotated[int, typer.Option(min=1, help="Programs a teammate draws, for HumanEval tasks.")] = 4,
    env: EnvOption = None,
    url: UrlOption = None,
    as_json: JsonFlag = False,
) -> int:
    """Run a team. Bug tasks replay their recording on the live stack, or run live with --model.

    Example: dockyard team run h11

    Example: dockyard team run h11 --model http://127.0.0.1:9000/v1 --model-name my-model
    """
    settings = load_config()
    agents = AgentLimits(max_tokens=max_tokens, history_chars=history_chars)
    if model is None and not task.startswith("HumanEval/"):
        _require_recording(task)
    require_toolkit(settings)
    with _where(settings, model, model_name, api_key, url) as at:
        bench = Workbench.open(settings, env=given_environment(env))
        if task.startswith("HumanEval/"):
            work = run_samplers(bench, task, at, samples)
        else:
            work = run_replay(bench, task, at) if model is None else run_live(bench, task, at, agents)
        report = asyncio.run(work)
    show(team_json(report), as_json, lambda: render_text(_single(at.model, report)))
    return 0 if report.solved and not report.diverged else 1


def _require_recording(name: str) -> None:
    """Before anything is started. Raises InvalidInput."""
    if name not in recipe_names():
        raise InvalidInput(
            f"no recording for task {name!r}",
            hint=f"recorded: {', '.join(recipe_names())}; else give --model",
        )


async def run_replay(bench: Workbench, name: str, at: ModelAt) -> TeamReport:
    """Replay a shipped task's recording through the live engine."""
    task = await team_bugs.open_task(name, bench.state.cache, bench.boxes())
    options = bench.options(name, step)
    models = bench.models(at, options.run_id)
    with bench.record(task.name, at.model, options, replay=True) as record:
        outcome = await team_bugs.replay(task, models=models, sandboxes=bench.boxes(), options=options)
        record.keep(outcome)
    return report_of(outcome)


async def run_live(bench: Workbench, name: str, at: ModelAt, agents: AgentLimits) -> TeamReport:
    """The same team, live."""
    task = await team_bugs.open_task(name, bench.state.cache, bench.boxes())
    options = bench.options(Path(name).name, step)
    models = bench.models(at, options.run_id)
    with bench.record(task.name, at.model, options, replay=False) as record:
        outcome = await team_bugs.live(
            task, models=models, sandboxes=bench.boxes(), agents=agents, options=options
        )
        record.keep(outcome)
    return report_of(outcome)


async def run_samplers(bench: Workbench, task_id: str, at: ModelAt, samples: int) -> TeamReport:
    """A lead and three samplers on one HumanEval problem."""
    problem = load_problems(task_ids=(task_id,))[0]
    options = bench.options(task_id.replace("/", "-"), step)
    with bench.record(task_id, at.model, options, replay=False) as record:
        outcome = await team_humaneval.run(
            problem,
            models=bench.models(at, options.run_id),
            sandboxes=bench.boxes(),
            execute=bench.grader(),
            limits=SamplerLimits(samples=samples),
            options=options,
        )
        record.keep(outcome)
    return report_of(outcome)


@contextmanager
def _where(
    settings: DockyardConfig, model: str | None, model_name: str, api_key: str | None, url: str | None
) -> Generator[ModelAt]:
    """The given endpoint, else Dockyard's own."""
    if model is not None:
        yield ModelAt(checked_url(model), model_name, api_key)
        return
    with model_endpoint(settings, url) as endpoint:
        yield ModelAt(endpoint, settings.model)


def team_json(report: TeamReport) -> dict[str, Any]:
    """The stable fields of a team run."""
    whole = report.model_dump(mode="json")
    shares = whole["attribution"]
    return {
        "task": report.task,
        "replay": report.replay,
        "solved": report.solved,
        "diverged": report.diverged,
        "divergence": report.divergence,
        "agents": list(report.agents),
        "agents_on_path": list(report.agents_on_path),
        "edges_on_path": list(report.edge_kinds_on_path),
        "makespan_s": report.makespan_s,
        "critical_path_s": report.critical_path_s,
        "segments": whole["segments"],
        "attribution": shares,
    }


def _single(model: str, report: TeamReport) -> RunReport:
    now = datetime.now(UTC)
    return RunReport(title=f"Team on {report.task}", created_at=now, model=model, teams=(report,))
