"""demo: the whole product once, on this machine."""

import asyncio
import json
import time
from pathlib import Path
from typing import Annotated, Any

import typer

from cli.console import JsonFlag, output, print_json, progress, step
from cli.demo_job import DemoResult, demo_json, demo_report, run_job
from cli.endpoint import own_server
from cli.evals import show_progress
from cli.teams import AGENT_LIMITS, HistoryOption, MaxTokensOption
from cli.wiring import ModelAt, Workbench, require_toolkit
from cluster.background import RunningServer
from cluster.config import load_config
from cluster.state import StateFolder, is_running, remains
from cluster.status import checked_url
from protocol.errors import DockyardError
from protocol.visible_text import visible
from sandbox.audit import check_integrity
from teams.agent import AgentLimits
from teams.report.html import render_html
from teams.report.text import render_text


class LeftBehind(DockyardError):
    """The demo ended and something of it is still there."""


def demo(
    config: Annotated[
        Path | None, typer.Option("--config", help="A YAML file with the configuration tree.")
    ] = None,
    model: Annotated[
        str | None,
        typer.Option("--model", help="Run part D live on this OpenAI-compatible endpoint, not as a replay."),
    ] = None,
    model_name: Annotated[str, typer.Option(help="The model's name at --model.")] = "default",
    api_key: Annotated[str | None, typer.Option(envvar="OPENAI_API_KEY", help="Key for --model.")] = None,
    max_tokens: MaxTokensOption = AGENT_LIMITS.max_tokens,
    history_chars: HistoryOption = AGENT_LIMITS.history_chars,
    as_json: JsonFlag = False,
) -> None:
    """Run everything once: a served model, an evaluation, a live team, teams on real bugs; then a report.

    Example: dockyard demo --json
    """
    started = time.monotonic()
    settings = load_config(config)
    state = require_toolkit(settings)
    foreign = ModelAt(checked_url(model), model_name, api_key) if model is not None else None
    agents = AgentLimits(max_tokens=max_tokens, history_chars=history_chars)
    step(f"starting {settings.model}: Ray, a prefill actor, a decode actor, the gateway")
    with own_server(settings) as server:
        bench = Workbench.open(settings)
        listed = ", ".join(f"{w['role']} pid {w['pid']}" for w in server.workers)
        step(f"serving at {server.url} ({listed}) after {time.monotonic() - started:.0f} s")
        result = asyncio.run(run_job(bench, f"{server.url}/v1", foreign, _part, _say, show_progress, agents))
    value = _write(bench, result, list(server.workers), foreign, time.monotonic() - started)
    if not as_json:
        output.print(
            f"JSON report: {value['report_json']}\nHTML report: {value['report_html']}", markup=False
        )
    require_clean(state, server)
    if as_json:
        print_json(value)


def _part(text: str) -> None:
    progress.rule(text, align="left", style="dim")


def _say(text: str) -> None:
    """A piece of a model's reply, as it comes."""
    progress.print(visible(text), end="", markup=False)


def _write(
    bench: Workbench,
    result: DemoResult,
    workers: list[dict[str, Any]],
    foreign: ModelAt | None,
    seconds: float,
) -> dict[str, Any]:
    report = demo_report(bench, result, workers, foreign)
    output.print(render_text(report), markup=False)
    html, plain = bench.folder / "report.html", bench.folder / "report.json"
    html.write_text(render_html(report))
    value = {
        **demo_json(result, workers, bench.config.model),
        "seconds": round(seconds, 1),
        "run_id": bench.run_id,
        "report_html": str(html),
        "report_json": str(plain),
    }
    plain.write_text(json.dumps(value, indent=1))
    return value


def require_clean(state: StateFolder, server: RunningServer) -> None:
    """Say that all has ended, once that has been looked at. Raises LeftBehind with what has not."""
    left = remains(state, server.record)
    left += [f"worker {w['pid']}" for w in server.workers if is_running(w["pid"])]
    left += [f"{item.kind} {item.name}" for item in check_integrity(state.sandboxes).leftovers]
    if left:
        listed = ", ".join(left[:5])
        raise LeftBehind(f"the demo left something behind: {listed}", hint="dockyard down removes it")
    step("the server, its workers and every sandbox have ended; nothing is left")
