"""How many drafts hold on a given text: the measure of drafts, for benches (section 8.4).

Shapes: A anchors, R rows of a draft.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from engine.model.deepseek.dspark import DraftModel
from engine.model.deepseek.dspark_context import Anchor, DraftCache
from engine.model.deepseek.model import DeepseekModel
from engine.model.deepseek.rows import SequenceRows
from engine.speculation.request_drafts import judge_picked
from protocol.sampling import SamplingParams

_CHUNK = 512  # rows of the text at a time


def accepted_lengths(
    model: DeepseekModel,
    drafts: DraftModel,
    token_ids: Sequence[int],
    *,
    first: int = 1,
    stride: int = 1,
    sampling: SamplingParams = SamplingParams(),  # noqa: B008 - frozen
) -> Tensor:
    """int64 [A]: of R drafts behind each anchor, how many the model itself goes on with.

    Anchors are the positions first, first + stride, ... of the text; before each all is as the text has it,
    and what is drafted is judged by the model's own forward behind it. A step commits one token more. The
    mean over a held-out text is the figure to compare. Blocks; costs R + 1 rows an anchor beside the text.
    """
    return _Text(model, drafts, token_ids).accepted(range(first, len(token_ids), stride), sampling)


class _Text:
    """A text that is read up to some position, by the model and by its drafts."""

    def __init__(self, model: DeepseekModel, drafts: DraftModel, token_ids: Sequence[int]) -> None:
        self._model, self._drafts, self._ids = model, drafts, list(token_ids)
        num_blocks = -(-(len(self._ids) + drafts.num_rows) // model.block_tokens)
        self._blocks, self._read = range(num_blocks), 0
        self._cache = model.new_cache(num_blocks, model.block_tokens, 1)
        self._context: DraftCache = drafts.new_cache(1)

    def accepted(self, places: Sequence[int], sampling: SamplingParams) -> Tensor:
        found = [self._accepted(place, sampling) for place in places]
        return torch.tensor(found, dtype=torch.int64)

    def _accepted(self, place: int, sampling: SamplingParams) -> int:
        """Rejected rows are written over when the text goes on."""
        self._read_to(place)
        proposal = self._drafts.propose(self._context, [Anchor(0, self._ids[place], place)])
        proposed = proposal.drafts([self._drafts.num_rows])[0]
        run = torch.tensor([self._ids[place], *proposed])
        rows = SequenceRows(0, self._blocks, place, len(run))
        logits = self._model.head(self._model.forward(run, [rows], self._cache)).numpy()
        return judge_picked(logits, proposed, sampling, place).accepted

    def _read_to(self, place: int) -> None:
        for start in range(self._read, place, _CHUNK):
            part, tap = self._ids[start : min(start + _CHUNK, place)], self._drafts.tap()
            rows = SequenceRows(0, self._blocks, start, len(part))
            self._model.forward(torch.tensor(part), [rows], self._cache, tap)
            self._drafts.write(self._context, tap)
        self._read = place
