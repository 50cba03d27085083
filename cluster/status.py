"""What a running deployment says of itself."""

from collections import Counter
from typing import Any
from urllib.parse import urlsplit

import httpx
import psutil

from cluster.config import DockyardConfig
from cluster.state import DeploymentRecord, StateFolder, is_alive, lost_deployments, remains
from protocol.errors import InvalidInput


def live_status(record: DeploymentRecord) -> dict[str, Any]:
    """Its record, and where it answers, its workers and their counters."""
    known: dict[str, Any] = {
        "id": record.id, "model": record.model, "pid": record.pid, "url": record.url, "ready": record.ready,
        "workers": [], "placement": [],
    }  # fmt: skip
    if not record.ready:
        return known
    try:
        return {**known, **httpx.get(f"{record.url}/dockyard/status", timeout=10.0).json()}
    except (httpx.HTTPError, ValueError) as error:
        return {**known, "ready": False, "error": f"{type(error).__name__}: {error}"}


def lost_status(state: StateFolder) -> list[dict[str, Any]]:
    """Deployments whose server was killed, and what each has left: a line for each thing."""
    return [
        {
            "id": record.id,
            "model": record.model,
            "pid": record.pid,
            "remains": [line for line in remains(state, record) if line != f"record {record.id}"],
        }
        for record in lost_deployments(state)
    ]


def running_url(config: DockyardConfig) -> str | None:
    """Where the newest deployment that serves this configuration's model answers."""
    records = StateFolder(config.state_dir).records()
    alive = [
        record for record in records if record.ready and record.model == config.model and is_alive(record)
    ]
    return max(alive, key=lambda record: record.started_at).url if alive else None


def checked_url(url: str) -> str:
    """The address of an endpoint. Raises InvalidInput for what is none."""
    try:
        parts = urlsplit(url)
        usable = parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
    except ValueError:  # a port that is no number, half an IPv6 address
        usable = False
    if not usable or not url.isprintable() or " " in url:
        raise InvalidInput(f"{url!r} is no URL of an endpoint", hint="as http://127.0.0.1:8000")
    return url


def required_url(config: DockyardConfig, url: str | None) -> str:
    """The given endpoint's root, else the running deployment's. Raises InvalidInput where there is none."""
    found = checked_url(url) if url is not None else running_url(config)
    if found is None:
        raise _nothing_serves(config)
    return found.rstrip("/").removesuffix("/v1")


def _nothing_serves(config: DockyardConfig) -> InvalidInput:
    """Why no deployment answers for the model, and what to do."""
    state = StateFolder(config.state_dir)
    alive = [record for record in state.records() if is_alive(record)]
    if any(record.model == config.model and not record.ready for record in alive):
        return InvalidInput(
            f"the deployment of {config.model} is still loading its model", hint="try again in a moment"
        )
    served = ", ".join(sorted({record.model for record in alive if record.ready}))
    start = f"start one with: dockyard up {config.model}, or give --url"
    if any(record.model == config.model for record in lost_deployments(state)):
        start = f"its server was killed: end what that has left with: dockyard down, and {start}"
    return InvalidInput(
        f"no deployment of {config.model} is running" + (f", only of {served}" if served else ""),
        hint=f"ask for that with --model, {start}" if served else start,
    )


def outstanding_bytes(config: DockyardConfig) -> dict[str, int]:
    """Memory by place that the running workers were promised and have not taken yet.

    A KV pool is taken when it is first used, so that the machine's free memory alone says too much. Blocks
    for a request a deployment.
    """
    outstanding: Counter[str] = Counter()
    for record in StateFolder(config.state_dir).records():
        if is_alive(record):
            for worker in live_status(record)["workers"]:
                outstanding[worker["place"]] += max(0, worker["promised_bytes"] - _own_bytes(worker["pid"]))
    return dict(outstanding)


def _own_bytes(pid: int) -> int:
    """What the process holds for itself alone; pages of a mapped file can be had back."""
    try:
        memory = psutil.Process(pid).memory_info()
    except psutil.NoSuchProcess:
        return 0
    return memory.rss - memory.shared
