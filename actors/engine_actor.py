"""An engine worker as a Ray actor, and the typed handle that its owner holds."""

import os
from contextlib import suppress
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

from actors import ray_api
from actors.counts import worker_counts
from actors.engine_worker import EngineWorker
from actors.event_publisher import EventPublisher
from actors.events_config import KvEventsConfig
from engine.config import EngineConfig
from engine.handoff import Handoff
from protocol.errors import DockyardError
from protocol.handoff import KvPayload, decode_header, encode_header
from protocol.worker_counts import WorkerCounts


class EngineActor:
    """Runs in a process of Ray's. Methods come in on Ray's threads; but for `start`, none takes long.

    `start` comes first: what it raises reaches the caller, which an error of a constructor does not.
    """

    def start(
        self,
        config: dict[str, Any],
        socket_path: str,
        cpus: tuple[int, ...],
        decode: ray_api.ActorHandle | None,
        events: tuple[dict[str, Any], int] | None,
    ) -> int:
        """Load the model on the given processors and serve. Returns the pid.

        `events`: where they are published (KvEventsConfig), and the worker's number.
        """
        if cpus:
            for thread in Path("/proc/self/task").iterdir():  # those that run already; new ones inherit it
                os.sched_setaffinity(int(thread.name), cpus)
        hand_over = None if decode is None else partial(self._hand_over, decode)
        publish = None
        if events is not None:
            publish = partial(EventPublisher, KvEventsConfig.model_validate(events[0]), events[1])
        self._worker = EngineWorker(
            EngineConfig.model_validate(config), Path(socket_path), hand_over, publish
        )
        self._worker.start()
        return os.getpid()

    def adopt(self, header: bytes, payload: KvPayload) -> None:
        self._worker.adopt(Handoff(decode_header(header), payload))

    def statistics(self) -> dict[str, Any]:
        return self._worker.call(lambda: asdict(self._worker.engine.statistics()))

    def counts(self) -> WorkerCounts:
        return self._worker.call(lambda: worker_counts(self._worker.engine))

    def limits(self) -> dict[str, Any]:
        engine = self._worker.engine
        return {"max_positions": engine.max_positions, "operations": engine.model.operations.name}

    def check_integrity(self) -> None:
        self._worker.call(self._worker.check_integrity)

    def set_pace(self, factor: float) -> None:
        self._worker.set_pace(factor)

    def update_weights(self, version: str, model: str | None, digest: str) -> None:
        self._worker.call(lambda: self._worker.engine.update_weights(version, model, digest))

    def stop(self) -> None:
        self._worker.stop()

    def _hand_over(self, decode: ray_api.ActorHandle, handoff: Handoff) -> None:
        """The payload goes through the object store; the call is not waited for, its failure is told."""
        request_id = handoff.header.request_id
        reference = decode.adopt.remote(encode_header(handoff.header), handoff.payload)
        ray_api.on_failure(reference, lambda error: self._worker.refuse(request_id, raised_by_worker(error)))


def raised_by_worker(error: BaseException) -> BaseException:
    """What a worker raised, out of Ray's error that carries it; any other error as it is."""
    cause = getattr(error, "cause", None)
    return cause if isinstance(cause, BaseException) else error


@dataclass(frozen=True, slots=True)
class EngineHandle:
    """What the deployment knows of a worker."""

    name: str
    pid: int
    socket_path: Path
    actor: ray_api.ActorHandle

    def statistics(self, timeout_s: float = 10.0) -> dict[str, Any]:
        return ray_api.get(self.actor.statistics.remote(), timeout_s)

    def counts(self, timeout_s: float = 5.0) -> WorkerCounts | None:
        """What it has counted; None where it does not answer. Blocks for a step of the worker's."""
        with suppress(Exception):  # whatever Ray says of a process that is gone, or too busy
            return ray_api.get(self.actor.counts.remote(), timeout_s)
        return None

    def limits(self, timeout_s: float = 10.0) -> dict[str, Any]:
        return ray_api.get(self.actor.limits.remote(), timeout_s)

    def check_integrity(self, timeout_s: float = 10.0) -> None:
        ray_api.get(self.actor.check_integrity.remote(), timeout_s)

    def set_pace(self, factor: float, timeout_s: float = 10.0) -> None:
        ray_api.get(self.actor.set_pace.remote(factor), timeout_s)

    def update_weights(
        self, version: str, model: str | None = None, digest: str = "", timeout_s: float = 180.0
    ) -> None:
        """Go on with other weights (`Engine.update_weights`). Hand-offs between workers of two versions are
        refused, so a prefill worker and its decode workers change together: by `model`, or in place with the
        `digest` of what they all have now (`engine.model.content_digest`)."""
        ray_api.get(self.actor.update_weights.remote(version, model, digest), timeout_s)

    def stop(self, timeout_s: float = 10.0) -> None:
        """End the worker's threads, then its process."""
        try:
            ray_api.get(self.actor.stop.remote(), timeout_s)
        finally:
            ray_api.kill(self.actor)


@dataclass(frozen=True, slots=True)
class PendingEngine:
    """A worker whose process is on its way."""

    name: str
    socket_path: Path
    actor: ray_api.ActorHandle
    starting: Any  # the call to `start`

    def wait(self, timeout_s: float) -> EngineHandle:
        """Blocks until the worker serves. Raises the error with which it did not start."""
        try:
            pid: int = ray_api.get(self.starting, timeout_s)
        except BaseException as error:
            ray_api.kill(self.actor)
            cause = getattr(error, "cause", None)  # Ray's error holds that of the worker
            if isinstance(cause, DockyardError):
                raise cause from error
            raise
        return EngineHandle(self.name, pid, self.socket_path, self.actor)


def launch_engine(
    config: EngineConfig,
    socket_path: Path,
    *,
    name: str,
    booked_cpus: float,
    cpus: tuple[int, ...],
    decode: ray_api.ActorHandle | None = None,
    events: KvEventsConfig | None = None,
    number: int = 0,
) -> PendingEngine:
    """Start a worker's process; returns at once, so that workers load their models side by side.

    `cpus` are the processors that it runs on, `booked_cpus` what Ray's own accounting sees. `events`: where
    worker `number` of its deployment publishes them.
    """
    actor = ray_api.create_actor(EngineActor, name=name, num_cpus=booked_cpus, max_concurrency=8)
    told = None if events is None else (events.model_dump(), number)
    starting = actor.start.remote(config.model_dump(), str(socket_path), cpus, decode, told)
    return PendingEngine(name, socket_path, actor, starting)
