"""Every sandbox of a run is placed before it is made, and gives its place back when it has gone."""

import random
from collections.abc import Generator, Mapping
from contextlib import contextmanager
from pathlib import Path

import psutil

from cluster.plan import this_machine
from evals.grading import Execute, Execution
from placement.placer import Placer, placer_of
from placement.sandboxes import sandbox_bins
from placement.workers import WorkerPlacement
from protocol.ids import new_id
from protocol.resources import Resources
from teams.workspace import AgentSandbox, CommandResult, SandboxFactory, Tree

_DISK_SHARE = 0.5  # of what is free where the state lies: runs must not fill the host's disk
_PIDS = 16_384  # half of what Linux gives a host by default
_MAX_REASONS = 100  # kept for the report


class SandboxPlaces:
    """The bins of this machine as one command sees them. For one event loop; calls do not block."""

    def __init__(self, state_dir: Path, outstanding_bytes: Mapping[str, int]) -> None:
        """`outstanding_bytes`: by place, what the model's workers may still take of the free memory."""
        disk = int(psutil.disk_usage(str(state_dir)).free * _DISK_SHARE)
        topology = this_machine()
        left = {
            place: domain.free_bytes - outstanding_bytes.get(place, 0)
            for _, domain, place in topology.domains()
        }
        workers = WorkerPlacement((), left, {})
        bins = sandbox_bins(topology, disk_bytes=disk, pids=_PIDS, workers=workers)
        self._placer: Placer = placer_of(bins, random.Random(0))
        self.reasons: list[str] = []
        self.num_placed = 0

    @contextmanager
    def place(self, name: str, resources: Resources) -> Generator[str]:
        """A place for as long as the block lasts. Raises ResourceShortage with each bin's reason."""
        place = self.take(name, resources)
        try:
            yield place
        finally:
            self.release(place)

    def take(self, name: str, resources: Resources) -> str:
        """Like `place`, until `release`. Returns what to release."""
        place = f"{name}-{new_id('sbx')}"
        choice = self._placer.place(place, resources)
        choice.require()
        self.num_placed += 1
        if len(self.reasons) < _MAX_REASONS:
            self.reasons.append(f"{name}: {choice.bin}, {choice.steps[-1].said}")
        return place

    def release(self, place: str) -> None:
        """Harmless for a place that was released before."""
        self._placer.release(place)


def placed_execute(execute: Execute, places: SandboxPlaces, resources: Resources) -> Execute:
    """A grader whose sandboxes are placed."""

    async def placed(files: Mapping[str, bytes], script: str) -> Execution:
        with places.place("grader", resources):
            return await execute(files, script)

    return placed


class PlacedBoxes:
    """A factory of agents' sandboxes that are placed; a box gives its place back when it is killed."""

    def __init__(self, boxes: SandboxFactory, places: SandboxPlaces, resources: Resources) -> None:
        self._boxes, self._places, self._resources = boxes, places, resources

    async def __call__(self, name: str, tree: Tree) -> AgentSandbox:
        place = self._places.take(name, self._resources)
        try:
            return _PlacedBox(await self._boxes(name, tree), self._places, place)
        except BaseException:
            self._places.release(place)
            raise


class _PlacedBox:
    def __init__(self, box: AgentSandbox, places: SandboxPlaces, place: str) -> None:
        self._box, self._places, self._place = box, places, place
        self.shortfalls = box.shortfalls

    async def run(self, command: str, *, timeout_s: float) -> CommandResult:
        return await self._box.run(command, timeout_s=timeout_s)

    async def read(self, path: str) -> bytes | None:
        return await self._box.read(path)

    async def write(self, path: str, data: bytes) -> None:
        await self._box.write(path, data)

    async def remove(self, path: str) -> None:
        await self._box.remove(path)

    async def snapshot(self) -> Tree:
        return await self._box.snapshot()

    async def kill(self) -> None:
        try:
            await self._box.kill()
        finally:
            self._places.release(self._place)
