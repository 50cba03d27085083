"""One agent's hands: everything that it can do, each deed recorded in the team's events."""

from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, replace
from typing import Literal

from protocol.errors import InvalidInput
from protocol.events import Interval, Scalar
from protocol.ids import new_id
from teams.desk import Desk
from teams.mailbox import Mailbox, Message
from teams.model_client import ChatMessage, Completion, ModelClient
from teams.recorder import Recorder
from teams.roster import Outcome, Roster
from teams.workspace import AgentSandbox, CommandResult, Diff, Tree, checked_path, take_diff

EndKind = Literal["done", "submit", "out of turns", "gave up"]


@dataclass(frozen=True, slots=True)
class Ending:
    """How a program ended by itself."""

    kind: EndKind
    summary: str = ""


@dataclass(frozen=True, slots=True)
class Turn:
    """One turn of an agent: what the model said and what came of it."""

    agent: str
    number: int  # from 1
    text: str
    action: str  # the action's kind; "" where the text held none that fits
    observation: str  # as shown to the model
    output_digest: str  # of the whole normalised output; "" for actions that are no tools
    prompt_tokens: int
    completion_tokens: int
    start_ns: int
    end_ns: int


@dataclass(frozen=True, slots=True)
class Waited:
    """What a wait brought. `stuck`: nobody was left who could have ended it."""

    outcomes: tuple[Outcome, ...]
    messages: tuple[Message, ...]
    stuck: bool


Program = Callable[["Member"], Awaitable[Ending]]
Spawn = Callable[[str, Program, str], None]


