"""Tokens as the APIs tell of them: with their text, bytes and log probabilities."""

from typing import Any

from engine.chat.tokenizer import ChatTokenizer
from protocol.sampling_reply import TokenLogprobs


class TokenEntries:
    """Of one model's vocabulary. Thread-safe."""

    def __init__(self, tokenizer: ChatTokenizer) -> None:
        self._tokenizer = tokenizer

    def entry(self, told: TokenLogprobs) -> dict[str, Any]:
        """A token of the output, as OpenAI's API has it."""
        top = [self._token(entry.token_id, entry.logprob) for entry in told.top]
        return {**self._token(told.token_id, told.logprob), "top_logprobs": top}

    def prompt_entry(self, told: TokenLogprobs) -> dict[str, Any]:
        """A token of the prompt as vLLM tells of it: by id, its own and the likeliest ones."""
        ranks = {entry.token_id: (rank, entry.logprob) for rank, entry in enumerate(told.top, 1)}
        ranks[told.token_id] = (told.rank, told.logprob)
        return {
            str(token_id): {"logprob": logprob, "rank": rank, "decoded_token": self.text(token_id)}
            for token_id, (rank, logprob) in ranks.items()
        }

    def text(self, token_id: int) -> str:
        """How the token is told of by itself."""
        return self._tokenizer.token_text(token_id)[0]

    def _token(self, token_id: int, logprob: float) -> dict[str, Any]:
        text, data = self._tokenizer.token_text(token_id)
        return {"token": text, "logprob": logprob, "bytes": list(data)}
