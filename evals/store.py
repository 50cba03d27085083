"""What has been run, on disk: runs, their trials, and the model turns of a trial.

SQLite in write-ahead mode, so that a reader never waits for the writer. Every method is one transaction of
about a millisecond and blocks for it. A trial is written before it starts and after each stage: a process
that is killed loses at most the stages under way. One `Store` belongs to one thread.
"""

import json
import time
from collections.abc import Callable, Generator, Iterable, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Literal, Self, TypeVar

import msgspec
from sqlalchemy import Engine, create_engine, event, literal_column, select
from sqlalchemy.engine import URL
from sqlalchemy.engine.interfaces import DBAPIConnection
from sqlalchemy.exc import DatabaseError
from sqlalchemy.orm import Session

from evals.schema import Base, RunRow, ShortfallRow, TrialRow, TurnRow
from evals.verdicts import Verdict
from protocol.errors import InvalidInput
from protocol.ids import new_id

RunStatus = Literal["running", "finished", "interrupted"]
TrialStatus = Literal["planned", "generated", "done"]
Value = TypeVar("Value")


@dataclass(frozen=True, slots=True)
class Run:
    """One evaluation or team run."""

    id: str
    kind: str
    config: dict[str, Any]
    status: RunStatus
    started_s: float
    ended_s: float | None


@dataclass(frozen=True, slots=True)
class Trial:
    """One attempt at one task. `verdict` is None until it is done."""

    id: str
    task_id: str
    attempt: int  # from 0
    status: TrialStatus
    verdict: Verdict | None
    detail: str
    program: str
    grading_ms: float | None


@dataclass(frozen=True, slots=True)
class Turn:
    """One call of a model within a trial."""

    request_id: str
    config: dict[str, Any]
    reply: str
    prompt_tokens: int
    completion_tokens: int
    timings_ms: dict[str, float]


class Store:
    """Opens or makes the database at `path`; a context manager that closes it.

    Raises `InvalidInput` where `path` cannot be opened as a database, and from every method that meets a
    damaged row, which it names. `wall_s` gives seconds since 1970.
    """

    def __init__(self, path: Path, *, wall_s: Callable[[], float] = time.time) -> None:
        self._wall_s = wall_s
        self._engine = _open(path)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Closes the connection; the store cannot be used afterwards. May be called twice."""
        self._engine.dispose()

    @contextmanager
    def _session(self) -> Generator[Session]:
        """One transaction. Raises `InvalidInput` for a file that SQLite cannot read as ours."""
        try:
            with Session(self._engine) as session, session.begin():
                yield session
        except DatabaseError as error:
            raise InvalidInput(
                f"store: {self._engine.url.database}: {error.orig}",
                hint="is it damaged, in use or on a full disk? Moved away, it is made anew",
            ) from error

    def start_run(self, kind: str, config: Mapping[str, Any]) -> str:
        """Records a new run and returns its id."""
        run_id = new_id("run")
        with self._session() as session:
            session.add(
                RunRow(
                    id=run_id,
                    kind=kind,
                    config=json.dumps(config, sort_keys=True),
                    status="running",
                    started_s=self._wall_s(),
                    ended_s=None,
                )
            )
        return run_id

    def end_run(self, run_id: str, status: RunStatus) -> None:
        """Sets how a run stands; "running" opens it again for a resume."""
        with self._session() as session:
            row = _run_row(session, run_id)
            row.status = status
            row.ended_s = None if status == "running" else self._wall_s()

    def note_shortfalls(self, run_id: str, names: Iterable[str]) -> None:
        """Records what a run's sandboxes went without on their host. What is there stays."""
        with self._session() as session:
            for name in names:
                session.merge(ShortfallRow(run_id=run_id, name=name))

    def shortfalls(self, run_id: str) -> tuple[str, ...]:
        """All of a run, in alphabetical order."""
        with self._session() as session:
            rows = session.scalars(select(ShortfallRow).filter_by(run_id=run_id))
            return tuple(sorted(row.name for row in rows))

    def run(self, run_id: str) -> Run:
        """Raises `InvalidInput` for an unknown id."""
        with self._session() as session:
            return _run_value(_run_row(session, run_id))

    def runs(self) -> tuple[Run, ...]:
        """All runs, oldest first."""
        with self._session() as session:
            rows = session.scalars(select(RunRow).order_by(RunRow.started_s, RunRow.id))
            return tuple(_run_value(row) for row in rows)

    def plan_trial(self, run_id: str, task_id: str, attempt: int) -> Trial:
        """The run's trial of this task and attempt: the one on record, or a new one that is planned."""
        with self._session() as session:
            row = session.scalars(
                select(TrialRow).filter_by(run_id=run_id, task_id=task_id, attempt=attempt)
            ).one_or_none()
            if row is None:
                row = TrialRow(
                    id=new_id("trial"), run_id=run_id, task_id=task_id, attempt=attempt, status="planned"
                )
                row.detail, row.program = "", ""
                session.add(row)
            return _trial_value(row)

    def record_turn(self, trial_id: str, turn: Turn) -> None:
        """Appends a model call to a trial, which is "generated" from here on."""
        with self._session() as session:
            _trial_row(session, trial_id).status = "generated"
            session.add(
                TurnRow(
                    trial_id=trial_id,
                    request_id=turn.request_id,
                    config=json.dumps(turn.config, sort_keys=True),
                    reply=turn.reply,
                    prompt_tokens=turn.prompt_tokens,
                    completion_tokens=turn.completion_tokens,
                    timings_ms=json.dumps(turn.timings_ms),
                )
            )

    def record_verdict(
        self, trial_id: str, verdict: Verdict, *, detail: str, program: str, grading_ms: float | None
    ) -> None:
        """Ends a trial. A later verdict of the same trial, from a resumed run, replaces it."""
        with self._session() as session:
            row = _trial_row(session, trial_id)
            row.status, row.verdict, row.detail = "done", verdict, detail
            row.program, row.grading_ms = program, grading_ms

    def trials(self, run_id: str) -> tuple[Trial, ...]:
        """The trials of a run, in the order in which they were planned."""
        with self._session() as session:
            rows = session.scalars(
                select(TrialRow).filter_by(run_id=run_id).order_by(literal_column("rowid"))
            )
            return tuple(_trial_value(row) for row in rows)

    def turns(self, trial_id: str) -> tuple[Turn, ...]:
        """The model calls of a trial, in order."""
        with self._session() as session:
            rows = session.scalars(select(TurnRow).filter_by(trial_id=trial_id).order_by(TurnRow.id))
            return tuple(_turn_value(row) for row in rows)


