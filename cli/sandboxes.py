"""sandbox: run a command in a fresh sandbox, keep what it wrote, list what lives, sweep what was left, say
what was done."""

import json
import sys
from collections import deque
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import asdict
from itertools import pairwise
from pathlib import Path
from typing import Annotated, Any, Literal

import psutil
import typer
from typer.core import TyperCommand

from cli.command_ends import check_timeout, lifetime_for, told
from cli.console import JsonFlag, output, print_json, show
from cli.environment import EnvOption, given_environment
from cli.passing import passing_on
from cli.policies import GatewayOption, PolicyOption, PresetOption, chosen_policy
from cli.several import do_each
from cluster.config import load_config
from cluster.state import StateFolder
from protocol.errors import ResourceShortage
from sandbox import Sandbox, SandboxStatus, Snapshots, sandboxes
from sandbox.attached import AttachedSandbox
from sandbox.audit import check_integrity, sweep
from sandbox.audit_log import entries
from sandbox.errors import InvalidArgument, SandboxError, SandboxGone
from sandbox.layers import LayerWish
from sandbox.limits import MIB, check_lifetime
from sandbox.places import chosen_state_dir

SandboxId = Annotated[str, typer.Argument(metavar="ID", help="Of `dockyard sandbox list`.")]
StdinFlag = Annotated[
    bool, typer.Option("--stdin", "-i", help="Pass standard input, once it has ended; else there is none.")
]

OutputJsonFlag = Annotated[
    bool,
    typer.Option(
        "--json",
        help="Print one JSON object on the last line of stdout, once the command has ended, with what the "
        "policy keeps of its output (1 MiB of each stream: head and tail) and how many bytes it dropped.",
    ),
]

app = typer.Typer(
    help="Sandboxes of this machine.",
    no_args_is_help=True,
    epilog="Example: `dockyard sandbox run -- ls /`",
)


@app.command("run")
def run_command(
    command: Annotated[list[str], typer.Argument(help="The command, after `--`. One word runs in a shell.")],
    substrate: Annotated[
        Literal["function", "container"], typer.Option(help="How it is isolated.")
    ] = "function",
    policy_file: PolicyOption = None,
    preset: PresetOption = None,
    gateway: GatewayOption = None,
    timeout_s: Annotated[
        float | None,
        typer.Option(
            "--timeout", min=0.1, help="Seconds; the sandbox lives as long. Default: the policy's, or 60."
        ),
    ] = None,
    memory_mb: Annotated[
        int | None, typer.Option(min=16, help="MiB; a writable layer in memory counts. Default: 512.")
    ] = None,
    disk_mb: Annotated[
        int | None, typer.Option(min=1, help="MiB of the writable layer. Default: 256.")
    ] = None,
    layer: Annotated[
        LayerWish, typer.Option(help="Where what is written lies; auto: as the policy says, else memory.")
    ] = "auto",
    snapshot: Annotated[
        str | None, typer.Option(help="Name of a snapshot that its writable layer begins with.")
    ] = None,
    keep: Annotated[
        str | None, typer.Option(help="Afterwards, keep what it has written under this name.")
    ] = None,
    pids: Annotated[
        int | None, typer.Option(min=8, max=1 << 22, help="Processes and threads. Default: 128.")
    ] = None,
    env: EnvOption = None,
    with_stdin: StdinFlag = False,
    as_json: OutputJsonFlag = False,
) -> int:
    """Run one command in a fresh sandbox, without network unless a policy has one, and remove it.

    What the command prints is passed on as it comes, byte by byte. Exits as the command does; 141 where
    nobody reads its output any more, which ends it. The sandbox ends with the command: `exec`, `info` and
    `set-timeout` act on one that lives, meanwhile from another terminal.

    Example: dockyard sandbox run -- python3 -c "print(1 + 1)"

    Example: echo "print(2)" | dockyard sandbox run --stdin -- python3 -

    Example: echo '{"read_only": ["/root"], "timeout_s": 600}' > narrow.json; dockyard sandbox run --policy
    narrow.json -- ls

    Example: dockyard sandbox run --preset package-index-only -- "pip download attrs"

    Example: dockyard sandbox run --keep ready -- "touch a"; dockyard sandbox run --snapshot ready -- ls
    """
    _check_memory(memory_mb)
    check_timeout(timeout_s)
    state = _state()
    if keep is not None:
        Snapshots(state.sandboxes).check_new(keep)  # before what would be lost has been done
    stdin = _standard_input() if with_stdin else b""
    policy = chosen_policy(policy_file, preset, gateway)
    with Sandbox.create(
        substrate=substrate, policy=policy, memory_mb=memory_mb, pids=pids,
        disk_mb=disk_mb, layer=layer, snapshot=snapshot, env=given_environment(env),
        lifetime_s=lifetime_for(timeout_s, policy), state_dir=state.sandboxes, toolkit=state.toolkit,
    ) as box:  # fmt: skip
        asked = command if len(command) > 1 else command[0]
        watching = passing_on(is_wanted=not as_json)
        if keep is not None:  # likewise: a host that cannot stop a sandbox cannot keep what it has written
            box.pause()
            box.resume()
        result = box.commands.run(asked, timeout_s=timeout_s, stdin=stdin, **watching)
        exit_code = told(result, box.ended, as_json)
        if keep is not None:
            box.snapshot(keep)
    return exit_code


