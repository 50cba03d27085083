"""The tables of the run store. JSON is kept as text, so that any SQLite tool can read it."""

from sqlalchemy import ForeignKey, Text, UniqueConstraint
from sqlalchemy.orm import DeclarativeBase, Mapped, mapped_column


class Base(DeclarativeBase):
    """The tables of one database."""


class RunRow(Base):
    """One evaluation or team run."""

    __tablename__ = "runs"
    id: Mapped[str] = mapped_column(primary_key=True)
    kind: Mapped[str]  # "humaneval", "team", …
    config: Mapped[str] = mapped_column(Text)  # resolved, JSON
    status: Mapped[str]
    started_s: Mapped[float]  # seconds since 1970
    ended_s: Mapped[float | None]


class ShortfallRow(Base):
    """What a run's sandboxes went without on their host."""

    __tablename__ = "shortfalls"
    run_id: Mapped[str] = mapped_column(ForeignKey("runs.id"), primary_key=True)
    name: Mapped[str] = mapped_column(primary_key=True)


class TrialRow(Base):
    """One attempt at one task."""

    __tablename__ = "trials"
    __table_args__ = (UniqueConstraint("run_id", "task_id", "attempt"),)
    id: Mapped[str] = mapped_column(primary_key=True)
    run_id: Mapped[str] = mapped_column(ForeignKey("runs.id"))
    task_id: Mapped[str]
    attempt: Mapped[int]
    status: Mapped[str]
    verdict: Mapped[str | None]
    detail: Mapped[str] = mapped_column(Text, default="")
    program: Mapped[str] = mapped_column(Text, default="")
    grading_ms: Mapped[float | None]


class TurnRow(Base):
    """One call of a model within a trial."""

    __tablename__ = "turns"
    id: Mapped[int] = mapped_column(primary_key=True)
    trial_id: Mapped[str] = mapped_column(ForeignKey("trials.id"), index=True)
    request_id: Mapped[str]
    config: Mapped[str] = mapped_column(Text)  # sampling, JSON
    reply: Mapped[str] = mapped_column(Text)
    prompt_tokens: Mapped[int]
    completion_tokens: Mapped[int]
    timings_ms: Mapped[str] = mapped_column(Text)  # JSON: phase -> milliseconds
