"""Writes one agent's life into the event log: intervals in program order, and the edges to other agents."""

from collections.abc import Generator, Iterable
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Protocol

from protocol.clock import Clock
from protocol.events import Edge, EdgeKind, Interval, IntervalKind, Scalar
from protocol.ids import new_id


class EventSink(Protocol):
    """Where events go, in the order in which they became known. Does not block for long."""

    def begin(self, interval: Interval, /) -> None:
        """Notes an interval whose end is not known yet; `add` with the same id completes it."""
        ...

    def add(self, event: Interval | Edge, /) -> None:
        """Appends one event."""
        ...


@dataclass(slots=True)
class Span:
    """An interval that is still open: its name and attributes may be completed until it closes."""

    id: str
    name: str
    attributes: dict[str, Scalar] = field(default_factory=dict[str, Scalar])


class Recorder:
    """One agent's pen. Not shared between tasks."""

    def __init__(self, agent: str, sink: EventSink, clock: Clock) -> None:
        self.agent = agent
        self.clock = clock
        self.last_interval: str | None = None  # the agent's latest closed interval
        self._sink = sink
        self._causes: list[tuple[EdgeKind, str]] = []

    def caused_by(self, kind: EdgeKind, source: str) -> None:
        """The next interval that closes is the target of an edge from `source`."""
        self._causes.append((kind, source))

    @contextmanager
    def interval(self, kind: IntervalKind, name: str = "", **attributes: Scalar) -> Generator[Span]:
        """Records the time inside the block. An exception is noted, by its kind, and goes on."""
        begun = self.begin(kind, name, **attributes)
        span = Span(begun.id, name, dict(attributes))
        try:
            yield span
        except BaseException as error:
            span.attributes["ended_by"] = type(error).__name__
            raise
        finally:
            end_ns = self.clock.now_ns()
            self.add(replace(begun, end_ns=end_ns, name=span.name, attributes=span.attributes))

    def begin(self, kind: IntervalKind, name: str = "", **attributes: Scalar) -> Interval:
        """Notes that an interval starts now: a crash leaves that. `add` with its id completes it."""
        now_ns = self.clock.now_ns()
        interval = Interval(new_id("ivl"), self.agent, kind, now_ns, now_ns, name, dict(attributes))
        self._sink.begin(interval)
        return interval

    def add(self, interval: Interval) -> None:
        """Records an interval that was measured elsewhere, as this agent's next one."""
        self._sink.add(interval)
        causes, self._causes = self._causes, []
        self.edges(interval.id, causes)
        self.last_interval = interval.id

    def edges(self, target: str, causes: Iterable[tuple[EdgeKind, str]]) -> None:
        """Records edges into `target`."""
        for kind, source in causes:
            self._sink.add(Edge(kind, source, target))