@app.command("exec")
def exec_command(
    id: SandboxId,
    command: Annotated[list[str], typer.Argument(help="The command, after `--`. One word runs in a shell.")],
    timeout_s: Annotated[
        float | None, typer.Option("--timeout", min=0.1, help="Seconds; default: the policy's.")
    ] = None,
    cwd: Annotated[str, typer.Option(help="Where it starts.")] = "/workspace",
    env: EnvOption = None,
    with_stdin: StdinFlag = False,
    as_json: OutputJsonFlag = False,
) -> int:
    """Run one command in a sandbox that lives, whoever owns it.

    Such as one that a Python process holds, or a `sandbox run` in another terminal. What it prints is passed
    on as it comes. Exits as the command does; ends it when interrupted, or where nobody reads its output any
    more.

    Example: dockyard sandbox exec sbx-3f9a61c04be2d17 -- ls -l
    """
    check_timeout(timeout_s)
    box = sandboxes.attach(id, state_dir=_state_dir())
    stdin = _standard_input() if with_stdin else b""
    asked = command if len(command) > 1 else command[0]
    watching = passing_on(is_wanted=not as_json)
    result = box.commands.run(
        asked, timeout_s=timeout_s, cwd=cwd, env=given_environment(env), stdin=stdin, **watching
    )
    return told(result, _ended(box) if result.reason in ("killed", "lost") else None, as_json)


def _ended(box: AttachedSandbox) -> SandboxGone | None:
    """Why it has, of which its owner tells nothing any more; None where it lives, or nobody knows."""
    try:
        sandboxes.info(box.id, state_dir=_state_dir())
    except SandboxGone as gone:
        return gone
    except SandboxError:
        return None
    return None


def _check_memory(memory_mb: int | None) -> None:
    """Raises ResourceShortage for a limit that no sandbox of this machine can reach."""
    machine_mb = psutil.virtual_memory().total >> 20
    if memory_mb is not None and memory_mb > machine_mb:
        raise ResourceShortage(
            f"--memory-mb {memory_mb}: this machine has {machine_mb} MiB", hint="give a lower limit"
        )


@app.command("list")
def list_sandboxes(
    label: Annotated[
        list[str] | None, typer.Option(help="NAME=VALUE that they are to have; can be repeated.")
    ] = None,
    as_json: JsonFlag = False,
) -> None:
    """List living sandboxes with their timeouts, and what has no owner any more.

    Example: dockyard sandbox list --label team=red
    """
    state = _state_dir()
    audit = check_integrity(state)
    found = sandboxes.list(labels=_labels(label or ()), state_dir=state)
    value = {
        "live": [each.id for each in found] if label else list(audit.live),
        "sandboxes": [each.record() for each in found],
        "leftovers": [asdict(left) for left in audit.leftovers],
    }
    lines = [*map(_line, found), *(f"left behind: {left.kind} {left.name}" for left in audit.leftovers)]
    lines += ["remove what is left behind with: dockyard sandbox sweep"] if audit.leftovers else []
    show(value, as_json, lambda: "\n".join(lines) or "no sandbox")


@app.command("info")
def print_info(id: SandboxId, as_json: JsonFlag = False) -> None:
    """Print how a sandbox stands.

    Example: dockyard sandbox info sbx-3f9a61c04be2d17 --json
    """
    found = sandboxes.info(id, state_dir=_state_dir())
    show(found.record(), as_json, lambda: _line(found))


