"""doctor: what works on this machine, found by trying it, and what the rest costs."""

from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer
from rich.table import Table
from rich.text import Text

from cli.console import JsonFlag, output, print_json
from cluster.config import load_config
from cluster.health import Check, model_checks
from cluster.state import StateFolder
from sandbox import Capability
from sandbox.doctor import probe

_COLOURS = {"enforced": "green", "degraded": "yellow", "missing": "red", "unverified": "yellow"}


def doctor(
    config: Annotated[
        Path | None, typer.Option("--config", help="A YAML file with the configuration tree.")
    ] = None,
    as_json: JsonFlag = False,
) -> None:
    """Try what this machine can do, and say what is missing, what that costs and how to mend it.

    Example: dockyard doctor --json
    """
    settings = load_config(config)
    state = StateFolder(settings.state_dir)
    checks: list[Check | Capability] = [
        *model_checks(settings),
        *probe(state_dir=state.sandboxes, toolkit=state.toolkit),
    ]
    if as_json:
        print_json({"checks": [asdict(check) for check in checks]})
        return
    table = Table(box=None, pad_edge=False)
    for heading in ("what", "status", "found", "cost", "fix"):
        table.add_column(heading, overflow="fold")
    for check in checks:
        colour = _COLOURS[check.status]
        status = Text(check.status, colour)
        table.add_row(*map(Text, (check.name,)), status, *map(Text, (check.detail, check.cost, check.fix)))
    output.print(table)
