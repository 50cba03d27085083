"""Messages of a request as DeepSeek's encoding takes them: checked, typed, merged into turns.

Source: fact sheet, section 10. A message is what the OpenAI API sends, with three extensions: `reasoning`
(or `reasoning_content`) of an assistant, `task` of a user, and `tools` of a system message.
"""

import json
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any, Literal, cast, get_args

from engine.chat.dsml import ToolCall, can_name, finite_json
from engine.errors import InvalidRequest

Role = Literal["system", "user", "assistant"]
Task = Literal["action", "query", "authority", "domain", "title", "read_url"]


@dataclass(frozen=True, slots=True)
class Part:
    """One text of a user turn. `call_id` is not None for the result of a tool call."""

    text: str
    call_id: str | None = None


@dataclass(frozen=True, slots=True)
class Turn:
    """Consecutive user and tool messages are one turn; `task` ends it without a turn of the assistant."""

    role: Role
    parts: tuple[Part, ...]
    reasoning: str = ""
    calls: tuple[ToolCall, ...] = ()
    task: Task | None = None
    tools: tuple[Mapping[str, Any], ...] = ()

    @property
    def text(self) -> str:
        return "\n\n".join(part.text for part in self.parts)

    @property
    def asks(self) -> bool:
        """A turn that a person or the system has opened: results of tools alone continue the one before."""
        return self.role == "system" or (
            self.role == "user" and any(part.call_id is None for part in self.parts)
        )


def read_turns(messages: Sequence[Mapping[str, Any]]) -> list[Turn]:
    """Raises InvalidRequest that names the message and its field."""
    turns: list[Turn] = []
    for index, message in enumerate(messages):
        turn = _turn(f"messages[{index}]", message)
        last = turns[-1] if turns else None
        if last and turn.role == last.role == "user" and last.task is None:
            turns[-1] = replace(last, parts=last.parts + turn.parts, task=turn.task)
        else:
            turns.append(turn)
    return [_ordered(turn, turns[:index]) for index, turn in enumerate(turns)]


def _turn(where: str, message: Mapping[str, Any]) -> Turn:
    role = message.get("role")
    texts = _texts(where, message.get("content"))
    match role:
        case "system":
            return Turn("system", texts, tools=_tools(where, message.get("tools")))
        case "user" | "developer":
            return Turn("user", texts or (Part(""),), task=_task(where, message.get("task")))
        case "tool":
            result = "\n\n".join(part.text for part in texts)
            return Turn("user", (Part(result, _string(where, message, "tool_call_id")),))
        case "assistant":
            reasoning = _string(where, message, "reasoning") or _string(where, message, "reasoning_content")
            return Turn("assistant", texts, reasoning, _calls(where, message.get("tool_calls")))
        case _:
            raise _refused(f"{where}.role", role, "system, developer, user, assistant or tool")


def _ordered(turn: Turn, before: Sequence[Turn]) -> Turn:
    """The results of a turn in the order of the calls that they answer; other parts stay where they are."""
    calls = next((past.calls for past in reversed(before) if past.role == "assistant"), ())
    place = {call.id: index for index, call in enumerate(calls) if call.id}
    results = sorted(
        (part for part in turn.parts if part.call_id is not None),
        key=lambda part: place.get(part.call_id or "", len(calls)),
    )
    queue = iter(results)
    return replace(turn, parts=tuple(p if p.call_id is None else next(queue) for p in turn.parts))


def _texts(where: str, content: object) -> tuple[Part, ...]:
    if content is None or content == "":
        return ()
    if isinstance(content, str):
        return (Part(content),)
    if not isinstance(content, list):
        raise _refused(f"{where}.content", content, "a string or a list of text parts")
    return tuple(
        Part(_part_text(f"{where}.content[{index}]", part))
        for index, part in enumerate(cast(list[object], content))
    )