class _Seconds(TyperCommand):
    """Says the range of a number below zero, which the parser takes for an option."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        ours = args[: args.index("--")] if "--" in args else args
        for before, word in pairwise(["", *ours]):
            if word.startswith("-") and before != "--idle":
                with suppress(ValueError):
                    check_lifetime(float(word), None)
        return super().parse_args(ctx, args)


@app.command("set-timeout", cls=_Seconds)
def set_timeout(
    id: SandboxId,
    lifetime_s: Annotated[
        float | None, typer.Argument(help="Seconds from now until it ends; left out: as it is.")
    ] = None,
    idle_s: Annotated[
        float | None, typer.Option("--idle", help="Seconds that it may be idle; 0 for as long as it lives.")
    ] = None,
    as_json: JsonFlag = False,
) -> None:
    """Set when a sandbox ends, whoever owns it. Prints what holds then.

    Example: dockyard sandbox set-timeout sbx-3f9a61c04be2d17 600 --idle 60
    """
    idle = "keep" if idle_s is None else _idle(idle_s)
    found = sandboxes.set_timeout(id, lifetime_s, idle_s=idle, state_dir=_state_dir())
    show(found.record(), as_json, lambda: _line(found))


def _idle(seconds: float) -> float | None:
    """InvalidArgument that says what the flag takes, which is more than the field."""
    try:
        check_lifetime(None, seconds or None)
    except InvalidArgument as error:
        hint = f"{error.hint}, or 0 for as long as it lives"
        raise InvalidArgument(f"--idle {seconds:g} is out of range", hint=hint) from None
    return seconds or None


@app.command("kill")
def kill(
    ids: Annotated[list[str], typer.Argument(metavar="ID...", help="Of `dockyard sandbox list`.")],
    as_json: JsonFlag = False,
) -> int:
    """End sandboxes, whoever owns them, and free all that they have.

    One that cannot be ended is said, and the others are ended all the same; then it exits with 1.

    Example: dockyard sandbox kill sbx-3f9a61c04be2d17

    Example: dockyard sandbox kill sbx-3f9a61c04be2d17 sbx-92c0d1e6f7a8b34
    """

    def end(id: str) -> SandboxStatus:
        ended = sandboxes.kill(id, state_dir=_state_dir())
        if not as_json:
            output.print(f"killed {id}", markup=False)
        return ended

    done = do_each(ids, end)
    if as_json:
        print_json({"killed": [each.record() for each in done.results], "failed": done.failed})
    return done.exit_code


def _line(status: SandboxStatus) -> str:
    if status.end_at is None:
        return f"{status.id}  owned by process {status.owner_pid}, which does not answer"
    idle = "" if status.idle_s is None else f", or when idle for {status.idle_s:g} s"
    labels = "".join(f" {name}={value}" for name, value in (status.labels or {}).items())
    return (
        f"{status.id}  {status.state} {status.substrate}, ends at {status.end_at:%Y-%m-%d %H:%M:%S} UTC{idle}"
        f"{labels}"
    )


def _labels(words: Sequence[str]) -> dict[str, str]:
    pairs = [word.partition("=") for word in words]
    if bad := next((name for name, is_given, _ in pairs if not is_given), None):
        raise InvalidArgument(f"--label {bad} has no value", hint="write NAME=VALUE")
    return {name: value for name, _, value in pairs}


def _state() -> StateFolder:
    """AuthError where sandboxes of another user lie there, before anything is made in it."""
    state = StateFolder(load_config().state_dir)
    chosen_state_dir(state.root / "sandbox")
    return state


def _state_dir() -> Path:
    return _state().sandboxes


@app.command("snapshots")
def list_snapshots(
    delete: Annotated[
        list[str] | None, typer.Option(help="Delete the one of this name; can be repeated.")
    ] = None,
    as_json: JsonFlag = False,
) -> int:
    """List what sandboxes have written and somebody has kept; or delete some of it, and list the rest.

    One that is not there is said; then it exits with 1 (with 2 where it was the only one).

    Example: dockyard sandbox snapshots --delete ready
    """
    store = Snapshots(_state_dir())

    def remove(name: str) -> str:
        if not store.delete(name):
            store.get(name)  # which says what there is
        if not as_json:
            output.print(f"deleted {name}", markup=False)
        return name

    done = do_each(delete or (), remove)
    kept = store.list()
    value = {
        "snapshots": [{**asdict(each), "state_dir": str(each.state_dir)} for each in kept],
        "deleted": done.results,
        "failed": done.failed,
    }
    lines = [
        f"{each.name}  {each.content_bytes / MIB:.1f} MiB in {each.entries} files, {each.substrate}, "
        f"of {each.sandbox_id}"
        for each in kept
    ]
    show(value, as_json, lambda: "\n".join(lines) or "no snapshot")
    return done.exit_code


@app.command("log")
def print_log(
    last: Annotated[int, typer.Option(min=1, help="Lines at most.")] = 100, as_json: JsonFlag = False
) -> None:
    """Print what has been done to sandboxes, oldest first.

    Example: dockyard sandbox log --last 20
    """
    kept = list(deque(entries(_state_dir()), last))
    show({"entries": kept}, as_json, lambda: "\n".join(map(json.dumps, kept)) or "nothing yet")


@app.command("sweep")
def sweep_sandboxes(as_json: JsonFlag = False) -> None:
    """Remove what sandboxes of killed processes left behind.

    Example: dockyard sandbox sweep
    """
    removed = sweep(_state_dir())
    if as_json:
        print_json({"removed": [asdict(left) for left in removed]})
    for left in removed if not as_json else ():
        output.print(f"removed {left.kind} {left.name}", markup=False)


def _standard_input() -> bytes:
    """All of it; nothing where it is closed, as a daemon's is."""
    return b"" if sys.stdin is None else sys.stdin.buffer.read()  # pyright: ignore[reportUnnecessaryComparison]
