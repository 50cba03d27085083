"""A model on its workers on a local Ray cluster: brought up in order, taken down in reverse."""

import os
import secrets
import shutil
import tempfile
import time
from collections.abc import Callable, Generator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import psutil

from actors import ray_api
from actors.engine_actor import EngineHandle, PendingEngine, launch_engine
from actors.ray_api import ActorHandle
from cluster.config import DockyardConfig, child_environment, export_to_children
from cluster.lifeline import raise_if_told
from cluster.plan import Plan, WorkerPlan, plan_workers, this_machine
from cluster.served import served_model
from cluster.state import MARK, DeploymentRecord, StateFolder, end_marked, started_at
from engine.model_path import model_path
from gateway.service import ServedModel
from protocol.errors import DockyardError, InvalidInput
from protocol.openmp import brief_spin
from protocol.worker_counts import WorkerCounts

_GLANCE_S = 0.2  # how often the wait for a worker looks for a signal


class WorkerLate(DockyardError):
    """A worker did not load its model in the time that it has."""


@dataclass(frozen=True, slots=True)
class Deployment:
    """Running workers. `entry` takes requests; with one worker it is also where they end."""

    id: str
    model: ServedModel
    workers: tuple[EngineHandle, ...]
    plan: Plan  # of the workers, in their order
    scratch: Path

    @property
    def entry(self) -> EngineHandle:
        return self.workers[0]

    def describe(self) -> dict[str, Any]:
        """Workers with their counters, for `dockyard status`. Blocks for a Ray call a worker."""
        workers = [
            {
                "role": worker.name,
                "pid": worker.pid,
                "kind": "ray actor",
                "place": planned.place,
                "promised_bytes": planned.memory_bytes,
                **worker.statistics(),
            }
            for worker, planned in zip(self.workers, self.plan.workers, strict=True)
        ]
        return {
            "id": self.id,
            "model": self.model.name,
            "workers": workers,
            "placement": list(self.plan.reasons),
        }

    def counts(self) -> list[tuple[str, WorkerCounts | None]]:
        """What each worker has counted, by its role. Blocks for a Ray call a worker."""
        return [(worker.name, worker.counts()) for worker in self.workers]

    def set_pace(self, role: str, factor: float) -> None:
        """Stretch a worker's steps to `factor` times their length. Blocks for a Ray call.

        Raises InvalidInput where there is no such worker.
        """
        worker = next((worker for worker in self.workers if worker.name == role), None)
        if worker is None:
            raise InvalidInput(
                f"no worker {role!r}", hint=f"roles: {', '.join(w.name for w in self.workers)}"
            )
        worker.set_pace(factor)


@contextmanager
def deployed(config: DockyardConfig, state: StateFolder, say: Callable[[str], None]) -> Generator[Deployment]:
    """Bring a deployment up; whatever happens inside or on the way, nothing of it stays.

    Blocks for some seconds at both ends; `say` is told each stage. For a block of `signals_held`. Raises
    UnknownModel, BrokenModelFile, ResourceShortage, WorkerLate, and Stopped on a signal.
    """
    path = model_path(config.model)  # before anything is started
    served = served_model(config.model, path, 0)
    plan = plan_workers(config, path, this_machine())
    deployment_id = f"dy-{secrets.token_hex(4)}"
    with ExitStack() as stack:
        scratch = Path(tempfile.mkdtemp(prefix="dockyard-", dir=_short_folder()))
        stack.callback(shutil.rmtree, scratch, ignore_errors=True)
        pid = os.getpid()
        stack.callback(state.forget, deployment_id)
        state.write(
            DeploymentRecord(
                id=deployment_id,
                pid=pid,
                started_at=started_at(pid),
                scratch=str(scratch),
                model=config.model,
            )
        )
        # Ray gives the folder that its driver stands in to its workers as a place to import from.
        stack.callback(os.chdir, Path.cwd())
        os.chdir(scratch)
        stack.callback(end_marked, deployment_id, str(scratch))  # what Ray starts while it is ended
        stack.callback(ray_api.stop)
        _start_ray(config, scratch, deployment_id)
        say("Ray is up")
        pending = _launch(plan, scratch)
        workers = tuple(stack.enter_context(_running(p, config.ray.start_timeout_s, say)) for p in pending)
        limits = workers[0].limits()
        served = replace(served, max_positions=int(limits["max_positions"]))
        yield Deployment(deployment_id, served, workers, plan, scratch)


def _start_ray(config: DockyardConfig, scratch: Path, deployment_id: str) -> None:
    """A cluster of our own: its session under `scratch`, usage statistics off, its token never outside."""
    token = scratch / "ray-token"
    token.write_text(secrets.token_hex(32))
    token.chmod(0o600)
    export_to_children(
        **{MARK: deployment_id},
        **brief_spin(child_environment()),
        RAY_USAGE_STATS_ENABLED="0",
        RAY_AUTH_MODE="token",
        RAY_AUTH_TOKEN_PATH=str(token),
        RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO="0",  # leave the accelerators' variables as they are
    )
    ray_api.start(
        num_cpus=psutil.cpu_count() or 1,
        object_store_bytes=config.ray.object_store_bytes,
        temp_dir=scratch / "ray",
        namespace=deployment_id,
    )


def _launch(plan: Plan, scratch: Path) -> list[PendingEngine]:
    """Start all workers at once; the first hands over to the last."""
    *entries, last = plan.workers
    decode = _launch_one(last, scratch)
    return [*(_launch_one(entry, scratch, decode.actor) for entry in entries), decode]


def _launch_one(plan: WorkerPlan, scratch: Path, decode: ActorHandle | None = None) -> PendingEngine:
    return launch_engine(
        plan.engine,
        scratch / f"{plan.name}.sock",
        name=plan.name,
        booked_cpus=plan.booked_cpus,
        cpus=plan.cpus,
        decode=decode,
        events=plan.events,
        number=plan.number,
    )


@contextmanager
def _running(pending: PendingEngine, timeout_s: float, say: Callable[[str], None]) -> Generator[EngineHandle]:
    _wait(pending, timeout_s)
    handle = pending.wait(timeout_s)
    say(f"the {pending.name} worker has loaded its model (pid {handle.pid})")
    try:
        yield handle
    finally:
        with suppress(Exception):  # it may have died, or be in a long step; `stop` has ended its process
            handle.stop()


def _wait(pending: PendingEngine, timeout_s: float) -> None:
    """Until the worker has loaded its model, or failed to; its handle says which."""
    deadline = time.monotonic() + timeout_s
    while not ray_api.is_done(pending.starting, _GLANCE_S):
        raise_if_told()
        if time.monotonic() > deadline:
            raise WorkerLate(
                f"the {pending.name} worker did not load its model within {timeout_s:g} s",
                hint="ray.start_timeout_s in the configuration gives it longer",
            )
    raise_if_told()


def _short_folder() -> str | None:
    """A Unix socket's path holds 107 bytes, and Ray puts 60 of its own below its session folder."""
    return "/tmp" if Path("/tmp").is_dir() else None
