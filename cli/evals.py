"""eval: benchmarks against a served model."""

import asyncio
from typing import Annotated

import typer

from cli.console import JsonFlag, UrlOption, show, step
from cli.endpoint import model_endpoint
from cli.wiring import Workbench, require_toolkit
from cluster.config import load_config
from evals.humaneval import Progress, run_humaneval
from evals.humaneval_config import HumanEvalConfig
from evals.humaneval_result import HumanEvalResult
from evals.store import Store

app = typer.Typer(help="Evaluations.", no_args_is_help=True)
run_app = typer.Typer(help="Run an evaluation.", no_args_is_help=True)
app.add_typer(run_app, name="run")


@run_app.callback()
def run_group() -> None:
    """Keeps `eval run NAME` a group while it has one member."""


@run_app.command()
def humaneval(
    attempts: Annotated[int, typer.Option(min=1, help="Attempts a problem.")] = 1,
    limit: Annotated[
        int | None, typer.Option(min=1, help="Problems, from the first. Default: all 164.")
    ] = None,
    url: UrlOption = None,
    model: Annotated[str, typer.Option(help="Model name.")] = "smollm2",
    temperature: Annotated[float, typer.Option(min=0.0, help="0 makes all attempts equal.")] = 0.2,
    max_tokens: Annotated[int, typer.Option(min=1, help="Of a reply.")] = 512,
    seed: Annotated[int, typer.Option(min=0, help="Of the whole run.")] = 0,
    resume: Annotated[
        str | None, typer.Option(help="Go on with this run id; only what is missing is run.")
    ] = None,
    as_json: JsonFlag = False,
) -> int:
    """HumanEval: generate programs, grade each in a sandbox of its own, count.

    Example: dockyard eval run humaneval --attempts 5 --limit 20
    """
    settings = load_config(model=model)
    require_toolkit(settings)
    with model_endpoint(settings, url) as endpoint:
        bench = Workbench.open(settings)
        config = HumanEvalConfig(
            base_url=endpoint, model=model, attempts=attempts, limit=limit, temperature=temperature,
            max_tokens=max_tokens, seed=seed, grading_concurrency=settings.sandbox.parallel,
            generation_concurrency=settings.workers.max_sequences,
        )  # fmt: skip
        with Store(bench.state.store) as store:
            result = asyncio.run(
                run_humaneval(config, store, bench.grader(), run_id=resume, on_progress=show_progress)
            )
    show(result.model_dump(mode="json"), as_json, lambda: humaneval_text(result))
    return exit_code(result)


def exit_code(result: HumanEvalResult) -> int:
    """1, with a sentence, where no attempt could be scored: such a run says nothing of the model."""
    if result.of_scored.attempts:
        return 0
    step(
        f"no attempt could be scored, so the rates say nothing of {result.model}; "
        f"try again with: --resume {result.run_id}"
    )
    return 1


def show_progress(progress: Progress) -> None:
    """One line an attempt."""
    step(
        f"{progress.done}/{progress.total} {progress.task_id} attempt {progress.attempt + 1}: "
        f"{progress.verdict} ({progress.passed} passed)"
    )


def humaneval_text(result: HumanEvalResult) -> str:
    """Both denominators, since they answer different questions."""
    lines = [
        f"HumanEval, {result.model}: {result.problems} problems, {result.attempts} attempts each "
        f"(run {result.run_id})"
    ]
    for name, rates in (("planned", result.of_planned), ("scored", result.of_scored)):
        scores = ", ".join(
            f"pass@{k} {'-' if v is None else f'{v:.3f}'}" for k, v in sorted(rates.pass_at.items())
        )
        lines.append(f"  of {name}: {rates.passed}/{rates.attempts} attempts passed, {scores}")
    lines.append(
        "  verdicts: " + ", ".join(f"{name} {count}" for name, count in sorted(result.verdicts.items()))
    )
    return "\n".join(lines)
