"""An engine worker as a Ray actor, and the typed handle that its owner holds."""

import os
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

from actors import ray_api
from actors.engine_worker import EngineWorker
from engine.config import EngineConfig
from engine.handoff import Handoff
from protocol.handoff import KvPayload, decode_header, encode_header


class EngineActor:
    """Runs in a process of Ray's. Methods come in on Ray's threads; none takes long."""

    def __init__(self, config: dict[str, Any], socket_path: str, decode: ray_api.ActorHandle | None) -> None:
        hand_over = None if decode is None else partial(self._hand_over, decode)
        self._worker = EngineWorker(EngineConfig.model_validate(config), Path(socket_path), hand_over)
        self._worker.start()

    def pid(self) -> int:
        return os.getpid()

    def adopt(self, header: bytes, payload: KvPayload) -> None:
        self._worker.adopt(Handoff(decode_header(header), payload))

    def statistics(self) -> dict[str, Any]:
        return self._worker.call(lambda: asdict(self._worker.engine.statistics()))

    def limits(self) -> dict[str, Any]:
        engine = self._worker.engine
        return {"max_positions": engine.max_positions, "operations": engine.model.operations.name}

    def check_integrity(self) -> None:
        self._worker.call(self._worker.engine.check_integrity)

    def set_pace(self, factor: float) -> None:
        self._worker.set_pace(factor)

    def stop(self) -> None:
        self._worker.stop()

    def _hand_over(self, decode: ray_api.ActorHandle, handoff: Handoff) -> None:
        """The payload goes through the object store; the call is not waited for, its failure is told."""
        request_id = handoff.header.request_id
        reference = decode.adopt.remote(encode_header(handoff.header), handoff.payload)
        ray_api.on_failure(
            reference,
            lambda error: self._worker.fail(request_id, f"the decode worker did not take it: {error}"),
        )


@dataclass(frozen=True, slots=True)
class EngineHandle:
    """What the deployment knows of a worker."""

    name: str
    pid: int
    socket_path: Path
    actor: ray_api.ActorHandle

    def statistics(self, timeout_s: float = 10.0) -> dict[str, Any]:
        return ray_api.get(self.actor.statistics.remote(), timeout_s)

    def limits(self, timeout_s: float = 10.0) -> dict[str, Any]:
        return ray_api.get(self.actor.limits.remote(), timeout_s)

    def check_integrity(self, timeout_s: float = 10.0) -> None:
        ray_api.get(self.actor.check_integrity.remote(), timeout_s)

    def set_pace(self, factor: float, timeout_s: float = 10.0) -> None:
        ray_api.get(self.actor.set_pace.remote(factor), timeout_s)

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

    def wait(self, timeout_s: float) -> EngineHandle:
        """Blocks until the worker serves. Raises what its construction raised."""
        try:
            return EngineHandle(
                self.name, ray_api.get(self.actor.pid.remote(), timeout_s), self.socket_path, self.actor
            )
        except BaseException:
            ray_api.kill(self.actor)
            raise


def launch_engine(
    config: EngineConfig,
    socket_path: Path,
    *,
    name: str,
    cpus: float,
    decode: ray_api.ActorHandle | None = None,
) -> PendingEngine:
    """Start a worker's process; returns at once, so that workers load their models side by side."""
    actor = ray_api.create_actor(
        EngineActor, config.model_dump(), str(socket_path), decode,
        name=name, num_cpus=cpus, max_concurrency=8,
    )  # fmt: skip
    return PendingEngine(name, socket_path, actor)
