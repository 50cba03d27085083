"""DeepSeek's prompt format: the messages of a request to the prompt of a reply.

Source: fact sheet, section 10 (V4.1) and appendix A.1 (V4).
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from engine.chat.deepseek_messages import Part, Turn, read_tools, read_turns
from engine.chat.deepseek_prompt import (
    ASSISTANT,
    BEGIN,
    END,
    SYSTEM,
    THINK,
    THOUGHT,
    USER,
    Piece,
    Prompt,
    filled,
    ours,
    theirs,
)  # fmt: skip
from engine.chat.deepseek_texts import EFFORTS, ChatTexts, Family, load_texts
from engine.chat.dsml import MARKER, V4, V41, Dialect, json_text, render_calls
from engine.errors import InvalidRequest

DEFAULT_EFFORT = EFFORTS["high"]


@dataclass(frozen=True, slots=True)
class DeepseekFormat:
    """One family's format. `system` opens a system turn: V4 has no token for it."""

    dialect: Dialect
    texts: ChatTexts
    system: str

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        response_schema: Mapping[str, Any] | None = None,
        effort: int | None = DEFAULT_EFFORT,
        drop_thinking: bool = True,
    ) -> Prompt:
        """The prompt up to where the reply begins. `effort` None is the chat mode, without reasoning.

        `drop_thinking`: old reasoning is left out, unless tools are defined.
        Raises InvalidRequest that names the message and its field.
        """
        try:
            turns = _with_tools(read_turns(messages), read_tools("tools", tools), response_schema is not None)
            keep_all = not drop_thinking or any(turn.tools for turn in turns)
            return _Renderer(self, turns, effort, keep_all, response_schema).prompt()
        except RecursionError as error:
            raise InvalidRequest("messages are nested too deeply", parameter="messages") from error


def load_format(family: Family, checkpoint: Path | None = None) -> DeepseekFormat:
    """The format with the texts of a checkpoint's folder. Raises BrokenModelFile."""
    texts = load_texts(family, checkpoint)
    return DeepseekFormat(V41, texts, SYSTEM) if family == "v41" else DeepseekFormat(V4, texts, "")


def read_effort(value: object) -> int | None:
    """A request's `reasoning_effort`: 1 to 100, a name, or none. Not given is 75; none is chat mode, None.

    The release names low, high and max; the API's other names lie between them.
    """
    names = {"none": None, "minimal": 25, "medium": 62, **EFFORTS, "xhigh": EFFORTS["high"]}
    if value is None:
        return DEFAULT_EFFORT
    if isinstance(value, str) and value in names:
        return names[value]
    if type(value) is int and 1 <= value <= 100:
        return value
    raise InvalidRequest(
        f"reasoning_effort is {value!r:.40}, expected a whole number from 1 to 100 or: {', '.join(names)}",
        parameter="reasoning_effort",
    )


@dataclass(frozen=True, slots=True)
class _Renderer:
    format: DeepseekFormat
    turns: Sequence[Turn]
    effort: int | None
    keep_all: bool  # of the reasoning; otherwise turns before the last one that asks lose theirs
    schema: Mapping[str, Any] | None

    def prompt(self) -> Prompt:
        pieces = [ours(BEGIN), *self._opening()]
        for index, turn in enumerate(self.turns):
            pieces += self._assistant(index) if turn.role == "assistant" else self._input(index)
        return Prompt(tuple(pieces), thinking=pieces[-1] == ours(ASSISTANT + THINK))

    def _opening(self) -> Iterator[Piece]:
        """The effort line, and the token before it or before a first system message."""
        if self.effort is not None:
            yield ours(self.format.system)
            yield from filled(self.format.texts.effort(self.effort), budget=str(self.effort))
        elif self.turns and self.turns[0].role == "system":
            yield ours(self.format.system)

    def _input(self, index: int) -> Iterator[Piece]:
        turn = self.turns[index]
        if turn.role == "user":
            yield ours(USER)
            yield theirs("\n\n".join(map(_part, turn.parts)))
        else:
            yield from self._system(index)
        last = index + 1 == len(self.turns)
        if self._opens(index) and (last or self.turns[index + 1].role == "assistant"):
            yield ours(self._header(index))

    def _system(self, index: int) -> Iterator[Piece]:
        turn = self.turns[index]
        if index > 0:
            yield ours(self.format.system)
        yield theirs(turn.text)
        if turn.tools:
            yield ours("\n\n")
            yield from filled(
                self.format.texts.texts["tools"], dsml_token=MARKER, thinking_start_token=THINK,
                thinking_end_token=THOUGHT, tool_schemas="\n".join(map(json_text, turn.tools)),
            )  # fmt: skip
        if not any(earlier.role == "system" for earlier in self.turns[:index]):
            yield from self._response_format()

    def _response_format(self) -> Iterator[Piece]:
        """In the first system message."""
        if self.schema is None:
            return
        text = self.format.texts.texts.get("response_format")
        if text is None:
            raise InvalidRequest(
                "response_format: the model's encoding folder has no text for it",
                parameter="response_format", hint="describe the form in a message",
            )  # fmt: skip
        yield ours("\n\n")
        yield from filled(text, schema=json_text(self.schema))

    def _assistant(self, index: int) -> Iterator[Piece]:
        turn = self.turns[index]
        after_task = index > 0 and self.turns[index - 1].task is not None
        if self._thinks(index) and not after_task:
            yield theirs(turn.reasoning)
            yield ours(THOUGHT)
        yield theirs(turn.text)
        if turn.calls:
            block = render_calls(turn.calls, self.format.dialect)
            for number, part in enumerate(f"\n\n{block}".split(MARKER)):
                yield from (ours(MARKER),) if number else ()
                yield theirs(part)
        yield ours(END)

    def _header(self, index: int) -> str:
        """What stands between a turn and the reply to it."""
        task = self.turns[index].task
        header = ASSISTANT + (THINK if self._thinks(index) else THOUGHT)
        if task is None:
            return header
        return (header if task == "action" else "") + f"<｜{task}｜>"

    def _thinks(self, index: int) -> bool:
        """Whether reasoning stands, or begins, at this turn."""
        return self.effort is not None and (
            self.keep_all or not any(self._asks(later) for later in range(index + 1, len(self.turns)))
        )

    def _asks(self, index: int) -> bool:
        return self.turns[index].asks and self._opens(index)

    def _opens(self, index: int) -> bool:
        """Whether a reply follows: to users, and in V4.1 to system messages after the first message."""
        role = self.turns[index].role
        return role == "user" or (role == "system" and index > 0 and bool(self.format.system))


def _with_tools(turns: list[Turn], tools: tuple[Mapping[str, Any], ...], has_schema: bool) -> list[Turn]:
    """The request's tools go to the first system message; one is made where there is none."""
    if not tools and not has_schema:
        return turns
    first = next((index for index, turn in enumerate(turns) if turn.role == "system"), None)
    if first is None:
        return [Turn("system", (), tools=tools), *turns]
    with_tools = replace(turns[first], tools=turns[first].tools + tools)
    return [*turns[:first], with_tools, *turns[first + 1 :]]


def _part(part: Part) -> str:
    return part.text if part.call_id is None else f"<tool_result>{part.text}</tool_result>"
