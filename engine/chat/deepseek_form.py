"""The form of DeepSeek's models: reasoning between think tags, calls in DSML."""

import secrets

from engine.chat.deepseek import DeepseekFormat, read_effort
from engine.chat.deepseek_messages import parameter_names
from engine.chat.deepseek_prompt import ASSISTANT, BEGIN, END, THINK, THOUGHT, USER
from engine.chat.dsml import MARKER, ToolCall, render_calls
from engine.chat.dsml_call import BrokenCall, CallArguments, CallBegun
from engine.chat.dsml_parser import Content, Event, Reasoning, ReplyParser
from engine.chat.form import ChatPrompt, Conversation, ReplyPart, ReplyReader, check_length
from engine.chat.tokenizer import ChatTokenizer
from engine.chat.tool_calls import CallLost, CallPiece, CallStart, TextCall
from engine.chat.tool_grammar import Form


class DeepseekForm:
    """One family's format with one model's tokenizer, which must have the format's tokens."""

    def __init__(self, chat_format: DeepseekFormat, tokenizer: ChatTokenizer) -> None:
        self._format, self._tokenizer = chat_format, tokenizer
        (self._thought,) = tokenizer.encode(THOUGHT)

    @property
    def calls(self) -> Form:
        return self._format.dialect

    def prompt(self, conversation: Conversation, max_positions: int) -> ChatPrompt:
        """See ChatForm. A schema is told where the release has a text for it; its grammar holds anyway."""
        tells_schema = "response_format" in self._format.texts.texts
        rendered = self._format.render(
            conversation.messages,
            tools=[{"type": "function", "function": function} for function in conversation.functions],
            response_schema=conversation.schema if tells_schema else None,
            effort=read_effort(conversation.effort),
        )
        sent = sum(len(piece.text) for piece in rendered.pieces if not piece.ours)
        check_length("messages", sent, self._tokenizer, max_positions)
        return ChatPrompt(tuple(rendered.ids(self._tokenizer)), self._thought if rendered.thinking else -1)

    def reader(self, conversation: Conversation, prompt: ChatPrompt, *, may_call: bool) -> ReplyReader:
        schemas = parameter_names(conversation.functions)
        thinking = prompt.reasoning_end >= 0
        parser = ReplyParser(self._format.dialect, thinking=thinking, schemas=schemas)
        return _Reader(self._format, parser, may_call)


class _Reader:
    """A call that cannot be read is text, as is one that nobody has asked for."""

    def __init__(self, chat_format: DeepseekFormat, parser: ReplyParser, may_call: bool) -> None:
        self._format, self._parser, self._may_call = chat_format, parser, may_call
        self._id = ""  # of the call on its way, where it is given out in pieces
        self._pieces: list[str] = []

    def push(self, text: str) -> list[ReplyPart]:
        return self._parts(self._parser.push(text))

    def finish(self) -> list[ReplyPart]:
        return self._parts(self._parser.finish())

    def _parts(self, events: list[Event]) -> list[ReplyPart]:
        return [part for event in events if (part := self._part(event)) is not None]

    def _part(self, event: Event) -> ReplyPart | None:
        match event:
            case Reasoning() | Content():
                return event
            case CallBegun(name=name) if self._may_call:
                self._id, self._pieces = f"call_{secrets.token_hex(12)}", []
                return CallStart(self._id, name)
            case CallArguments(text=text) if self._may_call:
                self._pieces.append(text)
                return CallPiece(text)
            case CallBegun() | CallArguments():
                return None
            case ToolCall():
                return self._whole(event)
            case BrokenCall(text=text, reason=reason):
                started, self._id = bool(self._id), ""
                return CallLost(text, reason) if started else Content(text)

    def _whole(self, call: ToolCall) -> TextCall | Content:
        if not self._may_call:
            return Content(render_calls((call,), self._format.dialect))
        call_id, self._id = self._id, ""
        return TextCall(call_id, call.name, "".join(self._pieces))


def missing_tokens(chat_format: DeepseekFormat, tokenizer: ChatTokenizer) -> list[str]:
    """The tokens of the format that a base model's vocabulary may lack: without them there is no chat."""
    needed = (BEGIN, END, USER, ASSISTANT, THINK, THOUGHT, MARKER, chat_format.system)
    return [token for token in needed if token and token not in tokenizer.control]
