"""The actions of a chatting agent: how a model writes one, and what each does.

An action is one JSON object in a block fenced as `action`:

    ```action
    {"do": "run", "cmd": "python3 -m pytest -q tests"}
    ```
"""

import json
import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Annotated, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, TypeAdapter, ValidationError

from protocol.errors import DockyardError, InvalidInput
from teams.mailbox import MailboxFullError
from teams.member import Ending, Member, Program, Waited
from teams.workspace import WorkspaceError

OBSERVATION_CHARS = 1_200  # about 350 tokens: a small model's context is short, and its prefill slow
RUN_TIMEOUT_S = 60.0
MAX_RUN_TIMEOUT_S = 600.0

_OPENING = re.compile(r"```action[ \t]*\n\s*")
_JSON = json.JSONDecoder(strict=False)


class _Action(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class Run(_Action):
    do: Literal["run"]
    cmd: str = Field(min_length=1, max_length=4_000)
    timeout_s: float = Field(default=RUN_TIMEOUT_S, gt=0, le=MAX_RUN_TIMEOUT_S)


class Write(_Action):
    do: Literal["write"]
    path: str
    content: str


class Edit(_Action):
    do: Literal["edit"]
    path: str
    old: str = Field(min_length=1)
    new: str


class Spawn(_Action):
    do: Literal["spawn"]
    name: str
    task: str = Field(min_length=1, max_length=2_000)


class Send(_Action):
    do: Literal["send"]
    to: str
    text: str = Field(min_length=1)


def _as_names(target: object) -> object:
    return [target] if isinstance(target, str) else target


class Wait(_Action):
    do: Literal["wait"]
    # Models write one name without its brackets; "message" is no name.
    target: Annotated[list[str], BeforeValidator(_as_names), Field(min_length=1, alias="for")]


class Take(_Action):
    do: Literal["take"]
    source: str = Field(alias="from")


class Done(_Action):
    do: Literal["done"]
    summary: str = ""


class Submit(_Action):
    do: Literal["submit"]


Action = Run | Write | Edit | Spawn | Send | Wait | Take | Done | Submit
_ADAPTER: TypeAdapter[Action] = TypeAdapter(Annotated[Action, Field(discriminator="do")])


class ActionError(DockyardError):
    """The model's text holds no action that can be carried out. Told to the model, never to the caller."""


@dataclass(frozen=True, slots=True)
class Observation:
    """What came of an action."""

    text: str  # clipped, for the model
    output: str | None = None  # a tool's whole output; None for actions that are no tools
    ending: Ending | None = None


def parse_action(text: str) -> Action:
    """The one action in a model's answer. Raises `ActionError` with advice for the model."""
    blocks = _blocks(text)
    if len(blocks) != 1:
        raise ActionError(f"your answer holds {len(blocks)} action blocks, write exactly one ```action block")
    try:
        blocks[0].encode()  # half a surrogate pair cannot be written to a file or sent to a sandbox
        value = json.loads(blocks[0], strict=False)
        json.dumps(value, ensure_ascii=False).encode()  # nor one that was written as an escape
        return _ADAPTER.validate_python(value)
    except json.JSONDecodeError as error:
        raise ActionError(f"the action is not valid JSON: {error.msg} at character {error.pos}") from error
    except UnicodeEncodeError as error:
        raise ActionError("the action holds half of a surrogate pair, which is no character") from error
    except RecursionError as error:
        raise ActionError("the action is nested too deeply") from error
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        where = ".".join(str(part) for part in first["loc"]) or "action"
        raise ActionError(f"{where}: {first['msg']}") from error
    except ValueError as error:  # numbers of thousands of digits
        raise ActionError(f"the action holds a value that cannot be read: {error}") from error


def _blocks(text: str) -> list[str]:
    """The closed action blocks. Fences inside of JSON strings are text: agents write Markdown too."""
    blocks: list[str] = []
    at = 0
    while (opening := _OPENING.search(text, at)) is not None:
        closing = text.find("```", _value_end(text, opening.end()))
        if closing < 0:
            break
        blocks.append(text[opening.end() : closing])
        at = closing + 3
    return blocks


def _value_end(text: str, start: int) -> int:
    """Where the JSON value ends that starts at `start`; `start` where none does."""
    try:
        return _JSON.raw_decode(text, start)[1]
    except (ValueError, RecursionError):  # `parse_action` reads the block again, and says what is wrong
        return start


def clip(text: str, limit: int = OBSERVATION_CHARS) -> str:
    """Head and tail of a text, with a mark between them that says how much is missing."""
    if len(text) <= limit:
        return text
    head, tail = limit // 2, limit // 2 - 40
    return f"{text[:head]}\n[… {len(text) - head - tail} characters left out …]\n{text[-tail:]}"


async def perform(member: Member, action: Action, program_for: Callable[[str], Program]) -> Observation:
    """Carries out one action.

    What the model did wrong comes back as an observation; failures of the platform (a dead sandbox, a model
    that cannot be reached) are raised.
    """
    try:
        if isinstance(action, Run | Write | Edit | Take):
            output = await _use_tool(member, action)
            return Observation(clip(output), output)
        if isinstance(action, Done | Submit):
            return Observation("", ending=_ending(member, action))
        return Observation(clip(await _team_up(member, action, program_for)))
    except (InvalidInput, MailboxFullError, WorkspaceError) as error:
        told = f"error: {error}"
        return Observation(clip(told), told if isinstance(action, Run | Write | Edit | Take) else None)


async def _use_tool(member: Member, action: Run | Write | Edit | Take) -> str:
    match action:
        case Run():
            return await _run(member, action)
        case Write():
            await member.write(action.path, action.content.encode())
            return f"wrote {action.path}"
        case Edit():
            await member.edit(action.path, action.old, action.new)
            return f"edited {action.path}"
        case Take():
            diff = await member.take(action.source)
            return f"took from {action.source}: {', '.join(diff.paths) or 'nothing'}"


async def _run(member: Member, action: Run) -> str:
    result = await member.run(action.cmd, timeout_s=action.timeout_s)
    ended = f"exit {result.exit_code}" if result.reason == "exit" else f"ended: {result.reason}"
    return f"{ended}\n{result.output}".rstrip()


async def _team_up(member: Member, action: Spawn | Send | Wait, program_for: Callable[[str], Program]) -> str:
    match action:
        case Spawn():
            member.spawn(action.name, program_for(action.task), action.task)
            return f"started {action.name}"
        case Send():
            member.send(action.to, action.text)
            return f"sent to {action.to}"
        case Wait(target=["message"]):
            return _waited(await member.wait_message())
        case Wait(target=names):
            return _waited(await member.join(names))


def _ending(member: Member, action: Done | Submit) -> Ending:
    if isinstance(action, Done):
        return Ending("done", action.summary)
    if member.name != "lead":
        raise InvalidInput("only the lead submits", hint="use done")
    return Ending("submit")


def _waited(waited: Waited) -> str:
    lines = [f"{one.name} {one.state}: {one.summary}".rstrip() for one in waited.outcomes]
    lines += [f"{message.sender} writes: {message.text}" for message in waited.messages]
    if waited.stuck:
        lines.append("nobody is left who could end this wait, go on without")
    return "\n".join(lines)
