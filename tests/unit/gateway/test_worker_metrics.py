"""Counts of workers as Prometheus' text: every field has its family, and what is not counted is not told."""

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.parser import text_string_to_metric_families

from gateway.worker_metrics import WorkerMetrics
from protocol.stages import StageNs
from protocol.worker_counts import TierCounts, WorkerCounts

DEVICE = TierCounts(tier="device", entries=3, bytes=30, evictions=2)
HOST = TierCounts(
    tier="host", entries=1, bytes=2, hits=3, misses=4, loads=5, stores=6, evictions=7, expired=8, drops=9
)
COUNTS = WorkerCounts(
    role="both", steps=10, rows=11, blocks_total=4, blocks_held=1, preemptions=12, swapped_bytes=13,
    loaded_tokens=14, tiers=(DEVICE, HOST), stages=StageNs(1_500_000_000, 2, 3),
)  # fmt: skip


def told(metrics: WorkerMetrics) -> dict[str, dict[tuple[str, ...], float]]:
    """Samples by name, and by the values of their labels but the model's, in order of the labels' names."""
    registry = CollectorRegistry()
    registry.register(metrics)
    found: dict[str, dict[tuple[str, ...], float]] = {}
    for family in text_string_to_metric_families(generate_latest(registry).decode()):
        for sample in family.samples:
            labels = dict(sorted(sample.labels.items()))
            assert labels.pop("model_name") == "m"
            found.setdefault(sample.name, {})[tuple(labels.values())] = sample.value
    return found


def test_every_count_has_its_place() -> None:
    page = told(WorkerMetrics("m", (("both", COUNTS), ("decode", None))))
    assert page["dockyard:worker_up"] == {("both",): 1.0, ("decode",): 0.0}
    assert page["vllm:kv_cache_usage_perc"] == {("both",): 0.25}
    assert page["vllm:num_preemptions_total"] == {("both",): 12.0}
    assert page["vllm:external_prefix_cache_hits_total"] == {("both",): 14.0}
    assert page["dockyard:stage_seconds_total"]["both", "encoder"] == 1.5
    assert page["dockyard:kv_tier_entries"] == {("both", "device"): 3.0, ("both", "host"): 1.0}
    assert page["dockyard:kv_tier_drops_total"] == {("both", "host"): 9.0}
    families = {name.removesuffix("_total") for name in page}
    counted = {f"dockyard:kv_tier_{name}" for name in TierCounts.__struct_fields__ if name != "tier"}
    assert counted - families == {
        f"dockyard:kv_tier_{name}" for name in ("queued", "queued_bytes", "failures")
    }  # neither tier counts these


def test_without_workers_there_is_a_page() -> None:
    assert told(WorkerMetrics("m")) == {}
