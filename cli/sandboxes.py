"""sandbox: run a command in a fresh sandbox, list what lives, sweep what was left."""

from dataclasses import asdict
from typing import Annotated, Literal

import typer

from cli.console import JsonFlag, output, print_json, show
from cluster.config import load_config
from cluster.state import StateFolder
from sandbox import Policy, Sandbox
from sandbox.audit import check_integrity, sweep

app = typer.Typer(help="Sandboxes of this machine.", no_args_is_help=True)


@app.command("run")
def run_command(
    command: Annotated[list[str], typer.Argument(help="The command, after `--`. One word runs in a shell.")],
    substrate: Annotated[
        Literal["function", "container"], typer.Option(help="How it is isolated.")
    ] = "function",
    timeout_s: Annotated[float, typer.Option("--timeout", min=0.1, help="Seconds.")] = 60.0,
    memory_mb: Annotated[int | None, typer.Option(help="MiB; the writable layer counts.")] = None,
    pids: Annotated[int | None, typer.Option(help="Processes and threads.")] = None,
    as_json: JsonFlag = False,
) -> int:
    """Run one command in a fresh sandbox without network, and remove it. Exits as the command does.

    Example: dockyard sandbox run -- python3 -c "print(1 + 1)"
    """
    state = StateFolder(load_config().state_dir)
    with Sandbox.create(
        substrate=substrate, policy=Policy(network="none"), memory_mb=memory_mb, pids=pids,
        state_dir=state.sandboxes, toolkit=state.toolkit,
    ) as box:  # fmt: skip
        result = box.commands.run(command if len(command) > 1 else command[0], timeout_s=timeout_s)
    if as_json:
        texts = {"stdout": result.stdout, "stderr": result.stderr}
        rest = {k: v for k, v in asdict(result).items() if k not in ("stdout_bytes", "stderr_bytes")}
        print_json({**rest, **texts})
    else:
        typer.echo(result.stdout, nl=False)
        typer.echo(result.stderr, nl=False, err=True)
        if result.reason != "exit":
            typer.echo(f"dockyard: ended by {result.reason} after {result.duration_ms:.0f} ms", err=True)
    return result.exit_code if result.exit_code is not None else 1


@app.command("list")
def list_sandboxes(as_json: JsonFlag = False) -> None:
    """List living sandboxes, and what has no owner any more.

    Example: dockyard sandbox list --json
    """
    audit = check_integrity(StateFolder(load_config().state_dir).sandboxes)
    value = {"live": list(audit.live), "leftovers": [asdict(left) for left in audit.leftovers]}
    lines = [*audit.live, *(f"left behind: {left.kind} {left.name}" for left in audit.leftovers)]
    show(value, as_json, lambda: "\n".join(lines) or "no sandbox")


@app.command("sweep")
def sweep_sandboxes(as_json: JsonFlag = False) -> None:
    """Remove what sandboxes of killed processes left behind.

    Example: dockyard sandbox sweep
    """
    removed = sweep(StateFolder(load_config().state_dir).sandboxes)
    if as_json:
        print_json({"removed": [asdict(left) for left in removed]})
    for left in removed if not as_json else ():
        output.print(f"removed {left.kind} {left.name}", markup=False)
