"""Log probabilities of the model's own distribution: before temperature, bias, penalties and grammar.

So they are the same however a request samples, as vLLM's `raw_logprobs`, its default. Shapes: V vocabulary.
"""

import numpy as np

from engine.sampling.candidates import Logits, largest
from protocol.sampling_reply import TokenLogprob, TokenLogprobs


def logprobs_of(logits: Logits, token: int, num_top: int) -> TokenLogprobs:
    """Of one position: the token's own, its rank from 1, and the `num_top` most likely ones.

    The rank counts tokens of a larger logit, and those of an equal one with a lower id.
    """
    best = float(logits.max())
    total = best + float(np.log(np.exp(logits.astype(np.float64) - best).sum()))
    own = logits[token]
    rank = 1 + int(np.count_nonzero(logits > own)) + int(np.count_nonzero(logits[:token] == own))
    top = largest(logits, num_top) if num_top else ()
    return TokenLogprobs(
        token,
        float(own) - total,
        rank,
        tuple(TokenLogprob(int(index), float(logits[index]) - total) for index in top),
    )
