"""A team at work: a lead, the teammates that it starts, and the guarantee that nothing of them remains.

Everything runs in one task group of one event loop; the models are behind HTTP and the tools in sandboxes.
However a run ends (submitted, out of time, cancelled, failed), every task has ended and every sandbox is
killed before `Team.run` returns; one that could not be killed is named, and costs nobody's finished work.
"""

import asyncio
import re
from collections.abc import Awaitable, Callable, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Literal

from protocol.clock import Clock, SystemClock
from protocol.errors import DockyardError, InvalidInput
from protocol.events import Scalar
from protocol.ids import new_id
from teams.mailbox import Mailbox
from teams.member import Ending, Member, Program, Turn
from teams.model_client import ModelClient
from teams.recorder import EventSink, Recorder
from teams.roster import AGENT_NAME, Outcome, Roster
from teams.workspace import AgentSandbox, Diff, SandboxFactory, Tree, WorkspaceError

LEAD = "lead"
_SNAPSHOT_S = 30.0  # beyond the deadline, for the lead's changes


@dataclass(frozen=True, slots=True)
class TeamLimits:
    """Bounds of one team run."""

    deadline_s: float = 1_800.0  # wall time of the agents' work; the hidden tests have their own
    max_members: int = 8  # the lead counts
    mailbox_capacity: int = 32


@dataclass(frozen=True, slots=True)
class Verdict:
    """What the hidden tests said about a diff."""

    solved: bool
    detail: str
    passed: int = 0
    failed: int = 0
    shortfalls: tuple[str, ...] = ()  # of the sandbox that they ran in: what its host could not give it


Verifier = Callable[[Diff], Awaitable[Verdict]]
ModelFactory = Callable[[str], ModelClient]
TeamEnd = Literal["done", "submit", "out of turns", "gave up", "deadline"]


@dataclass(frozen=True, slots=True)
class TeamResult:
    """How a team run went. Its events are in the sink that the team was given."""

    run_id: str
    ended: TeamEnd
    verdict: Verdict | None  # None where nothing was verified
    diff: Diff
    outcomes: tuple[Outcome, ...]
    transcript: tuple[Turn, ...]
    leaks: tuple[str, ...] = ()  # a line for each sandbox or connection that could not be freed
    shortfalls: tuple[str, ...] = ()  # of all its sandboxes, the graders' too

    @property
    def solved(self) -> bool:
        """Whether the hidden tests accept the diff."""
        return self.verdict is not None and self.verdict.solved


@dataclass(slots=True)
class _Crew:
    """What one run holds while it lasts."""

    group: asyncio.TaskGroup
    roster: Roster
    mailbox: Mailbox
    deadline: asyncio.Timeout
    tasks: dict[str, asyncio.Task[Outcome]] = field(default_factory=dict[str, asyncio.Task[Outcome]])
    members: dict[str, Member] = field(default_factory=dict[str, Member])
    transcript: list[Turn] = field(default_factory=list[Turn])


