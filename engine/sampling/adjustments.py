"""What a request adds to and takes from the model's logits before anything is chosen.

In vLLM's order: what is not allowed (grammar, minimum length), bias, repetition penalty, frequency and
presence penalty. The model's row stays as it is: logprobs are taken from it.
Sources: vLLM's sampler (V1); OpenAI API reference, chat completions. OpenAI has no repetition penalty.
"""

from collections.abc import Collection

import numpy as np
from numpy.typing import NDArray

from engine.errors import InvalidRequest
from engine.sampling.candidates import Logits
from engine.sampling.past import Past
from protocol.sampling import SamplingParams

Allowed = NDArray[np.bool_]  # [V]


def needs_past(sampling: SamplingParams) -> bool:
    """Whether the next token depends on which ones came before, other than through the model."""
    return bool(sampling.presence_penalty or sampling.frequency_penalty or sampling.repetition_penalty != 1.0)


def check_plain(sampling: SamplingParams) -> None:
    """Raises InvalidRequest that names the field for a request that is not plain."""
    if (name := _adjusting(sampling)) is not None:
        raise InvalidRequest(
            f"{name} is set, and drafts that are drawn do not follow it", parameter=name,
            hint="pick drafts and judge them with judge_followed, or decode without drafts",
        )  # fmt: skip


def _adjusting(sampling: SamplingParams) -> str | None:
    """The first field that changes rows."""
    asked = {
        "presence_penalty": sampling.presence_penalty,
        "frequency_penalty": sampling.frequency_penalty,
        "repetition_penalty": sampling.repetition_penalty != 1.0,
        "logit_bias": sampling.logit_bias,
        "min_tokens": sampling.min_tokens,
        "structure": sampling.structure,
    }
    return next((name for name, value in asked.items() if value), None)


def adjust(
    logits: Logits,
    sampling: SamplingParams,
    past: Past,
    generated: int,
    *,
    ends: Collection[int] = (),
    allowed: Allowed | None = None,
) -> Logits:
    """The row to choose from; the same object where the request asks for nothing of this.

    `generated`: tokens before this one. `ends`: the ids that would end the output. `allowed`: a grammar's;
    where it leaves nothing but an end, the minimum length gives way to it.
    """
    too_short = generated < sampling.min_tokens and bool(ends)
    if allowed is None and not too_short and not sampling.logit_bias and not needs_past(sampling):
        return logits
    row = logits.copy() if allowed is None else np.where(allowed, logits, np.float32(-np.inf))
    if too_short:
        row = _without(row, ends)
    if sampling.logit_bias:
        ids = [token for token, _ in sampling.logit_bias]
        row[ids] += np.array([bias for _, bias in sampling.logit_bias], np.float32)
    if needs_past(sampling):
        _penalise(row, sampling, past)
    return row


def _without(row: Logits, ends: Collection[int]) -> Logits:
    shortened = row.copy()
    shortened[list(ends)] = -np.inf
    return shortened if shortened.max() > -np.inf else row


def _penalise(row: Logits, sampling: SamplingParams, past: Past) -> None:
    ids, counts = past.generated()
    if sampling.repetition_penalty != 1.0:
        seen = np.union1d(past.prompt_ids, ids)
        factor = np.float32(sampling.repetition_penalty)
        values = row[seen]
        row[seen] = np.where(values > 0, values / factor, values * factor)
    row[ids] -= np.float32(sampling.frequency_penalty) * counts
    row[ids] -= np.float32(sampling.presence_penalty)
