"""How a model is talked to: a conversation to a prompt, and a reply's text to its parts.

Two forms: the template that a GGUF file carries (`template_form`), and DeepSeek's format (`deepseek_form`).
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from engine.chat.dsml_parser import Content, Reasoning
from engine.chat.tokenizer import ChatTokenizer
from engine.chat.tool_calls import CallLost, CallPiece, CallStart, TextCall
from engine.chat.tool_grammar import Form
from engine.errors import ContextExceeded

ReplyPart = Reasoning | Content | CallStart | CallPiece | CallLost | TextCall


@dataclass(frozen=True, slots=True)
class Conversation:
    """What a request says, checked for its types.

    A message has `role` and `content`, which is text, and may have `reasoning`, `tool_calls` and
    `tool_call_id`, as the API has them. `effort`: as sent, of the reasoning. `schema`: of the reply's JSON.
    """

    messages: Sequence[Mapping[str, Any]]
    functions: Sequence[Mapping[str, Any]] = ()
    effort: str | int | None = None
    schema: Mapping[str, Any] | None = None


@dataclass(frozen=True, slots=True)
class ChatPrompt:
    """`reasoning_end`: the token that ends the reasoning in which the reply begins; -1: it begins in none."""

    ids: tuple[int, ...]
    reasoning_end: int = -1


class ReplyReader(Protocol):
    """One reply. Adjacent parts of text belong together, wherever the text was cut."""

    def push(self, text: str) -> list[ReplyPart]:
        """What this text makes certain."""
        ...

    def finish(self) -> list[ReplyPart]:
        """What was held back."""
        ...


class ChatForm(Protocol):
    """Thread-safe."""

    @property
    def calls(self) -> Form:
        """How the model writes calls of tools."""
        ...

    def prompt(self, conversation: Conversation, max_positions: int) -> ChatPrompt:
        """The prompt up to where the reply begins. Raises InvalidRequest.

        Blocks for as long as rendering and tokenising take; text that cannot fit is refused before.
        """
        ...

    def reader(self, conversation: Conversation, prompt: ChatPrompt, *, may_call: bool) -> ReplyReader:
        """Of a reply to the prompt. Unless it `may_call`, what looks like a call is text."""
        ...


class PlainReader:
    """Of a text that is nothing else."""

    def push(self, text: str) -> list[ReplyPart]:
        return [Content(text)] if text else []

    def finish(self) -> list[ReplyPart]:
        return []


def check_length(parameter: str, count: int, tokenizer: ChatTokenizer, max_positions: int) -> None:
    """Refuses text that cannot fit whatever its tokens are, before any time goes into it."""
    if count > max_positions * tokenizer.longest:
        raise ContextExceeded.of(
            max_positions, f"{parameter} has {count} characters, and a token {tokenizer.longest} at most",
            parameter=parameter, please="shorten it",
        )  # fmt: skip
