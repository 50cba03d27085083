"""Prefix hits of two published traces, through the block pool that the engine allocates from.

Each request of a trace holds the known blocks of its prefix, takes new ones for the rest, tells the pool what
they contain and gives all back. A block hits only if its whole prefix hits. The known table is the one beside
the traces; every rate must lie within 0.2 points of it.
"""

import argparse
import json
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bench.common import Options, Surroundings, finish, progress, run
from engine.cache.block_pool import BlockPool
from engine.cache.keys import block_key, root_key

BLOCK_TOKENS = 512  # of the traces
LIMIT_POINTS = 0.2
DATA = Path(__file__).parents[2] / "shared" / "data"
SIZES = (0, 1_000, 5_000, 10_000, 20_000, 50_000)  # blocks; 0: as many as the trace has
KNOWN = {
    "mooncake_conversation": (36.6, 4.5, 11.0, 21.1, 28.8, 35.5),
    "mooncake_synthetic": (64.0, 8.3, 27.9, 42.4, 57.2, 64.0),
}
"""Percent at `SIZES`."""


@dataclass(frozen=True, slots=True)
class Rate:
    trace: str
    blocks: int
    percent: float
    known: float

    @property
    def off(self) -> float:
        """Points between what is measured and what is known."""
        return abs(self.percent - self.known)


def read_trace(path: Path) -> list[tuple[int, ...]]:
    """The block ids of each request, in order of arrival."""
    return [tuple(json.loads(line)["hash_ids"]) for line in path.read_text().splitlines()]


def chains(requests: Sequence[tuple[int, ...]]) -> list[list[bytes]]:
    """Keys of each request's blocks. An id stands for the tokens of its block."""
    root, found = root_key("trace"), list[list[bytes]]()
    for ids in requests:
        chain: list[bytes] = []
        for number in ids:
            chain.append(block_key(chain[-1] if chain else root, (number,)))
        found.append(chain)
    return found


def hit_percent(requests: Sequence[Sequence[bytes]], num_blocks: int) -> float:
    """Of all blocks asked for, those that were known behind a known prefix."""
    pool = BlockPool(num_blocks or len({key for chain in requests for key in chain}), BLOCK_TOKENS)
    hits = asked = 0
    for chain in requests:
        blocks = pool.match(chain)
        asked, hits, known = asked + len(chain), hits + len(blocks), len(blocks)
        blocks += pool.allocate(len(chain) - known)
        for index in range(known, len(chain)):
            pool.register(blocks[index], chain[index], chain[index - 1] if index else None)
        pool.release(blocks)
    pool.check_integrity([])
    return 100 * hits / asked


def rates(data: Path, quick: bool) -> Iterator[Rate]:
    """`quick`: the smaller trace alone."""
    for trace, known in KNOWN.items():
        if quick and trace != "mooncake_synthetic":
            continue
        requests = chains(read_trace(data / f"{trace}.jsonl"))
        for blocks, percent in zip(SIZES, known, strict=True):
            yield Rate(trace, blocks, hit_percent(requests, blocks), percent)


def measure(data: Path, options: Options) -> dict[str, Any]:
    """The bench's object. Raises FileNotFoundError where the traces are not at `data`."""
    surroundings, started = Surroundings([]), time.perf_counter()
    found = list(rates(data, options.quick))
    worst = max(rate.off for rate in found)
    return {
        "name": "prefix_hits", "value": round(worst, 3), "unit": "points off the known table",
        "peer": "the table beside the traces", "peer_value": 0.0, "ratio": None, "target": LIMIT_POINTS,
        "met": worst <= LIMIT_POINTS, "env": surroundings.describe(),
        "seconds": round(time.perf_counter() - started, 1),
        "rates": [
            {"trace": r.trace, "blocks": r.blocks or "infinite", "percent": round(r.percent, 2),
             "known": r.known}
            for r in found
        ],
    }  # fmt: skip


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m bench.prefix_hits", description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )  # fmt: skip
    parser.add_argument("--json", action="store_true", help="print one JSON object on the last line")
    parser.add_argument("--quick", action="store_true", help="the smaller trace alone")
    parser.add_argument("--data", type=Path, default=DATA, help="the folder of the traces")
    given = parser.parse_args(arguments)
    options = Options(given.json, given.quick)
    if not (given.data / "mooncake_synthetic.jsonl").exists():
        progress(f"--data {given.data}: no traces there; docs/benchmarks.md says where they come from")
        finish({"name": "prefix_hits", "value": None, "unit": "no traces", "met": None}, options)
        return 2
    return finish(measure(given.data, options), options)


if __name__ == "__main__":
    run(main)