class Member:
    """An agent of a team. Its program is the only task that calls it; others only take its diff."""

    def __init__(
        self,
        name: str,
        *,
        recorder: Recorder,
        model: ModelClient,
        sandbox: AgentSandbox,
        clean: Tree,
        roster: Roster,
        mailbox: Mailbox,
        peers: Callable[[str], "Member | None"],
        spawn: Spawn,
        cancel: Callable[[str], None],
        keep: Callable[[Turn], None],
    ) -> None:
        self.name = name
        self.recorder = recorder
        self.keep_turn = keep
        self._model = model
        self._sandbox = sandbox
        self._clean = clean
        self._roster = roster
        self._mailbox = mailbox
        self._peers = peers
        self._spawn = spawn
        self._cancel = cancel
        self.desk = Desk()  # a teammate may take the diff while this one works

    @property
    def unread(self) -> int:
        """How many messages wait to be taken."""
        return self._mailbox.pending(self.name)

    async def ask(
        self, messages: Sequence[ChatMessage], *, max_tokens: int, temperature: float, seed: int | None
    ) -> Completion:
        """One model call. Raises `ModelError`; a cancelled call leaves an interval that says so."""
        call = self.recorder.begin("model.decode")
        try:
            completion = await self._model.complete(
                messages, max_tokens=max_tokens, temperature=temperature, seed=seed
            )
        except BaseException as error:
            attributes: dict[str, Scalar] = {"measured": "client", "ended_by": type(error).__name__}
            end_ns = self.recorder.clock.now_ns()
            self.recorder.add(replace(call, end_ns=end_ns, attributes=attributes))
            raise
        # The last phase completes the interval that was begun.
        ids = [*(new_id("ivl") for _ in completion.timeline[1:]), call.id]
        for interval_id, phase in zip(ids, completion.timeline, strict=True):
            attributes: dict[str, Scalar] = {
                "measured": phase.measured,
                "request_id": completion.request_id,
                "prompt_tokens": completion.prompt_tokens,
                "completion_tokens": completion.completion_tokens,
            }
            self.recorder.add(
                Interval(interval_id, self.name, phase.kind, phase.start_ns, phase.end_ns, "", attributes)
            )
        return completion

    async def run(self, command: str, *, timeout_s: float) -> CommandResult:
        """A shell command in the agent's own sandbox."""
        async with self.desk.use(self.recorder, "run", command=command[:200]) as span:
            result = await self._sandbox.run(command, timeout_s=timeout_s)
            span.attributes["exit_code"] = -1 if result.exit_code is None else result.exit_code
            span.attributes["reason"] = result.reason
        return result

    async def write(self, path: str, data: bytes) -> None:
        """Writes a file of the workspace. Raises `InvalidInput` for a path that leads out of it."""
        async with self.desk.use(self.recorder, "write", path=path):
            await self._sandbox.write(checked_path(path), data)

    async def edit(self, path: str, old: str, new: str) -> None:
        """Replaces the one occurrence of `old`.

        Raises `InvalidInput` where the file, or exactly one occurrence, is not there.
        """
        async with self.desk.use(self.recorder, "edit", path=path):
            data = await self._sandbox.read(checked_path(path))
            await self._sandbox.write(checked_path(path), _replaced(path, data, old, new))

    async def take(self, name: str) -> Diff:
        """Puts a teammate's changes, as they are now, into the own workspace."""
        diff = await self._diff_of(name)
        async with self.desk.use(self.recorder, "take", source=name):
            for path, data in diff.changed.items():
                await self._sandbox.write(path, data)
            for path in diff.removed:
                await self._sandbox.remove(path)
        return diff

    async def diff(self) -> Diff:
        """What this agent changed so far. Raises `WorkspaceError` where a diff cannot carry it."""
        async with self.desk.use(self.recorder, "diff"):
            return await self.snapshot()

    def spawn(self, name: str, program: Program, task: str) -> None:
        """Starts a teammate. Returns at once; raises `InvalidInput` for a bad or taken name."""
        self._spawn(name, program, task)

    def cancel(self, name: str) -> None:
        """Ends a teammate's work; one that has ended already is left as it is."""
        self._cancel(name)

    def send(self, receiver: str, text: str) -> None:
        """Puts a message into a teammate's box. Raises as `Mailbox.send` does."""
        if receiver == self.name:
            raise InvalidInput("a message to oneself goes nowhere", hint="name a teammate")
        with self.recorder.interval("harness", f"send {receiver}") as span:
            self._mailbox.send(self.name, receiver, text, span.id)
        self._roster.notify()

    async def wait_message(self) -> Waited:
        """Waits until a message is there, and takes all that are."""
        return await self._wait("message", (), lambda: self.unread > 0, joins=False)

    async def join(self, names: Sequence[str]) -> Waited:
        """Waits until every named teammate has ended, and takes the messages that are there then."""
        others = tuple(dict.fromkeys(names))
        if self.name in others:
            raise InvalidInput("nobody can wait for itself", hint="name teammates")
        for name in others:
            self._roster.outcome(name)  # raises for a stranger
        return await self._wait(
            f"join {', '.join(others)}",
            others,
            lambda: all(self._roster.outcome(name) for name in others),
            joins=True,
        )

    async def wait_any(self, names: Sequence[str]) -> Waited:
        """Waits for a message, or until every named teammate has ended, whatever is first."""
        others = tuple(dict.fromkeys(names))
        return await self._wait(
            f"message or join {', '.join(others)}",
            others,
            lambda: self.unread > 0 or all(self._roster.outcome(name) for name in others),
            joins=True,
        )

    async def _wait(
        self, name: str, others: Sequence[str], ready: Callable[[], bool], *, joins: bool
    ) -> Waited:
        with self.recorder.interval("wait", name) as span:
            stuck = not await self._roster.until(self.name, ready, joins=joins)
            outcomes = tuple(outcome for other in others if (outcome := self._roster.outcome(other)))
            messages = tuple(self._mailbox.take(self.name))
            for outcome in outcomes:
                # What was cancelled was not waited for: its end follows from the canceller's own doing.
                if outcome.last_interval and outcome.state != "cancelled":
                    self.recorder.caused_by("join", outcome.last_interval)
            for message in messages:
                self.recorder.caused_by("message", message.source_interval)
            if stuck:
                span.attributes["stuck"] = True
        return Waited(outcomes, messages, stuck)

    async def _diff_of(self, name: str) -> Diff:
        outcome = self._roster.outcome(name)
        if outcome is not None:
            self._note_cause(outcome.last_interval)
            return outcome.diff
        peer = self._peers(name)
        if peer is None or peer is self:
            raise InvalidInput(f"{name!r} has no workspace to take from yet", hint="wait for it first")
        async with peer.desk.use(self.recorder, "look", source=name):
            return await peer.snapshot()

    async def snapshot(self) -> Diff:
        """The changes so far, recorded nowhere. Only for who holds the desk."""
        return take_diff(self._clean, await self._sandbox.snapshot())

    def _note_cause(self, source: str | None) -> None:
        if source is not None:
            self.recorder.caused_by("join", source)


def _replaced(path: str, data: bytes | None, old: str, new: str) -> bytes:
    if data is None:
        raise InvalidInput(f"there is no file {path!r}", hint="list the folder")
    text = data.decode("utf-8", errors="surrogateescape")
    count = text.count(old) if old else 0
    if count != 1:
        raise InvalidInput(
            f"`old` occurs {count} times in {path}, it must occur once", hint="read the file first"
        )
    return text.replace(old, new).encode("utf-8", errors="surrogateescape")
