"""One choice of a reply, from its tokens: text, tool calls, logprobs, and how it ended."""

from dataclasses import dataclass, field, replace
from typing import Any

import msgspec

from engine.chat.dsml_parser import Content, Reasoning
from engine.chat.form import ReplyPart
from engine.chat.text_stream import TextStream
from engine.chat.tokenizer import ChatTokenizer
from engine.chat.tool_calls import CallLost, CallPiece, CallStart, TextCall
from gateway.chat_reply import CallDelta, ChoiceResult, ToldIds
from gateway.generation import Generation
from gateway.token_entries import TokenEntries
from protocol.sampling import SamplingParams
from protocol.wire import Tokens


@dataclass(frozen=True, slots=True)
class Delta:
    """What is new of a choice; the last one of a choice carries its result."""

    index: int
    text: str
    result: ChoiceResult | None = None
    calls: tuple[CallDelta, ...] = ()
    logprobs: tuple[dict[str, Any], ...] = ()
    reasoning: str = ""  # it comes before the text
    text_offset: int = 0  # characters of the choice's tokens before those of `logprobs`
    ids: ToldIds | None = None  # where the request asks for them
    lost: str = ""  # why a call cannot be read of which pieces have been given out


@dataclass(slots=True)
class _Read:
    """What one push has made certain, by kind."""

    reasoning: str = ""
    text: str = ""
    calls: list[CallDelta] = field(default_factory=list[CallDelta])
    lost: str = ""

    @property
    def has_any(self) -> bool:
        return bool(self.reasoning or self.text or self.calls or self.lost)


