"""An engine's statistics as the counts that cross to the gateway."""

from engine.cache.disk_tier import DiskStatistics
from engine.cache.host_tier import HostStatistics
from engine.cache.tiers import TierStatistics
from engine.engine import Engine
from engine.results import EngineStatistics
from protocol.stages import StageNs
from protocol.worker_counts import TierCounts, TierName, WorkerCounts


def worker_counts(engine: Engine) -> WorkerCounts:
    """In the engine's thread, between two steps."""
    found = engine.statistics()
    pool, scheduler, stages = found.pool, found.scheduler, found.stages
    return WorkerCounts(
        role=engine.config.role,
        steps=found.steps,
        rows=found.rows,
        blocks_total=pool.total,
        blocks_held=pool.held,
        preemptions=scheduler.preemptions,
        swapped_bytes=found.swapped_bytes,
        loaded_tokens=scheduler.loaded_blocks * engine.pool.block_tokens,
        tiers=tuple(_tiers(found, engine.state.block_bytes)),
        stages=None if stages is None else StageNs(stages.encoder_ns, stages.bridge_ns, stages.decoder_ns),
    )


def _tiers(found: EngineStatistics, block_bytes: int) -> list[TierCounts]:
    pool, tiers = found.pool, found.tiers
    known = pool.held + pool.cached
    device = TierCounts(tier="device", entries=known, bytes=known * block_bytes, evictions=pool.evictions)
    host = _host("host", tiers.blocks, found.scheduler.loaded_blocks)
    windows = _host("windows", tiers.windows, found.scheduler.exact_resumes)
    return [device, host, windows, *([] if tiers.disk is None else [_disk(tiers, tiers.disk)])]


def _host(tier: TierName, found: HostStatistics, loads: int) -> TierCounts:
    return TierCounts(
        tier=tier,
        entries=found.entries,
        bytes=found.bytes + found.reserved_bytes,
        hits=found.hits,
        misses=found.misses,
        loads=loads,
        stores=found.stored,
        evictions=found.evictions,
        expired=found.expired,
        drops=found.refused,
    )


def _disk(tiers: TierStatistics, found: DiskStatistics) -> TierCounts:
    return TierCounts(
        tier="disk",
        entries=found.entries,
        bytes=found.bytes,
        queued=tiers.queue.loads + tiers.queue.stores,
        queued_bytes=tiers.queue.store_bytes,
        hits=found.hits,
        misses=found.misses,
        loads=tiers.prefetched,
        stores=found.stored,
        evictions=found.evictions,
        expired=found.expired,
        drops=tiers.dropped_writes + found.skipped,
        failures=found.failures + found.corrupt,
    )
