"""What a harness is given, and what it gives back."""

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from protocol.clock import Clock, SystemClock
from protocol.ids import new_id
from teams.events import EventLog
from teams.member import Program
from teams.team import ModelFactory, Team, TeamLimits, TeamResult, Verifier
from teams.workspace import SandboxFactory, Tree


@dataclass(frozen=True, slots=True)
class TeamTask:
    """A problem for a team, and the ground that it is solved on."""

    name: str
    instruction: str  # what the lead is told
    workspace: Tree
    sandboxes: SandboxFactory
    verify: Verifier | None = None  # the hidden tests


@dataclass(frozen=True, slots=True)
class RunOptions:
    """How a team is run, whatever it does."""

    run_id: str = field(default_factory=lambda: new_id("run"))
    limits: TeamLimits = field(default_factory=TeamLimits)
    clock: Clock = field(default_factory=SystemClock)
    events_path: Path | None = None  # where the events are kept, and beside them the mail; None: in memory
    progress: Callable[[str], None] = lambda line: None  # one short line an event; must not block


@dataclass(frozen=True, slots=True)
class Divergence:
    """The first turn of a replay that did not do what was recorded."""

    agent: str
    number: int  # of the turn, from 1
    reason: str
    observation: str = ""  # what really came, clipped


@dataclass(frozen=True, slots=True)
class TeamOutcome:
    """A finished team run with its events."""

    task: str
    replay: bool
    result: TeamResult
    events: EventLog
    diverged: Divergence | None = None


async def run_program(
    task: TeamTask, program: Program, models: ModelFactory, options: RunOptions
) -> tuple[TeamResult, EventLog]:
    """Runs a lead's program on a task. Raises and is cancelled as `Team.run`; the log is closed then."""
    log = EventLog(options.run_id, options.events_path)
    team = Team(
        models=models,
        sandboxes=task.sandboxes,
        workspace=task.workspace,
        events=log,
        verify=task.verify,
        limits=options.limits,
        clock=options.clock,
        run_id=options.run_id,
        journal=options.events_path and options.events_path.with_suffix(".mail.jsonl"),
        progress=options.progress,
    )
    try:
        return await team.run(program), log
    finally:
        log.close()
