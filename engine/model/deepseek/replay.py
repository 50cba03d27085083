"""Which rows run where: decoder bounded replay, and window replay behind a cached prefix (sections 1.3, 1.4).

Both are approximations that the model is trained with, and both are properties of the request: bounds are
absolute positions, so that any chunking, batch and recomputation of the same spans gives the same bits.
Pure: nothing here knows a tensor. With replay off the bounds stay 0, and every row runs every layer.
"""

from dataclasses import dataclass


def decoder_bound(start: int, stop: int, window: int, previous: int = 0) -> int:
    """`SequenceRows.decoder_from` for the rows of an input span [start, stop), a prompt or a tool's result.

    Decoder layers see the last min(length, window) rows of a span, and no window entry before them when rows
    were left out. `previous` is the bound of the span before. Every generated row is a span of its own, which
    leaves no row out: its bound is the one before. One chunk never holds rows of two spans with two bounds.
    """
    return stop - window if stop - start > window else previous


@dataclass(frozen=True, slots=True)
class Resume:
    """Where a sequence starts behind a cached prefix. The fields are those of `SequenceRows`.

    The slot needs the token ids before `start` (`DeepseekCache.seed_lookback`): an n-gram looks back across
    the boundary. Windows never do.
    """

    start: int
    window_from: int
    write_from: int


def resume_after_hit(num_cached: int, window: int) -> Resume:
    """Global entries of the first `num_cached` positions are known, window entries are not.

    The last `window` of them run again to rebuild windows and open groups; their global entries stay as they
    are. A hit of up to `window` positions is not worth it and counts as none. `num_cached` is a multiple of
    every compression ratio, as whole blocks are.
    """
    if num_cached <= window:
        return Resume(0, 0, 0)
    return Resume(num_cached - window, num_cached - window, num_cached)
