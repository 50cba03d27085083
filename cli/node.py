"""node: what root sets up on a machine for its ordinary users."""

from pathlib import Path
from typing import Annotated

import typer

from protocol.errors import InvalidInput
from sandbox.helper_start import Bounds, run_helper, unit

app = typer.Typer(
    help="What root sets up on a machine for its ordinary users.",
    no_args_is_help=True,
    epilog="Example: `dockyard node helper --user alice`",
)


@app.callback()
def node() -> None:
    """What root sets up on a machine for its ordinary users."""


@app.command("helper")
def helper(
    user: Annotated[str, typer.Option(help="Whose sandboxes: a name, or a number.")] = "",
    place: Annotated[
        Path | None, typer.Option("--socket", help="Where it listens; only that user may connect.")
    ] = None,
    memory_mb: Annotated[
        int | None, typer.Option(help="Most memory of all of the user's sandboxes together, in MiB.")
    ] = None,
    pids: Annotated[int | None, typer.Option(help="Most processes of all of them together.")] = None,
    cpu: Annotated[float | None, typer.Option(help="Most processors of all of them together.")] = None,
    is_unit: Annotated[
        bool, typer.Option("--unit", help="Print a template for systemd instead: dockyard-helper@.service.")
    ] = False,
) -> None:
    """Run the helper that gives one user's sandboxes cgroups, ids and networks of their own. Needs root.

    Without it that user's sandboxes have no limits on memory and processor, one user id and no network. It is
    a few hundred lines that import nothing else (sandbox/privileged). Says on stderr where it listens, and
    runs until SIGTERM or Ctrl-C; then, and when the user's process ends, all that it has made is removed.

    Where the user has limits by other cgroups, give some here too: what the helper hands to him is not below
    these. With any, he has one state directory at a time.

    Example: dockyard node helper --user alice

    Example: dockyard node helper --unit > /etc/systemd/system/dockyard-helper@.service
    """
    bounds = Bounds(memory_mb, pids, cpu)
    if is_unit:
        typer.echo(unit(bounds), nl=False)
        return
    if not user:
        raise InvalidInput("--user is missing", hint="such as --user alice")
    run_helper(user, place, bounds)
