"""Which workers a deployment needs and what each gets of this machine."""

from dataclasses import dataclass

import psutil

from cluster.config import DockyardConfig
from engine.config import EngineConfig, Role
from engine.gguf_file import GgufFile


@dataclass(frozen=True, slots=True)
class WorkerPlan:
    name: str
    engine: EngineConfig
    cpus: float


@dataclass(frozen=True, slots=True)
class Plan:
    """Workers in order: the one that takes requests first."""

    workers: tuple[WorkerPlan, ...]
    max_positions: int
    reasons: tuple[str, ...]


def plan_workers(config: DockyardConfig, file: GgufFile) -> Plan:
    """Raises ResourceShortage where this machine has too little memory."""
    roles: tuple[Role, ...] = ("prefill", "decode") if config.workers.disaggregated else ("both",)
    threads = config.workers.threads or psutil.cpu_count() or 1
    workers = tuple(
        WorkerPlan(
            role,
            EngineConfig(
                model=config.model, role=role, threads=threads, operations=config.workers.operations,
                kv_cache_bytes=config.workers.kv_cache_bytes, max_sequences=config.workers.max_sequences,
                token_budget=config.workers.token_budget,
            ),
            1.0,
        )
        for role in roles
    )  # fmt: skip
    return Plan(workers, int(file.require("llama.context_length")), ())
