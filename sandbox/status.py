"""How a sandbox stands at one moment, for whoever looks: its owner, or another process."""

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from typing import Any, Literal, get_args

State = Literal["running", "paused", "unknown"]
IdleWish = float | Literal["keep"] | None  # None: it may be idle for as long as it lives


@dataclass(frozen=True, slots=True)
class SandboxStatus:
    """Effective values. `end_at` is the end of its lifetime, UTC; what ends it earlier is its idle time, its
    owner or itself. unknown: the owner does not answer, and all but `id` and `owner_pid` is empty."""

    id: str
    owner_pid: int
    state: State = "unknown"
    image: str = ""
    substrate: str = ""
    labels: Mapping[str, str] | None = None
    started_at: datetime | None = None
    end_at: datetime | None = None
    lifetime_s: float | None = None  # from `started_at` to `end_at`
    idle_s: float | None = None  # None: it may be idle for as long as it lives
    network_version: int = 0

    def has(self, labels: Mapping[str, str]) -> bool:
        """Whether it has each of these, with this value."""
        own = self.labels or {}
        return all(own.get(name) == value for name, value in labels.items())

    def record(self) -> dict[str, Any]:
        """In values of JSON."""
        times = {name: time and time.isoformat() for name, time in self._times().items()}
        return {**asdict(self), "labels": dict(self.labels or {}), **times}

    def _times(self) -> dict[str, datetime | None]:
        return {"started_at": self.started_at, "end_at": self.end_at}


def status_of(record: Mapping[str, Any]) -> SandboxStatus:
    """Of a `record`. ValueError for one that is none."""
    try:
        times = {name: _time(record[name]) for name in ("started_at", "end_at")}
        labels = {str(name): str(value) for name, value in record["labels"].items()}
        fields: dict[str, Any] = {name: record[name] for name in SandboxStatus.__dataclass_fields__}
    except (KeyError, AttributeError, TypeError) as error:
        raise ValueError(f"no status of a sandbox: {error}") from error
    if fields["state"] not in get_args(State):
        raise ValueError(f"no state of a sandbox: {fields['state']!r}")
    fields |= {**times, "labels": labels}
    return SandboxStatus(**fields)


def at(seconds: float) -> datetime:
    """A time of `time.time`, in UTC."""
    return datetime.fromtimestamp(seconds, UTC)


def _time(text: str | None) -> datetime | None:
    return None if text is None else datetime.fromisoformat(text)
