"""A chatting agent: messages → model → one action → run it → append, until it is done."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

from teams.digests import digest
from teams.member import Ending, Member, Program, Turn
from teams.model_client import ChatMessage
from teams.tools import ActionError, Observation, parse_action, perform

_SYSTEM = """\
You are {name}, an engineer in a team. The code is in /workspace. Answer with one short thought and ONE block:
```action
{{"do": "run", "cmd": "ls"}}
```
Actions: run cmd; write path content; edit path old new; send to text; wait for ("message" or [names]); \
take from (a teammate's changes); done summary{lead}."""
_LEAD = "; spawn name task; submit (ends the task)"
_DROPPED = "[older output left out]"


@dataclass(frozen=True, slots=True)
class AgentLimits:
    """Bounds of one chatting agent."""

    max_turns: int = 24
    max_tokens: int = 256  # of one answer
    max_malformed: int = 3  # answers in a row without a usable action, before the agent is given up
    history_chars: int = 3_000  # of a whole conversation, about 1,100 tokens of code and shell
    temperature: float = 0.0
    seed: int | None = None


@dataclass(slots=True)
class _Exchange:
    answer: str
    observation: str


class Conversation:
    """What the model sees: the system prompt, the task, and the exchanges so far, bounded in characters.

    When the bound is passed, the oldest observations shrink to a stub, and if that is not enough the oldest
    exchanges go, until half of the bound is free again: so the start of the prompt stays the same for many
    turns, and a prefix cache keeps serving it. The last exchange always stays whole. Deterministic.
    """

    def __init__(self, system: str, task: str, *, limit_chars: int) -> None:
        self._head = (ChatMessage("system", system), ChatMessage("user", task))
        self._limit_chars = limit_chars
        self._exchanges: list[_Exchange] = []

    def append(self, answer: str, observation: str) -> None:
        """Adds one exchange and keeps the bound."""
        self._exchanges.append(_Exchange(answer, observation))
        if self._chars() > self._limit_chars:
            self._shrink(self._limit_chars // 2)

    def messages(self) -> Sequence[ChatMessage]:
        """The conversation for the next call."""
        turns = (
            message
            for exchange in self._exchanges
            for message in (
                ChatMessage("assistant", exchange.answer),
                ChatMessage("user", exchange.observation),
            )
        )
        return (*self._head, *turns)

    def _shrink(self, goal_chars: int) -> None:
        for exchange in self._exchanges[:-1]:
            if self._chars() <= goal_chars:
                return
            if len(exchange.observation) > len(_DROPPED):
                exchange.observation = _DROPPED
        while self._chars() > goal_chars and len(self._exchanges) > 1:
            del self._exchanges[0]

    def _chars(self) -> int:
        turns = sum(len(exchange.answer) + len(exchange.observation) for exchange in self._exchanges)
        return turns + sum(len(message.content) for message in self._head)


def chat_program(task: str, limits: AgentLimits) -> Program:
    """The program of an agent that works on `task` by chatting; so are the teammates that it spawns."""

    async def converse(member: Member) -> Ending:
        system = _SYSTEM.format(name=member.name, lead=_LEAD if member.name == "lead" else "")
        conversation = Conversation(system, task, limit_chars=limits.history_chars)
        malformed = 0
        for number in range(1, limits.max_turns + 1):
            start_ns = member.recorder.clock.now_ns()
            answer = await member.ask(
                conversation.messages(),
                max_tokens=limits.max_tokens,
                temperature=limits.temperature,
                seed=None if limits.seed is None else limits.seed + number,
            )
            kind, observation = await _act(member, answer.text, limits)
            member.keep_turn(
                Turn(
                    agent=member.name,
                    number=number,
                    text=answer.text,
                    action=kind,
                    observation=observation.text,
                    output_digest="" if observation.output is None else digest(observation.output),
                    prompt_tokens=answer.prompt_tokens,
                    completion_tokens=answer.completion_tokens,
                    start_ns=start_ns,
                    end_ns=member.recorder.clock.now_ns(),
                )
            )
            if observation.ending is not None:
                return observation.ending
            malformed = 0 if kind else malformed + 1
            if malformed == limits.max_malformed:
                return Ending("gave up", f"{malformed} answers in a row held no usable action")
            conversation.append(answer.text, observation.text)
        return Ending("out of turns", f"{limits.max_turns} turns were not enough")

    return converse


async def _act(member: Member, text: str, limits: AgentLimits) -> tuple[str, Observation]:
    try:
        action = parse_action(text)
    except ActionError as error:
        return "", Observation(f"error: {error}")
    observation = await perform(member, action, lambda task: chat_program(task, limits))
    if observation.ending is None and member.unread:
        note = f'[{member.unread} unread: wait for "message"]'
        observation = replace(observation, text=f"{observation.text}\n{note}")
    return action.do, observation
