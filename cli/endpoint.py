"""Where a command's model answers: a given endpoint, the running deployment, or a server of its own."""

from collections.abc import Generator
from contextlib import contextmanager

from cli.console import step
from cluster.background import RunningServer, running_server
from cluster.config import DockyardConfig
from cluster.status import checked_url, running_url


@contextmanager
def model_endpoint(config: DockyardConfig, url: str | None) -> Generator[str]:
    """The endpoint's address with `/v1`, for the length of the block."""
    found = checked_url(url) if url is not None else running_url(config)
    if found is not None:
        yield found.rstrip("/").removesuffix("/v1") + "/v1"
        return
    step(f"no deployment of {config.model} is running: starting one for this run")
    with own_server(config) as server:
        yield f"{server.url}/v1"


@contextmanager
def own_server(config: DockyardConfig) -> Generator[RunningServer]:
    """A server on a free port, which ends with the block."""
    gateway = config.gateway.model_copy(update={"port": 0})
    with running_server(config.model_copy(update={"gateway": gateway}), step) as server:
        yield server
