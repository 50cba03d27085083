"""Where a worker publishes what its caches take in and give up: vLLM's `KVEventsConfig`."""

from typing import Literal, Self

from pydantic import BaseModel, ConfigDict, Field, field_validator


class KvEventsConfig(BaseModel):
    """Field names and meanings are vLLM's, so that its `--kv-events-config` can be given as it is.

    Worker number k of a deployment takes the port k behind that of the endpoints, or a name that ends in
    `_dpk`, and tells its number as `data_parallel_rank`.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    enable_kv_cache_events: bool = False
    publisher: Literal["zmq", "null"] = "zmq"  # null: events are counted and kept, and nobody hears of them
    # Bound where it names all addresses, this host's own, or a file; else connected to. vLLM's default is
    # every address; nothing here asks who listens, so ours is this host.
    endpoint: str = "tcp://127.0.0.1:5557"
    replay_endpoint: str | None = None  # bound: who missed some asks here, by sequence number
    buffer_steps: int = Field(default=10_000, ge=1)  # batches kept for those who ask
    hwm: int = Field(default=100_000, ge=1)  # batches that wait for a slow reader, who then misses some
    topic: str = Field(default="", max_length=1024)

    @field_validator("endpoint", "replay_endpoint")
    @classmethod
    def _is_an_endpoint(cls, value: str | None) -> str | None:
        if value is not None:
            _check(value)
        return value

    @property
    def publishes(self) -> bool:
        return self.enable_kv_cache_events and self.publisher == "zmq"

    def of_worker(self, number: int) -> Self:
        """With that worker's own endpoints."""
        replay = self.replay_endpoint
        moved = {
            "endpoint": _moved(self.endpoint, number),
            "replay_endpoint": None if replay is None else _moved(replay, number),
        }
        return self.model_copy(update=moved)


def is_bound(endpoint: str) -> bool:
    """Whether a publisher binds it, as vLLM decides; addresses of this host too, which vLLM connects to."""
    host = endpoint.removeprefix("tcp://").rpartition(":")[0]
    local = host in ("localhost", "[::1]") or host.startswith("127.")
    return not endpoint.startswith("tcp://") or "*" in host or "::" in host or local


def _check(endpoint: str) -> None:
    """Raises ValueError."""
    if endpoint.startswith(("ipc://", "inproc://")) and len(endpoint) > len("inproc://"):
        return
    host, _, port = endpoint.removeprefix("tcp://").rpartition(":")
    if not (endpoint.startswith("tcp://") and host and port.isdigit() and 0 < int(port) < 65536):
        raise ValueError("expected tcp://HOST:PORT, with * for every address, or ipc://PATH")


def _moved(endpoint: str, number: int) -> str:
    if number == 0:
        return endpoint
    if not endpoint.startswith("tcp://"):
        return f"{endpoint}_dp{number}"
    host, _, port = endpoint.rpartition(":")
    return f"{host}:{int(port) + number}"
