"""What a running deployment says of itself."""

from typing import Any

import httpx

from cluster.config import DockyardConfig
from cluster.state import DeploymentRecord, StateFolder, is_alive
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


def running_url(config: DockyardConfig) -> str | None:
    """Where the newest deployment that serves this configuration's model answers."""
    records = StateFolder(config.state_dir).records()
    alive = [
        record for record in records if record.ready and record.model == config.model and is_alive(record)
    ]
    return max(alive, key=lambda record: record.started_at).url if alive else None


def required_url(config: DockyardConfig, url: str | None) -> str:
    """The given endpoint's root, else the running deployment's. Raises InvalidInput where there is none."""
    found = url or running_url(config)
    if found is None and any(is_alive(record) for record in StateFolder(config.state_dir).records()):
        raise InvalidInput("the deployment is still loading its model", hint="try again in a moment")
    if found is None:
        raise InvalidInput(
            f"no deployment of {config.model} is running", hint="start one with: dockyard up, or give --url"
        )
    return found.rstrip("/").removesuffix("/v1")
