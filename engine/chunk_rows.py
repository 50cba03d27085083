"""A chunk of the plan as the rows that a model runs."""

from engine.model.base import ChunkRows
from engine.request import Sequence
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
        all_logits=tells_prompt(sequence),
    )


def num_logits(chunk: Chunk) -> int:
    return chunk.count if tells_prompt(chunk.sequence) else int(chunk.completes)


def tells_prompt(sequence: Sequence) -> bool:
    """Whether logits of all rows are wanted: while a prompt is computed whose logprobs were asked for."""
    return sequence.num_generated == 0 and sequence.sampling.prompt_logprobs >= 0
