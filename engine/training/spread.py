"""Measurements over processes of one thread each, which use a small machine's cores best."""

import multiprocessing
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from typing import TypeVar

import torch

R = TypeVar("R")
Job = Callable[[], R]
"""Must travel to another process: a partial of a module's function."""


def spread(jobs: Sequence[Job[R]], processes: int, say: Callable[[str], None]) -> list[R]:
    """Results in the order of the jobs. One process runs them here. Blocks; `say` is told how far it is."""
    started = time.monotonic()
    found: dict[int, R] = {}

    def done(number: int, result: R) -> None:
        found[number] = result
        say(f"{len(found)} of {len(jobs)} parts, {time.monotonic() - started:.0f} s")

    if processes == 1:
        for number, job in enumerate(jobs):
            done(number, job())
    else:
        context = multiprocessing.get_context("spawn")
        with ProcessPoolExecutor(processes, context, torch.set_num_threads, (1,)) as pool:
            futures = {pool.submit(job): number for number, job in enumerate(jobs)}
            for future in as_completed(futures):
                done(futures[future], future.result())
    return [found[number] for number in range(len(jobs))]
