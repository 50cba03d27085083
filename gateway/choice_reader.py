"""One choice of a reply, from its tokens: text, tool calls, logprobs, and how it ended."""

from dataclasses import dataclass
from typing import Any

from engine.chat.dsml_parser import Content, Reasoning
from engine.chat.text_stream import TextStream
from engine.chat.tokenizer import ChatTokenizer
from engine.chat.tool_calls import TextCall
from gateway.chat_reply import ChoiceResult
from gateway.generation import Generation
from protocol.sampling import SamplingParams
from protocol.sampling_reply import TokenLogprobs
from protocol.wire import Tokens


@dataclass(frozen=True, slots=True)
class Delta:
    """What is new of a choice; the last one of a choice carries its result."""

    index: int
    text: str
    result: ChoiceResult | None = None
    calls: tuple[TextCall, ...] = ()
    num_calls: int = 0  # before these
    logprobs: tuple[dict[str, Any], ...] = ()
    reasoning: str = ""  # it comes before the text


class ChoiceReader:
    """Push the batches of tokens in order, until a delta has a result."""

    def __init__(
        self, index: int, tokenizer: ChatTokenizer, request: Generation, sampling: SamplingParams
    ) -> None:
        self._index, self._tokenizer = index, tokenizer
        self._request, self._sampling = request, sampling
        self._stream = TextStream(
            tokenizer, sampling.stop, include_stop=sampling.include_stop, min_tokens=sampling.min_tokens
        )
        self._reader = request.reader()
        self._num_tokens = 0
        self._text: list[str] = []
        self._reasoning: list[str] = []
        self._found: list[TextCall] = []
        self._logprobs: list[dict[str, Any]] = []
        self._prompt: tuple[dict[str, Any] | None, ...] | None = None

    def push(self, batch: Tokens) -> Delta | None:
        """What these tokens make certain, or None where that is nothing."""
        self._num_tokens += len(batch.token_ids)
        if self._sampling.prompt_logprobs >= 0 and batch.choice == 0 and self._prompt is None:
            self._prompt = (None, *(self._prompt_entry(told) for told in batch.prompt_logprobs))
        ended = batch.finish_reason is not None
        shown = batch.token_ids[:-1] if self._hides_last(batch) else batch.token_ids
        text = self._stream.push(shown, final=ended)
        reason = "stop" if self._stream.stopped else batch.finish_reason
        reasoning, text, calls = self._read(text, reason is not None)
        logprobs = tuple(self._entry(entry) for entry in batch.logprobs)
        num_calls = len(self._found)
        self._reasoning.append(reasoning)
        self._text.append(text)
        self._found += calls
        self._logprobs += logprobs
        if reason is None and not (reasoning or text or calls or logprobs):
            return None
        result = self._result(reason, batch) if reason is not None else None
        return Delta(self._index, text, result, tuple(calls), num_calls, logprobs, reasoning)

    def _hides_last(self, batch: Tokens) -> bool:
        """A stop token's text is no part of the text, as in vLLM."""
        return (
            batch.finish_reason == "stop"
            and not self._sampling.include_stop
            and batch.token_ids[-1] in self._sampling.stop_token_ids
        )

    def _read(self, text: str, ended: bool) -> tuple[str, str, list[TextCall]]:
        """Reasoning, text and calls."""
        parts = self._reader.push(text)
        if ended:
            parts += self._reader.finish()
        reasoning = "".join(part.text for part in parts if isinstance(part, Reasoning))
        content = "".join(part.text for part in parts if isinstance(part, Content))
        return reasoning, content, [part for part in parts if isinstance(part, TextCall)]

    def _result(self, reason: str, batch: Tokens) -> ChoiceResult:
        if reason == "stop" and self._found and not self._request.names_tool:
            reason = "tool_calls"
        return ChoiceResult(
            self._index, "".join(self._text), reason, self._num_tokens, batch,
            calls=tuple(self._found),
            logprobs=tuple(self._logprobs) if self._sampling.logprobs >= 0 else None,
            stop_reason=self._stop_reason(batch), prompt_logprobs=self._prompt,
            reasoning="".join(self._reasoning),
        )  # fmt: skip

    def _stop_reason(self, batch: Tokens) -> str | int | None:
        if self._stream.stopped:
            return self._stream.matched
        newest = batch.token_ids[-1]
        is_stop = batch.finish_reason == "stop" and newest in self._sampling.stop_token_ids
        return newest if is_stop else None

    def _entry(self, told: TokenLogprobs) -> dict[str, Any]:
        """One token as the API tells of it."""
        top = [self._token(entry.token_id, entry.logprob) for entry in told.top]
        return {**self._token(told.token_id, told.logprob), "top_logprobs": top}

    def _prompt_entry(self, told: TokenLogprobs) -> dict[str, Any]:
        """One token of the prompt as vLLM tells of it: by id, its own and the likeliest ones."""
        ranks = {entry.token_id: (rank, entry.logprob) for rank, entry in enumerate(told.top, 1)}
        ranks[told.token_id] = (told.rank, told.logprob)
        return {
            str(token_id): {
                "logprob": logprob, "rank": rank, "decoded_token": self._tokenizer.token_text(token_id)[0]
            }
            for token_id, (rank, logprob) in ranks.items()
        }  # fmt: skip

    def _token(self, token_id: int, logprob: float) -> dict[str, Any]:
        text, data = self._tokenizer.token_text(token_id)
        return {"token": text, "logprob": logprob, "bytes": list(data)}
