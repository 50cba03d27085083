"""eval: benchmarks against a served model."""

import asyncio
import shlex
from collections import Counter
from typing import Annotated, Self

import typer

from cli.console import JsonFlag, UrlOption, show, step
from cli.console import progress as progress_console
from cli.endpoint import model_endpoint
from cli.wiring import Workbench, require_toolkit
from cluster.config import load_config
from evals.humaneval import Progress, run_humaneval
from evals.humaneval_config import HumanEvalConfig
from evals.humaneval_result import HumanEvalResult
from evals.store import Store

_EXAMPLE = "Example: `dockyard eval run humaneval --limit 20`"
app = typer.Typer(help="Evaluations.", no_args_is_help=True, epilog=_EXAMPLE)
run_app = typer.Typer(help="Run an evaluation.", no_args_is_help=True, epilog=_EXAMPLE)
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
        with Store(bench.state.store) as store, _Resumable(config, url) as resumable:
            result = asyncio.run(
                run_humaneval(
                    config, store, bench.grader(),
                    run_id=resume, on_start=resumable.started, on_progress=show_progress,
                )
            )  # fmt: skip
    show(result.model_dump(mode="json"), as_json, lambda: humaneval_text(result))
    return exit_code(result)


class _Resumable:
    """Tells how a run is resumed: when it starts, and when it is broken off."""

    def __init__(self, config: HumanEvalConfig, url: str | None) -> None:
        self._config, self._url = config, url
        self._command = ""

    def __enter__(self) -> Self:
        return self

    def started(self, run_id: str) -> None:
        """The run is on record."""
        self._command = resume_command(self._config, self._url, run_id)
        step(f"run {run_id}; if it is interrupted, go on with: {self._command}")

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is not None and self._command:
            progress_console.print()  # the terminal's own ^C stands on this line
            step(f"interrupted; go on with: {self._command}")


def resume_command(config: HumanEvalConfig, url: str | None, run_id: str) -> str:
    """The command that goes on with a run: the flags that are not at their defaults, and its id."""
    plain = HumanEvalConfig()
    names = ("attempts", "limit", "model", "temperature", "max_tokens", "seed")
    given = {n: getattr(config, n) for n in names if getattr(config, n) != getattr(plain, n)}
    flags = {**given, **({"url": url} if url else {}), "resume": run_id}
    listed = [word for name, value in flags.items() for word in (f"--{name.replace('_', '-')}", str(value))]
    return shlex.join(["dockyard", "eval", "run", "humaneval", *listed])


def exit_code(result: HumanEvalResult) -> int:
    """1, with the commonest reason, where no attempt could be scored: that says nothing of the model."""
    if result.of_scored.attempts:
        return 0
    details = Counter(detail for row in result.rows for detail in row.details if detail)
    reason = details.most_common(1)[0][0] if details else "no reason is on record"
    step(
        f"no attempt could be scored: {reason}; "
        f"the rates say nothing of {result.model}; try again with: --resume {result.run_id}"
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
