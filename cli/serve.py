"""serve, up, down, status: the life of a deployment."""

import json
import signal
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from cli.console import JsonFlag, output, print_json, show, step
from cluster.background import start_in_background
from cluster.config import DockyardConfig, load_config
from cluster.lifeline import Stopped, die_with_parent, signals_held
from cluster.state import StateFolder, end_deployment, is_alive
from engine.model_path import model_path
from protocol.errors import InvalidInput
from sandbox.audit import sweep

if TYPE_CHECKING:
    from cluster.deployment import Deployment

ConfigOption = Annotated[
    Path | None, typer.Option("--config", help="A YAML file with the configuration tree.")
]
PortOption = Annotated[
    int | None, typer.Option("--port", help="Port of the gateway; 0 takes a free one. Default: 8000.")
]
HostOption = Annotated[str | None, typer.Option("--host", help="Address of the gateway. Default: 127.0.0.1.")]
ModelArgument = Annotated[
    str | None,
    typer.Argument(help="A built-in name (smollm2, nano), a GGUF file, or a folder of DeepSeek weights."),
]
MonolithicFlag = Annotated[
    bool, typer.Option("--monolithic", help="One worker for prefill and decode instead of one of each.")
]
EventsOption = Annotated[
    str | None,
    typer.Option(
        "--kv-events-config",
        metavar="JSON",
        help="Publish what the workers' caches hold, for routers; vLLM's fields: enable_kv_cache_events, "
        "endpoint, replay_endpoint, topic, …",
    ),
]


def serve(
    model: ModelArgument = None,
    config: ConfigOption = None,
    port: PortOption = None,
    host: HostOption = None,
    monolithic: MonolithicFlag = False,
    kv_events_config: EventsOption = None,
    with_parent: Annotated[int, typer.Option("--with-parent", hidden=True)] = 0,
    as_json: JsonFlag = False,
) -> None:
    """Serve a model in the foreground until Ctrl-C or SIGTERM, which drain it.

    Example: dockyard serve smollm2 --port 8000
    """
    if with_parent:
        die_with_parent(with_parent)
    settings = resolve(config, model, port, host, monolithic, kv_events_config)
    model_path(settings.model)  # one that is not there is said before anything else
    did = "stopped while it loaded, before it served anything"

    def announce(url: str, deployment: "Deployment") -> None:
        nonlocal did
        did = "drained"
        _announce(url, deployment, as_json)

    try:
        with signals_held():
            step(f"loading {settings.model}: Ray, the workers, the gateway")
            from cluster import server  # brings torch, Ray and the gateway, which no other command needs

            server.serve(settings, announce, step)
    except Stopped as stopped:
        step(f"{did}; everything it started has ended")
        if stopped.number != signal.SIGTERM:
            raise


def up(
    model: ModelArgument = None,
    config: ConfigOption = None,
    port: PortOption = None,
    host: HostOption = None,
    monolithic: MonolithicFlag = False,
    kv_events_config: EventsOption = None,
    as_json: JsonFlag = False,
) -> None:
    """Serve a model in the background; `dockyard down` ends it.

    Example: dockyard up smollm2 --port 8000 && dockyard chat "Hello"
    """
    settings = resolve(config, model, port, host, monolithic, kv_events_config)
    model_path(settings.model)
    step(f"starting {settings.model} in the background")
    record = start_in_background(settings, step)
    value = {"id": record.id, "url": record.url, "pid": record.pid, "model": record.model}
    show(
        value,
        as_json,
        lambda: f"{record.model} is served at {record.url}/v1 (pid {record.pid}); end it with: dockyard down",
    )


def down(config: ConfigOption = None, as_json: JsonFlag = False) -> None:
    """End every deployment and sweep what crashes left. Silent when there is nothing.

    Example: dockyard down
    """
    settings = load_config(config)
    state = StateFolder(settings.state_dir)
    ended: list[str] = []
    for record in state.records():
        ended += end_deployment(state, record, settings.gateway.drain_s)
    ended += [f"{left.kind} {left.name}" for left in sweep(state.sandboxes)]
    if as_json:
        print_json({"ended": ended})
    for line in ended if not as_json else []:
        output.print(f"ended {line}", markup=False)


def status(config: ConfigOption = None, as_json: JsonFlag = False) -> None:
    """Show this machine, what runs on it, and why it stands where it stands.

    Example: dockyard status --json
    """
    from cluster.health import machine_summary  # these two bring networkx and httpx
    from cluster.status import live_status, lost_status

    settings = load_config(config)
    state = StateFolder(settings.state_dir)
    deployments = [live_status(record) for record in state.records() if is_alive(record)]
    value: dict[str, Any] = {
        "machine": machine_summary(),
        "deployments": deployments,
        "lost": lost_status(state),
    }
    show(value, as_json, lambda: _status_text(value))


def resolve(
    config: Path | None,
    model: str | None,
    port: int | None,
    host: str | None,
    monolithic: bool,
    kv_events: str | None = None,
) -> DockyardConfig:
    """The configuration that the flags and the file amount to. `kv_events`: JSON."""
    return load_config(
        config,
        model=model,
        gateway__port=port,
        gateway__host=host,
        workers__disaggregated=False if monolithic else None,
        workers__kv_events=None if kv_events is None else _json("--kv-events-config", kv_events),
    )


def _json(flag: str, text: str) -> Any:
    try:
        return json.loads(text)
    except ValueError as error:
        raise InvalidInput(
            f"{flag} is no JSON: {error}", hint="""as '{"enable_kv_cache_events": true}'"""
        ) from error


def _announce(url: str, deployment: "Deployment", as_json: bool) -> None:
    workers = [{"role": w.name, "pid": w.pid} for w in deployment.workers]
    if as_json:
        print_json({"url": url, "id": deployment.id, "model": deployment.model.name, "workers": workers})
        return
    listed = ", ".join(f"{w['role']} pid {w['pid']}" for w in workers)
    output.print(f"{deployment.model.name} is served at {url}/v1 ({listed}); Ctrl-C ends it", markup=False)


def _status_text(value: dict[str, Any]) -> str:
    lines = list(value["machine"]["lines"])
    for lost in value["lost"]:
        lines.append(
            f"the server of {lost['model']} (id {lost['id']}, pid {lost['pid']}) was killed; "
            "end what it has left with: dockyard down"
        )
        lines += [f"  {left}" for left in lost["remains"]]
    if not value["deployments"] and not value["lost"]:
        lines.append("no deployment is running; start one with: dockyard up")
    for deployment in value["deployments"]:
        lines.append(
            f"{deployment['model']} at {deployment['url'] or '(loading)'} "
            f"(id {deployment['id']}, pid {deployment['pid']})"
        )
        lines += [
            f"  {w['role']}: pid {w['pid']}, {w['kind']}, {w['rows']} rows in {w['steps']} steps"
            for w in deployment["workers"]
        ]
        lines += [f"  {reason}" for reason in deployment["placement"]]
    return "\n".join(lines)
