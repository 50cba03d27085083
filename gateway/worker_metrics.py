"""Prometheus metrics of the workers behind a gateway: vLLM's names where they mean the same.

Workers count themselves; the page says what they have counted when it is asked for. vLLM has no names for
tiers other than the device: `dockyard:kv_tier_*` has one family a count, with the tier as a label.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

from protocol.stages import STAGES
from protocol.worker_counts import WorkerCounts

Family = type[CounterMetricFamily] | type[GaugeMetricFamily]
Samples = list[tuple[tuple[str, ...], float]]  # labels' values, and the value

_TIERS: tuple[tuple[str, Family, str], ...] = (
    ("entries", GaugeMetricFamily, "Blocks, or windows, that a tier holds"),
    ("bytes", GaugeMetricFamily, "Bytes that a tier holds, swapped requests among them"),
    ("queued", GaugeMetricFamily, "Reads and writes that wait for a tier"),
    ("queued_bytes", GaugeMetricFamily, "Bytes of writes that wait for a tier"),
    ("hits", CounterMetricFamily, "Entries that were asked for and found"),
    ("misses", CounterMetricFamily, "Entries that were asked for and not found"),
    ("loads", CounterMetricFamily, "Entries that went from a tier to the one before it"),
    ("stores", CounterMetricFamily, "Entries that were kept in a tier"),
    ("evictions", CounterMetricFamily, "Entries that gave way to others"),
    ("expired", CounterMetricFamily, "Entries that nobody had used for too long"),
    ("drops", CounterMetricFamily, "Entries that were not kept: no room, or too much waited"),
    ("failures", CounterMetricFamily, "What the system refused, and files that were not whole"),
)


@dataclass(slots=True, eq=False)
class WorkerMetrics(Collector):
    """`counts` is what the next page tells, of each role None where its worker does not answer."""

    model: str
    counts: Sequence[tuple[str, WorkerCounts | None]] = ()

    def collect(self) -> Iterator[Metric]:
        found = [(role, counts) for role, counts in self.counts if counts is not None]
        up: Samples = [((role,), float(counts is not None)) for role, counts in self.counts]
        yield self._family(GaugeMetricFamily, "dockyard:worker_up", "Whether a worker answers", up)
        yield from self._of_engines(found)
        for name, family, about in _TIERS:
            yield self._family(family, f"dockyard:kv_tier_{name}", about, _of_tiers(found, name), "tier")

    def _of_engines(self, found: Sequence[tuple[str, WorkerCounts]]) -> Iterator[Metric]:
        """One value an engine."""
        gauge, counter = GaugeMetricFamily, CounterMetricFamily
        held: Samples = [((role,), c.blocks_held / c.blocks_total) for role, c in found]
        yield self._family(gauge, "vllm:kv_cache_usage_perc", "Share of blocks held, 1 is all", held)
        for name, about, value in (
            ("vllm:num_preemptions", "Requests that gave way to others", "preemptions"),
            (
                "vllm:external_prefix_cache_hits",
                "Tokens of prefixes from host memory or disk",
                "loaded_tokens",
            ),
            ("dockyard:engine_steps", "Steps of an engine", "steps"),
            ("dockyard:engine_rows", "Rows that its steps have run", "rows"),
            ("dockyard:kv_swapped_bytes", "Of requests swapped to host memory", "swapped_bytes"),
        ):
            samples: Samples = [((role,), float(getattr(c, value))) for role, c in found]
            yield self._family(counter, name, about, samples)
        staged: Samples = [
            ((role, stage), c.stages.of(stage) / 1e9)
            for role, c in found
            if c.stages is not None
            for stage in STAGES
        ]
        yield self._family(counter, "dockyard:stage_seconds", "Time of an engine's steps", staged, "stage")

    def _family(self, family: Family, name: str, about: str, samples: Samples, *more: str) -> Metric:
        made = family(name, about, labels=["model_name", "engine", *more])
        for labels, value in samples:
            made.add_metric([self.model, *labels], value)
        return made


def _of_tiers(found: Sequence[tuple[str, WorkerCounts]], name: str) -> Samples:
    return [
        ((role, tier.tier), float(value))
        for role, counts in found
        for tier in counts.tiers
        if (value := getattr(tier, name)) is not None
    ]
