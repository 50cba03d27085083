"""The event log of one team run: append-only, thread-safe, optionally kept in a JSONL file.

The first line of a file is a header (`run`), every further line one record: an `interval`, an `edge`, or the
`begin` of an interval whose end is not known yet. A crash leaves the begins without an end; `unfinished`
closes them at the last time that the log knows and marks them.
"""

import json
import os
import threading
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from types import TracebackType
from typing import Annotated, BinaryIO, Literal, Self, get_args

from pydantic import BaseModel, ConfigDict, Field, TypeAdapter, ValidationError

from protocol.errors import InvalidInput, ResourceShortage
from protocol.events import Edge, EdgeKind, Interval, IntervalKind, Scalar

FORMAT_VERSION = 1
_INTERVAL_KINDS: frozenset[str] = frozenset(get_args(IntervalKind))
_EDGE_KINDS: frozenset[str] = frozenset(get_args(EdgeKind))


class _Record(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)


class _Header(_Record):
    record: Literal["run"]
    version: Literal[1]
    run_id: str


class _Begin(_Record):
    record: Literal["begin"]
    id: str
    agent: str
    kind: IntervalKind
    start_ns: int
    name: str = ""
    attributes: dict[str, Scalar] = Field(default_factory=dict[str, Scalar])


class _Interval(_Record):
    record: Literal["interval"]
    id: str
    agent: str
    kind: IntervalKind
    start_ns: int
    end_ns: int
    name: str = ""
    attributes: dict[str, Scalar] = Field(default_factory=dict[str, Scalar])


class _Edge(_Record):
    record: Literal["edge"]
    kind: EdgeKind
    source: str
    target: str


_AnyRecord = _Header | _Begin | _Interval | _Edge
_RECORDS: TypeAdapter[_AnyRecord] = TypeAdapter(Annotated[_AnyRecord, Field(discriminator="record")])


class EventLog:
    """Intervals and edges of one run in the order of their arrival.

    Every method may be called from any thread. With a `path`, each record reaches the operating system before
    `add` returns (it survives the death of this process) and the disk at `checkpoint` and `close` (it
    survives the death of the host); so `add` blocks for one write. Repeating a record is harmless, which lets
    emitters deliver at least once.
    """

    def __init__(self, run_id: str, path: Path | None = None) -> None:
        """Start an empty log; `path` must not hold one already (InvalidInput)."""
        self.run_id = run_id
        self.torn_bytes = 0
        """Length of the unreadable last line that `load` left out: the write that a crash cut short."""
        self._lock = threading.Lock()
        self._intervals: dict[str, Interval] = {}
        self._begun: dict[str, Interval] = {}
        self._edges: dict[Edge, None] = {}
        self._last_ns: int | None = None
        self._closed = False
        self._path = path
        self._file: BinaryIO | None = None
        if path is not None:
            self._file = _create(path)
            self._write({"record": "run", "version": FORMAT_VERSION, "run_id": run_id})

    @property
    def intervals(self) -> tuple[Interval, ...]:
        """The intervals that have ended, in the order of their arrival."""
        with self._lock:
            return tuple(self._intervals.values())

    @property
    def edges(self) -> tuple[Edge, ...]:
        """The edges, each once, in the order of their arrival."""
        with self._lock:
            return tuple(self._edges)

    @property
    def unfinished(self) -> tuple[Interval, ...]:
        """Intervals begun and never ended, closed at the log's last time, with `unfinished` = True."""
        with self._lock:
            last_ns = self._last_ns or 0
            return tuple(_closed_at(interval, last_ns) for interval in self._begun.values())

    def begin(self, interval: Interval) -> None:
        """Note that `interval` has started; its `end_ns` is ignored. `add` with the same id completes it."""
        self._check_interval(interval)
        with self._lock:
            if interval.id in self._intervals or interval.id in self._begun:
                raise _duplicate(interval.id)
            self._write(_interval_record("begin", interval))
            self._begun[interval.id] = interval
            self._see(interval.start_ns)

    def add(self, event: Interval | Edge) -> None:
        """Append one event. InvalidInput: end before start, unknown kind, or an id with other content."""
        if isinstance(event, Edge):
            self._add_edge(event)
        else:
            self._add_interval(event)

    def extend(self, events: Iterable[Interval | Edge]) -> None:
        """Append each event in turn; those before a faulty one stay."""
        for event in events:
            self.add(event)

    def checkpoint(self) -> None:
        """Force what is written onto the disk. Blocks for an fsync; nothing to do without a file."""
        with self._lock:
            self._sync()

    def close(self) -> None:
        """Checkpoint and close the file. The log stays readable; it takes no further event."""
        with self._lock:
            if self._file is not None:
                self._sync()
                self._file.close()
                self._file = None
            self._closed = True

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    @classmethod
    def load(cls, path: Path) -> "EventLog":
        """Read a log file into memory; the file itself is not appended to.

        A last line cut short by a crash is left out and counted in `torn_bytes`. Anything else that cannot
        be read, an unknown kind or field included, is InvalidInput with the line's number.
        """
        try:
            *lines, tail = path.read_bytes().split(b"\n")
        except OSError as error:
            raise InvalidInput(f"event log {path}: {error.strerror}") from error
        records = [_parse(line, path, number) for number, line in enumerate(lines, start=1)]
        last = _parse_torn(tail)
        if last is not None:
            records.append(last)
        if not records or not isinstance(records[0], _Header):
            raise InvalidInput(
                f"event log {path}: no header on its first line", hint="this is not an event log"
            )
        log = cls(records[0].run_id)
        for number, record in enumerate(records[1:], start=2):
            log._restore(record, path, number)
        log.torn_bytes = len(tail) if last is None else 0
        return log

    def _restore(self, record: _AnyRecord, path: Path, number: int) -> None:
        try:
            match record:
                case _Edge():
                    self.add(Edge(record.kind, record.source, record.target))
                case _Interval():
                    self.add(_interval_value(record, record.end_ns))
                case _Begin():
                    self.begin(_interval_value(record, record.start_ns))
                case _Header():
                    raise InvalidInput("a second header", hint="two logs were joined: split them")
        except InvalidInput as error:
            raise InvalidInput(
                f"event log {path}, line {number}: {error.message}", hint=error.hint
            ) from error

    def _add_interval(self, interval: Interval) -> None:
        self._check_interval(interval)
        if interval.end_ns < interval.start_ns:
            raise InvalidInput(
                f"interval {interval.id}: end_ns {interval.end_ns} lies before start_ns {interval.start_ns}",
                hint="take both from one host's monotonic clock",
            )
        with self._lock:
            known = self._intervals.get(interval.id)
            if known == interval:
                return
            begun = self._begun.get(interval.id)
            if known is not None or (begun is not None and begun.agent != interval.agent):
                raise _duplicate(interval.id)
            self._write(_interval_record("interval", interval))
            self._intervals[interval.id] = interval
            self._begun.pop(interval.id, None)
            self._see(interval.end_ns)

    def _add_edge(self, edge: Edge) -> None:
        if edge.kind not in _EDGE_KINDS:
            raise InvalidInput(f"edge kind {edge.kind!r} is unknown", hint=_one_of(_EDGE_KINDS))
        if edge.source == edge.target:
            raise InvalidInput(f"{edge.kind} edge from interval {edge.source!r} to itself")
        with self._lock:
            if edge in self._edges:
                return
            self._write({"record": "edge", "kind": edge.kind, "source": edge.source, "target": edge.target})
            self._edges[edge] = None

    def _check_interval(self, interval: Interval) -> None:
        if interval.kind not in _INTERVAL_KINDS:
            raise InvalidInput(
                f"interval {interval.id}: kind {interval.kind!r} is unknown", hint=_one_of(_INTERVAL_KINDS)
            )
        if not interval.id or not interval.agent:
            raise InvalidInput(f"interval {interval.id!r} of agent {interval.agent!r}: neither may be empty")

    def _see(self, time_ns: int) -> None:
        self._last_ns = time_ns if self._last_ns is None else max(self._last_ns, time_ns)

    def _write(self, record: dict[str, object]) -> None:
        if self._closed:
            raise InvalidInput(f"event log of {self.run_id} is closed", hint="add events before close()")
        if self._file is None:
            return
        # Tool names and messages may hold lone surrogates, which UTF-8 cannot carry.
        line = json.dumps(record, ensure_ascii=False, separators=(",", ":")).encode("utf-8", "replace")
        try:
            self._file.write(line + b"\n")
            self._file.flush()
        except OSError as error:
            raise ResourceShortage(f"event log {self._path}: {error.strerror}") from error

    def _sync(self) -> None:
        if self._file is None:
            return
        try:
            self._file.flush()
            os.fsync(self._file.fileno())
        except OSError as error:
            raise ResourceShortage(f"event log {self._path}: {error.strerror}") from error


