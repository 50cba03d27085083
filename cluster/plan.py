"""Which workers a deployment needs, and what each gets of this machine."""

import math
import os
from dataclasses import dataclass
from pathlib import Path

from actors.events_config import KvEventsConfig
from cluster.config import DockyardConfig
from engine.cache.block_size import block_size
from engine.config import EngineConfig, Role
from engine.model_path import BUILT_IN
from placement.probe import probe
from placement.topology import Topology
from placement.workers import WorkerDemand, WorkerPlacement, place_workers

_PROCESS_BYTES = 700 << 20  # a worker's own memory without model and cache: Python, torch and Ray
_RESERVE_BYTES = 512 << 20  # for Ray's daemons and the gateway
_PACKED = {"I8": 2}  # weights in a stored byte: FP4 has two
_MAX_THREADS = 4  # more do not pay for a model that fits into a laptop


@dataclass(frozen=True, slots=True)
class WorkerPlan:
    name: str
    engine: EngineConfig
    cpus: tuple[int, ...]  # the processors that it runs on
    booked_cpus: float  # what Ray books; cores may be shared, so it books a share
    place: str  # the domain of the placement
    memory_bytes: int  # promised to it: weights, KV pool, tiers in memory and the process itself
    number: int = 0  # among the deployment's workers
    events: KvEventsConfig | None = None  # where it publishes them


@dataclass(frozen=True, slots=True)
class Plan:
    """Workers in order: the one that takes requests first."""

    workers: tuple[WorkerPlan, ...]
    reasons: tuple[str, ...]


def this_machine() -> Topology:
    """The topology that this process may use."""
    return probe(frozenset(os.sched_getaffinity(0)))


def plan_workers(config: DockyardConfig, path: Path, topology: Topology) -> Plan:
    """Place the workers.

    Raises ResourceShortage with what is needed and what there is; BrokenModelFile, and InvalidRequest for
    blocks that do not fit the model.
    """
    roles: tuple[Role, ...] = ("prefill", "decode") if config.workers.disaggregated else ("both",)
    cores = sum(len(domain.cores) for _, domain, _ in topology.domains())
    window_bytes = _window_bytes(config, path, topology, len(roles))
    fitting = {"block_tokens": block_size(config.workers.block_tokens, _entry_ratios(path))}
    config = config.model_copy(update={"workers": config.workers.model_copy(update=fitting)})
    kept = config.workers.kv_cache_bytes + config.workers.tiers.host_bytes + window_bytes
    memory = _model_bytes(path) + kept + _PROCESS_BYTES
    # A request is in one stage at a time, so on a small machine each worker gets all cores, shared.
    demands = [
        WorkerDemand(
            role, memory, min_threads=min(cores, _MAX_THREADS), near=tuple(r for r in roles if r != role)
        )
        for role in roles
    ]
    placement = place_workers(topology, demands, reserve_bytes=_RESERVE_BYTES + config.ray.object_store_bytes)
    workers = tuple(
        _worker(config, role, placement, window_bytes, number) for number, role in enumerate(roles)
    )
    return Plan(workers, tuple(placement.describe().splitlines()))


def _model_bytes(path: Path) -> int:
    """Of a file what it has, which stays mapped; of a folder what its tensors take in float32, at most."""
    if not path.is_dir():
        return path.stat().st_size
    from engine.checkpoint.folder import read_header  # brings safetensors

    tensors = [tensor for shard in path.glob("*.safetensors") for tensor in read_header(shard).values()]
    return sum(4 * _PACKED.get(tensor.dtype, 1) * math.prod(tensor.shape) for tensor in tensors)


def _entry_ratios(path: Path) -> frozenset[int]:
    """As the model's `entry_ratios`, without its weights."""
    if not path.is_dir():
        return frozenset({1})
    from engine.checkpoint.family import read_family
    from engine.checkpoint.folder import read_config

    return read_family(read_config(path)).entry_ratios


def _window_bytes(config: DockyardConfig, path: Path, topology: Topology, num_workers: int) -> int:
    """Of kept windows, a worker: as set, or a share of a tenth of what is free. Files have no such model."""
    if not path.is_dir():
        return 0
    set_bytes = config.workers.tiers.window_bytes
    free_bytes = sum(domain.free_bytes for _, domain, _ in topology.domains())
    return free_bytes // 10 // num_workers if set_bytes is None else set_bytes


def _worker(
    config: DockyardConfig,
    role: Role,
    placement: WorkerPlacement,
    window_bytes: int,
    number: int,
) -> WorkerPlan:
    workers, events = config.workers, config.workers.kv_events
    choice = placement.choice(role)
    threads = workers.threads or min(choice.threads, _MAX_THREADS)
    engine = EngineConfig(
        model=_absolute(config.model),
        role=role,
        threads=threads,
        operations=workers.operations,
        profile=workers.profile,
        kv_cache_bytes=workers.kv_cache_bytes,
        max_sequences=workers.max_sequences,
        max_waiting=workers.max_waiting,
        starvation_s=workers.starvation_s,
        token_budget=workers.token_budget,
        block_tokens=workers.block_tokens,
        caches=workers.caches,
        replay=workers.replay,
        preemption=workers.preemption,
        tiers=workers.tiers.model_copy(update={"window_bytes": window_bytes}),
        kv_events=events.enable_kv_cache_events,
        kv_event_batches=events.buffer_steps,
    )
    return WorkerPlan(
        role, engine, choice.cpus, 0.5, choice.place, choice.memory_bytes,
        number, events if events.publishes else None,
    )  # fmt: skip


def _absolute(model: str) -> str:
    """A path that means the same in a worker's folder; a built-in name stays as it is."""
    return model if model in BUILT_IN else str(Path(model).resolve())
