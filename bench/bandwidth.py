"""How much of the machine's memory bandwidth decoding uses.

`python -m bench.bandwidth --json [--quick]`. One sequence of smollm2 in profile `fast`. A decoding step reads
every weight once (the model's own tensors, as packed for this machine) and the keys and values of every
position so far. These bytes over the step's time are set against what plain reading reaches: numpy's and
PyTorch's sums and maxima over a buffer of 1 GiB, on as many threads, the best of all tries. The two take
turns, so that a machine that slows down slows both.
"""

import os
import random
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from functools import partial
from statistics import median
from typing import Any, cast

import numpy as np
import torch
from numpy.typing import NDArray

from bench import common
from engine import Engine, EngineConfig, Request, SamplingParams
from engine.gguf_file import open_gguf
from engine.model.llama import LlamaModel
from engine.model_path import model_path
from kernels.operations import Decoder, DecoderStack, Operations, Weight, select_operations

TARGET = 0.6
BUFFER_BYTES = 1 << 30
VOCABULARY = 49_152


@dataclass(frozen=True, slots=True)
class Size:
    """How much is measured; tokens. `tries` of each way to read the buffer, a round."""

    rounds: int
    prompt: int
    decode: int
    tries: int


FULL = Size(rounds=9, prompt=64, decode=192, tries=3)
QUICK = Size(rounds=4, prompt=64, decode=96, tries=2)


@dataclass(frozen=True, slots=True)
class StepBytes:
    """What a decoding step reads. KV grows with every position."""

    weights: int
    kv_a_position: int

    def at(self, positions: int) -> int:
        return self.weights + positions * self.kv_a_position


@dataclass(frozen=True, slots=True)
class Round:
    """GB/s: the median step's, and the best reading of the buffer. `step_ms` is the median step."""

    decode: float
    buffer: float
    step_ms: float


class Counting:
    """Operations that add up the bytes of what a model has prepared for its steps."""

    def __init__(self, operations: Operations) -> None:
        self._operations, self.bytes = operations, 0

    def __getattr__(self, name: str) -> Any:
        return getattr(self._operations, name)

    def prepare(self, weight: Weight) -> Weight:
        prepared = self._operations.prepare(weight)
        self.bytes += prepared.data.nbytes
        return prepared

    def decoder(self, stack: DecoderStack) -> Decoder:
        for layer in stack.layers:
            self.bytes += layer.attention_norm.nbytes + layer.feed_forward_norm.nbytes
        return self._operations.decoder(stack)


def main(arguments: Sequence[str]) -> int:
    """Measure, print, and return 1 where the target was missed."""
    options = common.parse("bandwidth", __doc__, arguments)
    surroundings = common.Surroundings(("torch", "numpy"))
    threads = len(os.sched_getaffinity(0))
    torch.set_num_threads(threads)
    size = QUICK if options.quick else FULL
    step_bytes = bytes_of_step()
    rounds = measure(size, threads, step_bytes)
    found = common.Comparison(
        name="bandwidth",
        unit="GB/s",
        value=median(each.decode for each in rounds),
        peer="reading a buffer of 1 GiB",
        peer_value=max(each.buffer for each in rounds),
        target=TARGET,
    )
    detail = {
        "threads": threads,
        "size": asdict(size),
        "weight_bytes": step_bytes.weights,
        "kv_bytes_a_position": step_bytes.kv_a_position,
        "step_ms": round(median(each.step_ms for each in rounds), 3),
        "rounds": [asdict(each) for each in rounds],
    }
    return common.finish(common.report(found, surroundings, detail), options)


def bytes_of_step() -> StepBytes:
    """From the model's own tensors, loaded once more for it; of the embedding a step reads one row."""
    counting = Counting(select_operations(1, "c", "fast"))
    model = LlamaModel(open_gguf(model_path("smollm2")), cast(Operations, counting))
    rest = 2 * model.config.channels * 4  # the row, and the last norm
    return StepBytes(counting.bytes + rest, int(model.cache_bytes_per_token()))


def measure(size: Size, threads: int, step_bytes: StepBytes) -> list[Round]:
    """In turns; the first round warms up and is not counted."""
    engine = Engine(EngineConfig(threads=threads, operations="c", profile="fast", kv_cache_bytes=256 << 20))
    buffer: NDArray[np.int64] = np.ones(BUFFER_BYTES // 8, np.int64)  # each page is touched
    rounds: list[Round] = []
    with ThreadPoolExecutor(threads) as pool:
        readings = ways_to_read(buffer, pool, threads)
        for number in range(size.rounds + 1):
            best_s = min(seconds(reading) for reading in readings for _ in range(size.tries))
            rates, steps_s = decode(engine, size, step_bytes, number)
            rounds.append(Round(median(rates), buffer.nbytes / best_s / 1e9, median(steps_s) * 1e3))
            common.progress(f"round {number} of {size.rounds}: {rounds[-1]}")
    return rounds[1:]


def ways_to_read(
    buffer: NDArray[np.int64], pool: ThreadPoolExecutor, threads: int
) -> list[Callable[[], object]]:
    """Functions that read the whole buffer on `threads` threads. NumPy lets go of the interpreter."""
    parts: list[NDArray[np.int64]] = np.array_split(buffer, threads)
    whole = torch.from_numpy(buffer)  # pyright: ignore[reportUnknownMemberType]

    def over(read: Callable[[NDArray[np.int64]], object]) -> object:
        return list(pool.map(read, parts))

    return [partial(over, np.sum), partial(over, np.max), whole.sum, whole.max]


def decode(engine: Engine, size: Size, step_bytes: StepBytes, number: int) -> tuple[list[float], list[float]]:
    """GB/s and seconds of each decoding step behind a prompt that no cache has seen."""
    prompt = random.Random(number).choices(range(100, VOCABULARY), k=size.prompt)
    sampling = SamplingParams(max_tokens=size.decode, ignore_eos=True)
    engine.add(Request(f"r{number}", tuple(prompt), sampling))
    engine.step()  # the prompt, and the first token
    rates: list[float] = []
    steps_s: list[float] = []
    while engine.has_work:
        steps_s.append(seconds(engine.step))
        positions = size.prompt + len(steps_s)
        rates.append(step_bytes.at(positions) / steps_s[-1] / 1e9)
    return rates, steps_s


def seconds(work: Callable[[], object]) -> float:
    start_s = time.perf_counter()
    work()
    return time.perf_counter() - start_s


if __name__ == "__main__":
    common.run(main)
