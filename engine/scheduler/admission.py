"""What a waiting sequence would start with, worked out without changing anything."""

from collections.abc import Iterable
from dataclasses import dataclass, replace
from itertools import takewhile

from engine.cache.block_pool import BlockPool
from engine.model.bounds import ResumeRules
from engine.request import Sequence
from engine.scheduler.kept import KeptKv
from engine.scheduler.prefix import extend_chain, known_path
from engine.scheduler.resume import Pass, Start, first_start, next_start
from protocol.handoff import KvPayload


@dataclass(frozen=True, slots=True)
class Admission:
    """`known`: keys of shared blocks, with their content where it comes from outside the device."""

    start: Start
    path: tuple[int, ...]  # resumed places among the known blocks, as they were found
    known: tuple[tuple[bytes, KvPayload | None], ...]
    windows: KvPayload | None
    num_needed: int  # new blocks

    def fits(self, pool: BlockPool, released: Iterable[int] = ()) -> bool:
        """Whether the new blocks are to be had beside the shared ones, which may be free themselves.
        `released`: as if these were given back before."""
        shared = [key for key, payload in self.known if payload is None]
        return self.num_needed <= pool.count_free(shared, released)


def plan_admission(
    sequence: Sequence, root: bytes, pool: BlockPool, rules: ResumeRules, kept: KeptKv
) -> Admission:
    """Of a sequence with an incoming state, it starts where that ends, and shares those of its full blocks
    that are on the device, which the state writes once more as they are; else behind what is known of it."""
    size, total = pool.block_tokens, pool.blocks_for(len(sequence.token_ids))
    if sequence.num_incoming:
        bounds = replace(sequence.passes[-1].bounds, start=sequence.num_incoming)
        start = Start((Pass(bounds),), sequence.resumed or (), 0, 0)
        chain = extend_chain(sequence, root, size, sequence.num_incoming // size)
        here = takewhile(pool.knows, chain[: sequence.num_incoming // size])
        known = tuple((key, None) for key in here)
        return Admission(start, (), known, None, total - len(known))

    # What is found is taken at once: it may be gone a moment later, and stays whole as long as we have it.
    found: dict[bytes, KvPayload | None] = {}
    windows: dict[int, KvPayload] = {}

    def is_known(key: bytes) -> bool:
        if pool.knows(key):
            found[key] = None
        elif (payload := kept.block(key, again=sequence.has_asked)) is not None:
            found[key] = payload
        return key in found

    path = known_path(sequence, root, size, rules.window, is_known)

    def kept_windows(limit: int) -> int:
        for number in range(min(limit // size, len(path.keys)), 0, -1):
            payload = kept.windows(path.keys[number - 1], again=sequence.has_asked)
            if payload is not None:
                windows[number * size] = payload
                return number * size
        return 0

    num_known, prompt = len(path.keys) * size, sequence.num_prompt
    if sequence.resumed is None:
        start = first_start(rules, prompt, num_known, path.resumed, kept_windows)
    else:
        start = next_start(rules, prompt, num_known, sequence.resumed, kept_windows)
    known = tuple((key, found[key]) for key in path.keys[: start.num_known // size])
    needed = total - sum(payload is None for _, payload in known)
    return Admission(start, path.resumed, known, windows.get(start.windows_at), needed)