def _open(path: Path) -> Engine:
    engine = create_engine(URL.create("sqlite", database=str(path)))
    event.listen(engine, "connect", _configure)
    try:
        Base.metadata.create_all(engine)
    except DatabaseError as error:
        engine.dispose()
        raise InvalidInput(
            f"store: {path} cannot be opened as a database: {error.orig}",
            hint="name a writable file that is new or that Dockyard made",
        ) from error
    return engine


def _configure(connection: DBAPIConnection, _record: object) -> None:
    cursor = connection.cursor()
    # NORMAL: a commit survives the death of the process; only a power cut can lose the last ones.
    for pragma in ("journal_mode=WAL", "synchronous=NORMAL", "foreign_keys=ON", "busy_timeout=10000"):
        cursor.execute(f"PRAGMA {pragma}")
    cursor.close()


def _run_row(session: Session, run_id: str) -> RunRow:
    row = session.get(RunRow, run_id)
    if row is None:
        raise InvalidInput(f"run_id: the store has no run {run_id!r}")
    return row


def _trial_row(session: Session, trial_id: str) -> TrialRow:
    row = session.get(TrialRow, trial_id)
    if row is None:
        raise InvalidInput(f"trial_id: the store has no trial {trial_id!r}")
    return row


def _run_value(row: RunRow) -> Run:
    where = f"run {row.id!r}"
    fields = {
        "id": row.id,
        "kind": row.kind,
        "config": _json(row.config, where, "config"),
        "status": row.status,
        "started_s": row.started_s,
        "ended_s": row.ended_s,
    }
    return _checked(fields, Run, where)


def _trial_value(row: TrialRow) -> Trial:
    fields = {
        "id": row.id,
        "task_id": row.task_id,
        "attempt": row.attempt,
        "status": row.status,
        "verdict": row.verdict,
        "detail": row.detail,
        "program": row.program,
        "grading_ms": row.grading_ms,
    }
    return _checked(fields, Trial, f"trial {row.id!r}")


def _turn_value(row: TurnRow) -> Turn:
    where = f"turn {row.id} of trial {row.trial_id!r}"
    fields = {
        "request_id": row.request_id,
        "config": _json(row.config, where, "config"),
        "reply": row.reply,
        "prompt_tokens": row.prompt_tokens,
        "completion_tokens": row.completion_tokens,
        "timings_ms": _json(row.timings_ms, where, "timings_ms"),
    }
    return _checked(fields, Turn, where)


def _json(text: object, where: str, column: str) -> object:
    """What a column of JSON holds. SQLite keeps any type in any column."""
    try:
        if isinstance(text, str):
            return json.loads(text)
    except (ValueError, RecursionError) as error:
        raise _damaged(where, f"{column} is not JSON: {error}") from error
    raise _damaged(where, f"{column} is {type(text).__name__}, not text")


def _checked(fields: Mapping[str, object], kind: type[Value], where: str) -> Value:
    """A row as a value of its types, whatever has written it."""
    try:
        return msgspec.convert(fields, kind)
    except msgspec.ValidationError as error:
        raise _damaged(where, str(error)) from error


def _damaged(where: str, what: str) -> InvalidInput:
    return InvalidInput(
        f"store: {where} is damaged: {what}", hint="mend or delete that row, or start a new run"
    )
