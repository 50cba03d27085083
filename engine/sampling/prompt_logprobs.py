"""Log probabilities of a prompt's tokens, gathered as its chunks are computed.

The row at a position says how likely the token after it was. Shapes: V vocabulary.
"""

from collections.abc import Sequence

from engine.errors import InvalidRequest
from engine.sampling.candidates import Logits
from engine.sampling.logprobs import logprobs_of
from protocol.sampling import SamplingParams
from protocol.sampling_reply import TokenLogprobs

_MOST_ENTRIES = 1_000_000  # of one prompt: some 100 MB of JSON


def check_prompt_logprobs(sampling: SamplingParams, num_prompt: int, *, skips_rows: bool) -> None:
    """`skips_rows`: the model's decoder sees a part of a prompt alone. Raises InvalidRequest."""
    if sampling.prompt_logprobs < 0:
        return
    if skips_rows:
        raise InvalidRequest(
            f"prompt_logprobs is {sampling.prompt_logprobs}; this model has logits of a prompt's end alone",
            parameter="prompt_logprobs",
            hint="leave it out, or serve it with replay off: `workers: {replay: false}` in its --config",
        )  # fmt: skip
    entries = num_prompt * (sampling.prompt_logprobs + 1)
    if entries > _MOST_ENTRIES:
        raise InvalidRequest(
            f"prompt_logprobs is {sampling.prompt_logprobs} for {num_prompt} tokens: {entries} entries,"
            f" at most {_MOST_ENTRIES}",
            parameter="prompt_logprobs", hint="ask for fewer, or shorten the prompt",
        )  # fmt: skip


class PromptLogprobs:
    """Of one prompt. A chunk that is computed again, after a preemption, says the same again."""

    def __init__(self, prompt_ids: Sequence[int], num_top: int) -> None:
        self._prompt_ids, self._num_top = list(prompt_ids), num_top
        self._found: dict[int, TokenLogprobs] = {}

    def take_in(self, start: int, rows: Sequence[Logits]) -> None:
        """Rows [V] of positions from `start` on; the prompt's last one tells of no token of it."""
        for position, row in enumerate(rows, start + 1):
            if position < len(self._prompt_ids):
                self._found[position] = logprobs_of(row, self._prompt_ids[position], self._num_top)

    def whole(self) -> tuple[TokenLogprobs, ...]:
        """Of each token but the first, of which nothing can be told."""
        assert len(self._found) == len(self._prompt_ids) - 1, "rows of the prompt are missing"
        return tuple(self._found[position] for position in range(1, len(self._prompt_ids)))