def _part_text(where: str, part: object) -> str:
    if isinstance(part, Mapping):
        fields = cast(Mapping[str, Any], part)
        if fields.get("type") == "text" and isinstance(fields.get("text"), str):
            return fields["text"]
    raise _refused(where, cast(object, part), 'a part {"type": "text", "text": …}')


def _string(where: str, message: Mapping[str, Any], name: str) -> str:
    value = message.get(name)
    if value is None or isinstance(value, str):
        return value or ""
    raise _refused(f"{where}.{name}", value, "a string")


def _task(where: str, task: object) -> Task | None:
    if task is None or task in get_args(Task):
        return cast(Task | None, task)
    raise _refused(f"{where}.task", task, ", ".join(get_args(Task)))


def _tools(where: str, tools: object) -> tuple[Mapping[str, Any], ...]:
    return read_tools(f"{where}.tools", tools)


def read_tools(where: str, tools: object) -> tuple[Mapping[str, Any], ...]:
    """The function objects of an OpenAI `tools` list, as they are. Raises InvalidRequest."""
    if tools is None:
        return ()
    if not isinstance(tools, Sequence) or isinstance(tools, str):
        raise _refused(where, tools, "a list of tools")
    return tuple(_function(f"{where}[{i}]", tool) for i, tool in enumerate(cast(Sequence[object], tools)))


def parameter_names(tools: Iterable[Mapping[str, Any]]) -> dict[str, frozenset[str]]:
    """The names of each function's parameters, where its schema lists them. A reply's parser needs them."""
    names: dict[str, frozenset[str]] = {}
    for function in tools:
        schema = function.get("parameters")
        properties = (
            cast(Mapping[str, Any], schema).get("properties") if isinstance(schema, Mapping) else None
        )
        if isinstance(properties, Mapping):
            names[function["name"]] = frozenset(map(str, cast(Mapping[object, object], properties)))
    return names


def _function(where: str, tool: object) -> Mapping[str, Any]:
    function = cast(Mapping[str, Any], tool).get("function") if isinstance(tool, Mapping) else None
    if not isinstance(function, Mapping):
        raise _refused(where, cast(object, tool), 'a tool {"type": "function", "function": {"name": …}}')
    function = cast(Mapping[str, Any], function)
    if not isinstance(function.get("name"), str):
        raise _refused(f"{where}.function.name", function.get("name"), "a string")
    return function


def _calls(where: str, calls: object) -> tuple[ToolCall, ...]:
    if calls is None:
        return ()
    if not isinstance(calls, list):
        raise _refused(f"{where}.tool_calls", calls, "a list of calls")
    return tuple(_call(f"{where}.tool_calls[{i}]", call) for i, call in enumerate(cast(list[object], calls)))


def _call(where: str, call: object) -> ToolCall:
    function = _function(where, call)
    _refuse_constants(f"{where}.function.arguments", function.get("arguments"))
    arguments = _arguments(function.get("arguments"))
    name: str = function["name"]
    return ToolCall(name, arguments, _string(where, cast(Mapping[str, Any], call), "id"))


def _arguments(arguments: object) -> dict[str, Any]:
    """What a model once wrote wrongly must not end the conversation: it stands under `arguments` as it is."""
    value = arguments
    if isinstance(value, str):
        with suppress(ValueError, RecursionError):
            value = finite_json(value or "{}")
    if value is None:
        return {}
    if isinstance(value, dict):
        fields = cast(dict[str, Any], value)
        if all(map(can_name, fields)):
            return fields
    return {"arguments": arguments}


def _refuse_constants(where: str, arguments: object) -> None:
    """Of a caller's object: a text's are found where it is read."""
    try:
        json.dumps(arguments, allow_nan=False)
    except (TypeError, ValueError) as error:
        raise _refused(where, arguments, "what JSON can hold") from error


def _refused(where: str, value: object, expected: str) -> InvalidRequest:
    return InvalidRequest(f"{where} is {value!r:.80}, expected {expected}", parameter=where)