class ChoiceReader:
    """Push the batches of tokens in order, until a delta has a result.

    Of a stream that goes on the tokens given out before are read first, so that characters, stop strings and
    calls that lie across are whole; what they made certain is not told again.
    """

    def __init__(
        self, index: int, tokenizer: ChatTokenizer, request: Generation, sampling: SamplingParams
    ) -> None:
        self._index, self._request, self._sampling = index, request, sampling
        self._stream = TextStream(
            tokenizer, sampling.stop, include_stop=sampling.include_stop, min_tokens=sampling.min_tokens
        )
        self._reader = request.reader()
        self._entries = TokenEntries(tokenizer)
        self._text: list[str] = []
        self._reasoning: list[str] = []
        self._found: list[TextCall] = []
        self._call_is_open = False  # it is given out in pieces
        self._token_ids: list[int] = []
        self._logprobs: list[dict[str, Any]] = []
        self._prompt: list[bytes] | None = (
            None  # JSON: a long prompt's entries as objects take five times as much
        )
        self._begin(request.generated_ids)
        self._num_found_before, self._first_offset = len(self._found), self._offset

    def push(self, batch: Tokens) -> Delta | None:
        """What these tokens make certain, or None where that is nothing."""
        if self._sampling.prompt_logprobs >= 0 and batch.choice == 0:
            self._take_in_prompt(batch)
        if not batch.token_ids:
            return None  # a part of the prompt's logprobs alone
        is_first = not self._token_ids
        self._token_ids += batch.token_ids
        ended = batch.finish_reason is not None
        shown = batch.token_ids[:-1] if self._hides_last(batch) else batch.token_ids
        text = self._stream.push(shown, final=ended)
        reason = "stop" if self._stream.stopped else batch.finish_reason
        read = self._read(text, reason)
        logprobs = tuple(self._entries.entry(entry) for entry in batch.logprobs)
        offset = self._offset
        self._offset += sum(len(entry["token"]) for entry in logprobs)
        self._logprobs += logprobs
        ids = self._told_ids(batch, is_first=is_first)
        if reason is None and not (read.has_any or logprobs or ids):
            return None
        result = self._result(reason, batch) if reason is not None else None
        return Delta(
            self._index,
            read.text,
            result,
            tuple(read.calls),
            logprobs,
            read.reasoning,
            offset,
            ids,
            read.lost,
        )

    def _begin(self, begun_ids: tuple[int, ...]) -> None:
        self._offset = 0
        if self._sampling.logprobs >= 0:
            self._offset = sum(len(self._entries.text(token_id)) for token_id in begun_ids)
        if begun_ids:
            self._read(self._stream.push(begun_ids), None)
            self._text.clear()
            self._reasoning.clear()

    def _take_in_prompt(self, batch: Tokens) -> None:
        if self._prompt is None:
            self._prompt = [b"null"]  # of the first token nothing can be told
        entries = map(self._entries.prompt_entry, batch.prompt_logprobs)
        self._prompt += map(msgspec.json.encode, entries)

    def _hides_last(self, batch: Tokens) -> bool:
        """A stop token's text is no part of the text, as in vLLM."""
        return (
            batch.finish_reason == "stop"
            and not self._sampling.include_stop
            and batch.token_ids[-1] in self._sampling.stop_token_ids
        )

    def _read(self, text: str, reason: str | None) -> _Read:
        """`reason`: of a choice that ends with this text."""
        read = _Read()
        for part in self._reader.push(text):
            self._take(part, read)
        if reason is not None:
            lost = read.lost
            for part in self._reader.finish():
                self._take(part, read)
            if reason == "length":  # it says that a call may be cut off
                read.lost = lost
        return read

    def _take(self, part: ReplyPart, read: _Read) -> None:
        match part:
            case Reasoning(text=text):
                read.reasoning += text
                self._reasoning.append(text)
            case Content(text=text):
                read.text += text
                self._text.append(text)
            case CallStart(id=call_id, name=name):
                self._call_is_open = True
                read.calls.append(CallDelta(len(self._found), "", call_id, name))
            case CallPiece(text=text):
                _add_arguments(read.calls, len(self._found), text)
            case TextCall():
                if not self._call_is_open:
                    read.calls.append(CallDelta(len(self._found), part.arguments, part.id, part.name))
                self._call_is_open = False
                self._found.append(part)
            case CallLost(text=text, reason=why):
                self._call_is_open = False
                read.lost = why
                self._text.append(text)  # of whole replies; a stream has given out pieces of it

    def _told_ids(self, batch: Tokens, *, is_first: bool) -> ToldIds | None:
        """The prompt's once, and with the first ones where windows were run again."""
        if not self._request.tells_ids:
            return None
        prompt = self._request.prompt_ids if is_first and batch.choice == 0 else None
        return ToldIds(batch.token_ids, prompt, batch.resumed if is_first else ())

    def _result(self, reason: str, batch: Tokens) -> ChoiceResult:
        if reason == "stop" and self._found and not self._request.names_tool:
            reason = "tool_calls"
        ids = ToldIds(tuple(self._token_ids), self._request.prompt_ids, batch.resumed)
        return ChoiceResult(
            self._index, "".join(self._text), reason, len(self._token_ids), batch,
            calls=tuple(self._found[self._num_found_before :]),
            logprobs=tuple(self._logprobs) if self._sampling.logprobs >= 0 else None,
            stop_reason=self._stop_reason(batch),
            prompt_logprobs=_json_array(self._prompt),
            reasoning="".join(self._reasoning),
            num_prompt=len(self._request.prompt_ids),
            text_offset=self._first_offset,
            ids=ids if self._request.tells_ids else None,
        )  # fmt: skip

    def _stop_reason(self, batch: Tokens) -> str | int | None:
        if self._stream.stopped:
            return self._stream.matched
        newest = batch.token_ids[-1]
        is_stop = batch.finish_reason == "stop" and newest in self._sampling.stop_token_ids
        return newest if is_stop else None


def _add_arguments(calls: list[CallDelta], index: int, text: str) -> None:
    """To the call with that number, in the delta that it has already or in one more."""
    if calls and calls[-1].index == index:
        calls[-1] = replace(calls[-1], arguments=calls[-1].arguments + text)
    else:
        calls.append(CallDelta(index, text))


def _json_array(entries: list[bytes] | None) -> msgspec.Raw | None:
    return None if entries is None else msgspec.Raw(b"[%b]" % b",".join(entries))
