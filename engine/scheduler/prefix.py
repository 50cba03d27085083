"""A sequence's chain of keys, and how far along it blocks are known."""

from collections.abc import Callable
from dataclasses import dataclass

from engine.cache.keys import block_key, images_of
from engine.request import Sequence


@dataclass(frozen=True, slots=True)
class Path:
    """Keys of the known blocks from the start, and where windows were run again on the way."""

    keys: tuple[bytes, ...]
    resumed: tuple[int, ...]


def known_path(
    sequence: Sequence, root: bytes, size: int, window: int, known: Callable[[bytes], bool]
) -> Path:
    """The known blocks before the newest token, which must be computed to go on from it.

    A sequence that has not run takes entries of a whole pass where they are known, and else those behind
    resumed windows; one that has run keeps to its lineage; one that tells of its prompt takes none.
    """
    if sequence.tells_prompt:
        return Path((), ())
    keys: list[bytes] = []
    resumed: list[int] = []
    for index in range((len(sequence.token_ids) - 1) // size):
        previous, place = keys[-1] if keys else root, index * size
        again = sequence.resumed is not None and place in sequence.resumed
        key = chain_key(sequence, previous, index, size, resumed=again)
        found = known(key)
        if not found and sequence.resumed is None and place > window > 0:
            key = chain_key(sequence, previous, index, size, resumed=True)
            if found := known(key):
                resumed.append(place)
        if not found:
            break
        keys.append(key)
    return Path(tuple(keys), tuple(resumed))


def extend_chain(sequence: Sequence, root: bytes, size: int, num_blocks: int) -> list[bytes]:
    """The keys of at least so many blocks along the sequence's lineage."""
    chain, places = sequence.chain, sequence.resumed or ()
    for index in range(len(chain), num_blocks):
        previous = chain[-1] if chain else root
        chain.append(chain_key(sequence, previous, index, size, resumed=index * size in places))
    return chain


def chain_key(sequence: Sequence, previous: bytes, index: int, size: int, *, resumed: bool) -> bytes:
    """Of the block with that number. Kept: who waits for blocks asks every step, and tokens do not change."""
    found = sequence.keys.get((previous, resumed))
    if found is None:
        start, stop = index * size, (index + 1) * size
        images = images_of(sequence.request.images, start, stop) if sequence.request.images else ()
        found = block_key(previous, sequence.token_ids[start:stop], images, resumed=resumed)
        sequence.keys[previous, resumed] = found
    return found
