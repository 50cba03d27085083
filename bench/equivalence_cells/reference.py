"""What a case's answer must be: one forward of the model over all its tokens, with nothing of the engine.

The answer stands behind its prompt, every row runs at once, and it is greedy where the most likely token of
each row is its next. So there is no schedule, block pool, chunk, prefix hit or kept state that could be wrong
in both. Which rows run again behind a cached prefix is written here once more, from the fact sheet (sections
1.3 and 1.4), and shares no line with what the engine resumes by.
Shapes: T rows, C channels, V vocabulary.
"""

from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from engine.model.base import Model
from engine.model.deepseek.rows import SequenceRows
from engine.model.deepseek.serving import DeepseekServed
from engine.model.deepseek.text_model import TextModel
from engine.sampling.logprobs import logprobs_of


def continue_greedily(
    model: Model,
    prompt_ids: Sequence[int],
    answer_ids: Sequence[int],
    resumed: Sequence[int],
    *,
    replay: bool,
) -> tuple[list[int], list[float]]:
    """The most likely token of each row behind the prompt and the answer's tokens, and its log probability.

    Equal to `answer_ids` where these are what the model says; behind the first other one, the rest is what
    it would say behind that. `resumed`: where windows ran again, of a model that may do so (`replay`).
    """
    ids = [*prompt_ids, *answer_ids[:-1]]
    if replay and isinstance(model, DeepseekServed):
        hidden_TC = _run_passes(model.text, ids, len(prompt_ids), resumed)
        logits_TV = model.text.head(hidden_TC[-len(answer_ids) :])
    else:
        assert not resumed, f"windows of this model never run again, and did at {resumed}"
        logits_TV = model.logits(ids)[-len(answer_ids) :]
    rows: NDArray[np.float32] = logits_TV.numpy()
    tokens = [int(row.argmax()) for row in rows]
    return tokens, [logprobs_of(row, token, 0).logprob for row, token in zip(rows, tokens, strict=True)]


def _run_passes(text: TextModel, ids: Sequence[int], num_prompt: int, resumed: Sequence[int]) -> Tensor:
    """Hidden states [T, C] of the rows behind the last place at which windows began anew.

    A place p is the end of whole blocks. From there the encoder begins again at p - W: no window reaches
    below, tokens before it are looked back at, and entries below p stay what the pass before has left. The
    decoder sees the last W rows of the prompt, and what was generated.
    """
    window, count = text.shape.sliding_window, len(ids)
    blocks = range(-(-count // text.block_tokens))
    cache = text.new_cache(len(blocks), text.block_tokens, 1)
    hidden_TC = torch.empty(0)
    for place, stop in zip((0, *resumed), (*resumed, count), strict=True):
        assert place == 0 or window < place < num_prompt, f"windows cannot run again at {place}"
        start = max(place - window, 0)
        cache.seed_lookback(0, ids[:start])
        rows = SequenceRows(
            0, blocks, start, stop - start,
            decoder_from=max(num_prompt - window, 0) if stop == count else stop,
            window_from=start, write_from=place,
        )  # fmt: skip
        hidden_TC = text.forward(torch.tensor(ids[start:stop]), [rows], cache)
    return hidden_TC
