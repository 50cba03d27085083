"""Memory that a whole pass over a long context adds to its process.

`python -m bench.forward_memory --json [--quick]`. A random DeepSeek-V4.1 of the least widths, with every
mechanism (quantised caches, indexers, candidates, Engram) and a million positions, gives the logits of the
last of 131,072 tokens. A process of its own does, whose resident peak the kernel keeps: it counts what C and
NumPy allocate too, beside PyTorch's tensors. The peak is reset behind a short pass, so that what is left is
what the long one adds: its caches, which grow with the length, and work memory, which does not.

The peer is the same over half as many tokens. A tensor of length times length, were it of single bytes, would
take 16 GiB, and four times as much at twice the length.
"""

import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import msgspec
import torch

from bench import common, resident_memory
from bench.random_deepseek import Size, config_json, random_model

LENGTH, QUICK_LENGTH = 131_072, 32_768
TARGET = 2.2  # of twice the length, and a little for what comes in steps
BOUND_MIB = 256.0
TINY = Size(
    vocabulary=64, hidden=32, heads=1, head_channels=32, rope_channels=8, query_rank=32, output_groups=1,
    output_rank=32, inner=32, experts=2, experts_per_token=1, window=8, index_heads=1, index_channels=32,
    selected=16, candidate_blocks=8, engram_rows_a_head=32, engram_heads=1, positions=1 << 20,
)  # fmt: skip
_SHORT = 64
_ROOT = Path(__file__).parent.parent
_MIB = 1 << 20


@dataclass(frozen=True, slots=True)
class Pass:
    """Resident bytes: before the pass, at its peak; and what its caches hold at its end."""

    length: int
    before_bytes: int
    peak_bytes: int
    cache_bytes: int

    @property
    def added_bytes(self) -> int:
        return self.peak_bytes - self.before_bytes


@dataclass(frozen=True, slots=True)
class Verdict(common.Comparison):
    """Less is better, and there is a bound."""

    @property
    def met(self) -> bool:
        return self.ratio <= self.target and self.value <= BOUND_MIB


def main(arguments: Sequence[str]) -> int:
    """Measure, print, and return 1 where memory grows faster than the length."""
    if arguments[:1] == ["--inside"]:
        sys.stdout.buffer.write(msgspec.json.encode(_run(int(arguments[1]))))
        return 0
    options = common.parse("forward_memory", __doc__, arguments)
    surroundings = common.Surroundings(("torch", "numpy"))
    length = QUICK_LENGTH if options.quick else LENGTH
    half, whole = run_pass(length // 2), run_pass(length)
    verdict = Verdict(
        name="forward_memory",
        unit=f"MiB that a pass over {length} tokens adds",
        value=whole.added_bytes / _MIB,
        peer=f"over {length // 2} tokens",
        peer_value=half.added_bytes / _MIB,
        target=TARGET,
    )
    detail = {
        "bound_mib": BOUND_MIB,
        "peak_mib": whole.peak_bytes / _MIB,
        "cache_mib": whole.cache_bytes / _MIB,
        "length_by_length_mib": length * length / _MIB,
    }
    return common.finish(common.report(verdict, surroundings, detail), options)


def run_pass(length: int) -> Pass:
    """In a process of its own, on one thread. Blocks for seconds at 10,000 tokens, minutes at 100,000."""
    command = [sys.executable, "-m", "bench.forward_memory", "--inside", str(length)]
    done = subprocess.run(command, cwd=_ROOT, stdout=subprocess.PIPE, check=True)
    return msgspec.json.decode(done.stdout, type=Pass)


def _run(length: int) -> Pass:
    torch.set_num_threads(1)
    model = random_model(config_json(TINY), 1)
    ids = [i * 7 % TINY.vocabulary for i in range(length)]
    model.logits(ids[:_SHORT], last_only=True)
    resident_memory.reset_peak()
    before = resident_memory.now_bytes()
    logits = model.logits(ids, last_only=True)
    assert bool(logits.isfinite().all())
    return Pass(length, before, resident_memory.peak_bytes(), round(model.cache_bytes_per_token() * length))


if __name__ == "__main__":
    common.run(main)
