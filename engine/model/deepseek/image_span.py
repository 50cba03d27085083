"""Where images lie in a token stream: spans of placeholders with embeddings of their own (section 9).

Shapes: T rows of a step, M of them of images, N positions of a span, C channels.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from engine.errors import InvalidRequest
from engine.model.deepseek.rows import SequenceRows


@dataclass(frozen=True, slots=True)
class ImageSpan:
    """An image in its sequence: positions start .. start + N - 1, with the embeddings [N, C] of each."""

    start: int
    values: Tensor

    @property
    def stop(self) -> int:
        return self.start + len(self.values)


@dataclass(frozen=True, slots=True)
class ImageRows:
    """The rows of a step that images fill: int64 [M], and their embeddings [M, C]."""

    rows: Tensor
    values: Tensor


def place_images(
    token_ids: Sequence[int], image_token_id: int, lengths: Sequence[int]
) -> tuple[list[int], list[int]]:
    """A prompt with one placeholder an image as the model takes it: one a position. With each span's start.

    `lengths`: positions of each image, in order (`ImageGrid.num_tokens`).
    Raises InvalidRequest: another number of placeholders than of images, as text that spells one makes.
    """
    found = sum(token == image_token_id for token in token_ids)
    if found != len(lengths):
        raise InvalidRequest(
            f"the prompt has {found} image placeholders, expected {len(lengths)}, one an image",
            parameter="messages", hint="text must not contain the placeholder itself",
        )  # fmt: skip
    placed: list[int] = []
    starts: list[int] = []
    for token in token_ids:
        count = 1
        if token == image_token_id:
            count = lengths[len(starts)]
            starts.append(len(placed))
        placed += [token] * count
    return placed, starts


def image_rows(sequences: Sequence[SequenceRows], spans: Sequence[Sequence[ImageSpan]]) -> ImageRows | None:
    """What of the sequences' spans falls into the rows of a step; None where nothing does."""
    rows: list[Tensor] = []
    values: list[Tensor] = []
    first = 0
    for sequence, of_sequence in zip(sequences, spans, strict=True):
        for span in of_sequence:
            start, stop = max(span.start, sequence.start), min(span.stop, sequence.stop)
            if start < stop:
                rows.append(torch.arange(start, stop) - sequence.start + first)
                values.append(span.values[start - span.start : stop - span.start])
        first += sequence.count
    return ImageRows(torch.cat(rows), torch.cat(values)) if rows else None
