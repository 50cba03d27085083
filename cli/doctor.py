"""doctor: what works on this machine, and in a model, found by trying it, and what the rest costs."""

from dataclasses import asdict
from pathlib import Path
from textwrap import wrap
from typing import TYPE_CHECKING, Annotated, Literal

import typer
from rich.table import Table
from rich.text import Text

from cli.console import JsonFlag, output, print_json, progress
from cluster.config import load_config
from cluster.health import Check, model_checks
from cluster.state import StateFolder
from protocol.errors import MissingCapability
from sandbox import Capability
from sandbox.doctor import can_make_sandboxes, probe

if TYPE_CHECKING:
    from engine.self_check import SelfCheck

app = typer.Typer(invoke_without_command=True)

_STATUS_WIDTH, _LEAST_WIDTH = 12, 40
_COLOURS = {"enforced": "green", "degraded": "yellow", "missing": "red", "unverified": "yellow"}


@app.callback()
def doctor(
    context: typer.Context,
    config: Annotated[
        Path | None, typer.Option("--config", help="A YAML file with the configuration tree.")
    ] = None,
    as_json: JsonFlag = False,
) -> None:
    """Try what this machine can do, and say what is missing, what that costs and how to mend it.

    Exits with 3 where no sandbox can start.

    `dockyard doctor model NAME` checks a model instead.

    Example: dockyard doctor --json
    """
    if context.invoked_subcommand is not None:
        return
    settings = load_config(config)
    state = StateFolder(settings.state_dir)
    found = probe(state_dir=state.sandboxes, toolkit=state.toolkit)
    checks: list[Check | Capability] = [*model_checks(settings), *found]
    if as_json:
        print_json({"checks": [asdict(check) for check in checks]})
    for check in () if as_json else checks:
        output.print(_said(check, output.width))
    if not can_make_sandboxes(found):
        progress.print("dockyard: no sandbox can start here: what is missing above says why")
        raise typer.Exit(MissingCapability.exit_code)


def _said(check: Check | Capability, width: int) -> Text:
    """A block of lines no longer than `width`, but for words that are: a path or command stays whole."""
    said = Text.assemble((f"{check.status:{_STATUS_WIDTH}}", _COLOURS[check.status]), check.name)
    for label, text in (("", check.detail), ("cost: ", check.cost), ("fix: ", check.fix)):
        room = max(width - _STATUS_WIDTH, _LEAST_WIDTH)
        lines = wrap(label + text, room, break_long_words=False, break_on_hyphens=False) if text else []
        said.append("".join(f"\n{' ' * _STATUS_WIDTH}{line}" for line in lines))
    return said


@app.command("model")
def check_model(
    model: Annotated[str, typer.Argument(help="A built-in name, or a folder of a DeepSeek-V4.1 model.")],
    profile: Annotated[
        Literal["exact", "fast"], typer.Option(help="How it computes: `fast` is what servers run.")
    ] = "fast",
    as_json: JsonFlag = False,
) -> None:
    """Check that what a model's encoder leaves is what its decoder reads, and time the stages. 1: it is not.

    Loads the weights, and runs some ten prompts of a few hundred tokens.

    Example: dockyard doctor model nano --json
    """
    from engine.model.registry import load_model  # torch: no other check needs it
    from engine.self_check import check_model as check

    loaded = load_model(model, profile=profile)
    try:
        found = check(loaded)
    finally:
        loaded.close()
    if as_json:
        print_json({"model": model, "profile": profile, "passed": found.passed, **asdict(found)})
    else:
        _print_model(found)
    if not found.passed:
        raise typer.Exit(1)


def _print_model(found: "SelfCheck") -> None:
    table = Table(box=None, pad_edge=False)
    for heading in ("check", "", "found"):
        table.add_column(heading, overflow="fold")
    for finding in found.findings:
        where = f"layers {', '.join(map(str, finding.layers))}: " if finding.layers else ""
        status = Text("passed", "green") if finding.passed else Text("failed", "red")
        table.add_row(Text(finding.check), status, Text(where + finding.detail))
    output.print(table)
    first = found.first_token
    output.print(f"\nfirst token of {first.rows} rows: {first.time_ns / 1e6:.1f} ms")
    for stage in first.stages:
        of_time, of_work = f"{stage.share:.0%} of the time", f"{stage.planned:.0%} of the work"
        output.print(f"  {stage.stage:8} {stage.time_ns / 1e6:8.1f} ms, {of_time}, {of_work}")
    output.print(Text(f"  likely cause: {first.cause}"))
