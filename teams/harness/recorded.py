"""The replay harness: recorded answers are forced through the live engine, the tools run for real.

The engine computes every recorded token (prefill, hand-off and decode take their real time); what the tools
give is what the agents go on with. A run whose tools gave something else than was recorded goes on to its
end and is reported as diverged, with the first turn that differs.
"""

from collections.abc import Iterable, Sequence
from pathlib import Path

from protocol.errors import DockyardError, InvalidInput
from teams.agent import AgentLimits, chat_program
from teams.harness.recording import RecordedTurn, Recording, load_recording
from teams.harness.task import Divergence, RunOptions, TeamOutcome, TeamTask, run_program
from teams.member import Turn
from teams.model_client import ChatMessage, Completion, ModelClient
from teams.team import ModelFactory


class ReplayError(DockyardError):
    """The replay cannot go on: the recording has no further answer, or the engine gave another text."""


class RecordedModel:
    """A `ModelClient` that forces one agent's recorded answers, in order, through a live one."""

    def __init__(self, agent: str, turns: Sequence[RecordedTurn], live: ModelClient) -> None:
        self._agent = agent
        self._turns = iter(turns)
        self._live = live

    async def close(self) -> None:
        await self._live.close()

    async def complete(
        self,
        messages: Sequence[ChatMessage],
        *,
        max_tokens: int,
        temperature: float,
        seed: int | None,
        forced: str | None = None,
    ) -> Completion:
        turn = next(self._turns, None)
        if turn is None:
            raise ReplayError(f"the recording has no further answer of {self._agent}")
        completion = await self._live.complete(
            messages,
            max_tokens=max(max_tokens, len(turn.text)),  # a token is at least a character: never cut short
            temperature=temperature,
            seed=seed,
            forced=turn.text if forced is None else forced,
        )
        if completion.text != turn.text:
            raise ReplayError(
                f"{self._agent} was to say {turn.text[:60]!r}, the endpoint said {completion.text[:60]!r}",
                hint="an endpoint that replays must support forced_text",
            )
        return completion


async def run_replay(
    recording: Recording | Path,
    task: TeamTask,
    models: ModelFactory,
    *,
    options: RunOptions | None = None,
) -> TeamOutcome:
    """Replays a recorded team run on a task.

    `models` makes one live client an agent, by the agent's name. Raises `InvalidInput` for a recording of
    another task, `ReplayError` where the lead cannot go on. May be cancelled; nothing is left then.
    """
    script = recording if isinstance(recording, Recording) else load_recording(recording)
    if script.task != task.name:
        raise InvalidInput(f"the recording is of task {script.task!r}, not of {task.name!r}")

    def forced(agent: str) -> ModelClient:
        turns = script.agents.get(agent)
        if turns is None:
            raise InvalidInput(f"the recording has no agent {agent!r}")
        return RecordedModel(agent, turns, models(agent))

    limits = AgentLimits(max_turns=max(map(len, script.agents.values())))
    program = chat_program(task.instruction, limits)
    result, events = await run_program(task, program, forced, options or RunOptions())
    diverged = first_divergence(script, result.transcript)
    return TeamOutcome(task.name, replay=True, result=result, events=events, diverged=diverged)


def first_divergence(recording: Recording, transcript: Iterable[Turn]) -> Divergence | None:
    """The first turn, in time, whose tool gave something else than recorded; else one that is missing."""
    turns = sorted(transcript, key=lambda turn: turn.end_ns)
    for turn in turns:
        recorded = recording.agents[turn.agent][turn.number - 1]
        if recorded.digest != turn.output_digest:
            reason = f"{turn.action or 'no action'} gave {turn.output_digest or 'no output'}, "
            reason += f"recorded is {recorded.digest or 'none'}"
            return Divergence(turn.agent, turn.number, reason, turn.observation)
    happened = {(turn.agent, turn.number) for turn in turns}
    for agent, script in recording.agents.items():
        for number in range(1, len(script) + 1):
            if (agent, number) not in happened:
                return Divergence(agent, number, "this turn did not happen")
    return None
