"""A chunk of the plan as the rows that a model runs."""

from engine.model.base import ChunkRows
from engine.scheduler.scheduler import Chunk


def rows_of(chunk: Chunk) -> ChunkRows:
    sequence, start = chunk.sequence, chunk.sequence.num_computed
    return ChunkRows(
        token_ids=sequence.token_ids[start : start + chunk.count],
        start=start,
        slot=sequence.slot,
        blocks=sequence.blocks,
        bounds=sequence.row_bounds,
        wants_logits=chunk.completes,
        all_logits=sequence.tells_prompt,
    )


def num_logits(chunk: Chunk) -> int:
    return chunk.count if chunk.sequence.tells_prompt else int(chunk.completes)