class Team:
    """Runs one task with a lead and the teammates that it starts. Use it for one run."""

    def __init__(
        self,
        *,
        models: ModelFactory,
        sandboxes: SandboxFactory,
        workspace: Tree,
        events: EventSink,
        verify: Verifier | None = None,
        limits: TeamLimits | None = None,
        clock: Clock | None = None,
        run_id: str | None = None,
        journal: Path | None = None,
        progress: Callable[[str], None] = lambda line: None,
    ) -> None:
        self.run_id = run_id or new_id("run")
        self._models = models
        self._sandboxes = sandboxes
        self._workspace = workspace
        self._events = events
        self._verify = verify
        self._limits = limits or TeamLimits()
        self._clock = clock or SystemClock()
        self._journal = journal
        self._progress = progress
        self._open: dict[str, AgentSandbox] = {}
        self._endings: dict[str, Ending] = {}
        self._failure: Exception | None = None  # what ended the lead
        self._late: dict[str, Diff] = {}  # what the deadline found
        self._leaks: list[str] = []
        self._shortfalls: set[str] = set()

    def check_integrity(self) -> list[str]:
        """Names of agents whose sandbox is still open; after a run, those that could not be killed."""
        return sorted(self._open)

    async def run(self, program: Program) -> TeamResult:
        """Runs the lead's program to its end, then the hidden tests.

        The deadline ends the run with what the lead has changed by then (read within 30 s more, or nothing)
        and no verdict. Raises what ended the lead, a `DockyardError` where it is not a fault of ours; a
        teammate's failure is told to those who wait for it. May be cancelled.
        """
        mailbox = Mailbox(capacity=self._limits.mailbox_capacity, journal=self._journal)
        transcript: list[Turn] = []
        roster = Roster()
        try:
            async with asyncio.timeout(self._limits.deadline_s) as deadline, asyncio.TaskGroup() as group:
                crew = _Crew(group, roster, mailbox, deadline, transcript=transcript)
                lead = await self._start(crew, LEAD, program, cause=None)
                await self._dismiss(crew)
        except TimeoutError:
            self._progress(f"deadline of {self._limits.deadline_s:g} s reached")
            reached = roster.outcome(LEAD)
            return self._result("deadline", None, reached.diff if reached else Diff(), roster, transcript)
        finally:
            mailbox.close()
        if self._failure is not None:
            raise self._failure
        verdict = await self._verdict(lead)
        return self._result(self._endings[LEAD].kind, verdict, lead.diff, roster, transcript)

    def _start(self, crew: _Crew, name: str, program: Program, cause: str | None) -> asyncio.Task[Outcome]:
        crew.roster.join(name)
        crew.mailbox.open_box(name)
        task = crew.group.create_task(self._live(crew, name, program, cause), name=f"{self.run_id}.{name}")
        crew.tasks[name] = task
        task.add_done_callback(lambda _: self._settle(crew, name))
        return task

    def _settle(self, crew: _Crew, name: str) -> None:
        # A task that is cancelled before its first step runs none of its own clean-up.
        if name in crew.roster.live:
            crew.roster.finish(Outcome(name, "cancelled", "was ended before it began"))

    async def _live(self, crew: _Crew, name: str, program: Program, cause: str | None) -> Outcome:
        """One agent's life, from its first interval to its outcome."""
        recorder = Recorder(name, self._events, self._clock)
        outcome = Outcome(name, "cancelled", "was ended by the team")
        try:
            if cause is not None:
                recorder.caused_by("spawn", cause)
            with recorder.interval("harness", "start"):
                self._progress(f"{name} starts")
            ending, diff = await self._work(crew, name, program, recorder)
            outcome = Outcome(name, "done", ending.summary, diff, recorder.last_interval)
        except Exception as error:  # one agent's fault, whatever it is, ends that agent and not its team
            outcome = Outcome(name, "failed", _told(error), Diff(), recorder.last_interval)
            if name == LEAD:
                self._failure = error
        finally:
            if outcome.state == "cancelled":
                outcome = replace(
                    outcome, diff=self._late.get(name, Diff()), last_interval=recorder.last_interval
                )
            crew.members.pop(name, None)
            crew.roster.finish(outcome)
            self._progress(f"{name} {outcome.state}: {outcome.summary}"[:160])
        return outcome

    async def _work(
        self, crew: _Crew, name: str, program: Program, recorder: Recorder
    ) -> tuple[Ending, Diff]:
        async with AsyncExitStack() as held:
            with recorder.interval("harness", "connect"):
                model = self._models(name)
            held.push_async_callback(_undisturbed, lambda: self._free(f"{name}'s connection", model.close))
            with recorder.interval("sandbox.create") as span:
                sandbox = await self._sandboxes(f"{self.run_id}.{name}", self._workspace)
                self._note(span.attributes, sandbox.shortfalls)
            self._open[name] = sandbox
            held.push_async_callback(
                _undisturbed, lambda: self._free(f"{name}'s sandbox", lambda: self._close(name, sandbox))
            )
            member = self._member(crew, name, recorder, model, sandbox)
            crew.members[name] = member
            try:
                self._endings[name], diff = await _finish(member, await program(member))
            except asyncio.CancelledError:
                if name == LEAD and crew.deadline.expired():
                    self._late[name] = await _late_diff(member)
                raise
            return self._endings[name], diff

    def _note(self, attributes: dict[str, Scalar], shortfalls: Sequence[str]) -> None:
        if shortfalls:
            attributes["shortfalls"] = "; ".join(shortfalls)
            self._shortfalls.update(shortfalls)

    async def _free(self, what: str, free: Callable[[], Awaitable[None]]) -> None:
        # Told, never raised: what the agent has handed in is worth more than a clean end.
        try:
            await free()
        except Exception as error:
            leak = f"{what} could not be freed: {_told(error)}"
            self._leaks.append(leak)
            self._progress(leak[:160])

    async def _close(self, name: str, sandbox: AgentSandbox) -> None:
        await sandbox.kill()
        del self._open[name]

    def _member(
        self, crew: _Crew, name: str, recorder: Recorder, model: ModelClient, sandbox: AgentSandbox
    ) -> Member:
        def spawn(child: str, program: Program, task: str) -> None:
            self._spawn(crew, recorder, child, program, task)

        def cancel(other: str) -> None:
            if (task := crew.tasks.get(other)) is not None:
                task.cancel()

        return Member(
            name,
            recorder=recorder,
            model=model,
            sandbox=sandbox,
            clean=self._workspace,
            roster=crew.roster,
            mailbox=crew.mailbox,
            peers=crew.members.get,
            spawn=spawn,
            cancel=cancel,
            keep=lambda turn: self._keep(crew, turn),
        )

    def _spawn(self, crew: _Crew, recorder: Recorder, name: str, program: Program, task: str) -> None:
        if recorder.agent != LEAD:
            raise InvalidInput("only the lead starts teammates", hint="send the lead a message")
        if not re.fullmatch(AGENT_NAME, name):
            raise InvalidInput(f"{name!r} is no name for an agent", hint="a-z, 0-9, - and _, at most 16")
        if len(crew.roster.names()) >= self._limits.max_members:
            raise InvalidInput(f"the team has its {self._limits.max_members} members", hint="do it yourself")
        with recorder.interval("harness", f"spawn {name}", task=task[:200]) as span:
            pass
        self._start(crew, name, program, cause=span.id)

    def _keep(self, crew: _Crew, turn: Turn) -> None:
        crew.transcript.append(turn)
        said = turn.observation.splitlines()[0] if turn.observation else ""
        self._progress(f"{turn.agent} {turn.number}: {turn.action or 'no action'}: {said}"[:160])

    async def _dismiss(self, crew: _Crew) -> None:
        """Ends the teammates that still work: the lead has decided."""
        for name in crew.roster.live:
            crew.tasks[name].cancel()
        await asyncio.gather(*crew.tasks.values(), return_exceptions=True)

    async def _verdict(self, lead: Outcome) -> Verdict | None:
        if self._verify is None:
            return None
        recorder = Recorder(LEAD, self._events, self._clock)
        with recorder.interval("verify", "hidden tests") as span:
            verdict = await self._verify(lead.diff)
            span.attributes.update(solved=verdict.solved, passed=verdict.passed, failed=verdict.failed)
            self._note(span.attributes, verdict.shortfalls)
        self._progress(f"hidden tests: {verdict.detail}")
        return verdict

    def _result(
        self, ended: TeamEnd, verdict: Verdict | None, diff: Diff, roster: Roster, transcript: list[Turn]
    ) -> TeamResult:
        outcomes = tuple(o for name in roster.names() if (o := roster.outcome(name)) is not None)
        leaks, shortfalls = tuple(self._leaks), tuple(sorted(self._shortfalls))
        return TeamResult(
            self.run_id, ended, verdict, diff, outcomes, tuple(transcript), leaks=leaks, shortfalls=shortfalls
        )


async def _finish(member: Member, ending: Ending) -> tuple[Ending, Diff]:
    try:
        return ending, await member.diff()
    except WorkspaceError as error:  # the agent's doing, not the platform's: it has nothing to hand in
        return Ending("gave up", f"its changes were refused: {error}"), Diff()


async def _late_diff(member: Member) -> Diff:
    """What the lead has changed when the deadline comes; nothing where it cannot be read in its time."""
    try:
        async with asyncio.timeout(_SNAPSHOT_S):
            return await member.diff()
    except (DockyardError, OSError):  # TimeoutError is one
        return Diff()


def _told(error: Exception) -> str:
    return str(error) if isinstance(error, DockyardError) else f"{type(error).__name__}: {error}"


async def _undisturbed(free: Callable[[], Awaitable[None]]) -> None:
    # Shielded: a second cancellation must not leave anything behind.
    await asyncio.shield(asyncio.ensure_future(free()))