def _create(path: Path) -> BinaryIO:
    try:
        return path.open("xb")
    except FileExistsError as error:
        raise InvalidInput(
            f"event log {path} exists already", hint="choose a new path, or read it with EventLog.load"
        ) from error
    except OSError as error:
        raise InvalidInput(f"event log {path}: {error.strerror}") from error


def _closed_at(interval: Interval, time_ns: int) -> Interval:
    end_ns = max(interval.start_ns, time_ns)
    return replace(interval, end_ns=end_ns, attributes={**interval.attributes, "unfinished": True})


def _interval_record(record: Literal["interval", "begin"], interval: Interval) -> dict[str, object]:
    fields: dict[str, object] = {
        "record": record,
        "id": interval.id,
        "agent": interval.agent,
        "kind": interval.kind,
        "start_ns": interval.start_ns,
    }
    if record == "interval":
        fields["end_ns"] = interval.end_ns
    return fields | {"name": interval.name, "attributes": interval.attributes}


def _interval_value(record: _Interval | _Begin, end_ns: int) -> Interval:
    return Interval(
        record.id, record.agent, record.kind, record.start_ns, end_ns, record.name, record.attributes
    )


def _parse(line: bytes, path: Path, number: int) -> _AnyRecord:
    try:
        return _RECORDS.validate_json(line)
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        where = ".".join(str(part) for part in first["loc"]) or "the record"
        raise InvalidInput(
            f"event log {path}, line {number}: {where}: {first['msg']} (got {str(first['input'])[:80]!r})"
        ) from error


def _parse_torn(tail: bytes) -> _AnyRecord | None:
    """The record of a last line without its newline, or None where the line was cut short (or is empty)."""
    try:
        return _RECORDS.validate_json(tail)
    except ValidationError as error:
        if tail and error.errors()[0]["type"] != "json_invalid":
            raise InvalidInput(f"event log: its last line is no known record: {tail[:80]!r}") from error
        return None


def _duplicate(interval_id: str) -> InvalidInput:
    return InvalidInput(
        f"interval id {interval_id!r} is there already with other content", hint="give each interval a new id"
    )


def _one_of(kinds: frozenset[str]) -> str:
    return "one of " + ", ".join(sorted(kinds))
