"""`/metrics` of a real gateway, scraped as Prometheus does: what the workers and their tiers have counted."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from prometheus_client.parser import text_string_to_metric_families
from stack import Stack, serving

from actors.counts import worker_counts

BLOCK = 16
Sample = dict[tuple[str, ...], float]


@pytest.fixture(params=[False, True], ids=["one worker", "prefill and decode"])
def stack(
    request: pytest.FixtureRequest, tiny_model: Path, tmp_path: Path, cpu_library: Path
) -> Iterator[Stack]:
    """Blocks for two prompts on the device, for some more in host memory, the rest on disk."""
    tiers = {"host_bytes": 96 << 10, "disk_path": str(tmp_path / "kv"), "disk_bytes": 1 << 20}
    with serving(
        tiny_model, tmp_path, disaggregated=request.param, tiers=tiers, block_tokens=BLOCK
    ) as running:
        for worker in running.workers:
            worker.call(lambda worker=worker: hold_back(worker.engine))
        yield running


def hold_back(engine: Any) -> None:
    """Leave the engine sixteen blocks."""
    engine.pool.allocate(engine.pool.num_available - 16)


def scraped(stack: Stack) -> dict[str, Sample]:
    """Samples by name, and by the values of their labels but the model's."""
    found: dict[str, Sample] = {}
    page = httpx.get(f"{stack.url}/metrics", timeout=60)
    assert page.headers["content-type"].startswith("text/plain")
    for family in text_string_to_metric_families(page.text):
        for sample in family.samples:
            labels = dict(sorted(sample.labels.items()))
            assert labels.pop("model_name") == "tiny"
            found.setdefault(sample.name, {})[tuple(labels.values())] = sample.value
    return found


def ask(stack: Stack, seed: int, **more: Any) -> dict[str, Any]:
    """A prompt of eight blocks, and what is left of another one."""
    body = {"model": "tiny", "prompt": [3 + (seed * 31 + n) % 200 for n in range(8 * BLOCK + 5)],
            "max_tokens": 4, "temperature": 0, "ignore_eos": True, **more}  # fmt: skip
    answer = httpx.post(f"{stack.url}/v1/completions", json=body, timeout=60)
    assert answer.status_code == 200, answer.text
    return answer.json()


def test_tiers_are_told_as_the_engine_counts_them(stack: Stack) -> None:
    for seed in (*range(6), *range(6)):
        ask(stack, seed)
    stack.wait_until(lambda: all_idle(stack), "idle workers")
    for worker in stack.workers:
        worker.engine.flush()
    page = scraped(stack)
    role = stack.workers[0].engine.config.role
    tiers = worker_tiers(stack)
    assert {tier for engine, tier in page["dockyard:kv_tier_entries"] if engine == role} == {
        "device", "host", "windows", "disk",
    }  # fmt: skip
    for name, kind in (
        ("entries", ""), ("bytes", ""), ("queued", ""), ("queued_bytes", ""), ("hits", "_total"),
        ("misses", "_total"), ("loads", "_total"), ("stores", "_total"), ("evictions", "_total"),
        ("expired", "_total"), ("drops", "_total"), ("failures", "_total"),
    ):  # fmt: skip
        told = page[f"dockyard:kv_tier_{name}{kind}"]
        expected = {(role, tier.tier): value for tier in tiers if (value := getattr(tier, name)) is not None}
        assert {labels: value for labels, value in told.items() if labels[0] == role} == expected, name
    values = {tier.tier: tier for tier in tiers}
    assert values["device"].evictions > 0
    assert values["host"].evictions > 0
    assert values["host"].stores > 0
    assert values["disk"].stores > 0
    assert values["disk"].loads > 0
    assert values["host"].loads > 0
    assert 0 < values["host"].bytes <= 96 << 10
    assert values["disk"].bytes > values["host"].bytes


def all_idle(stack: Stack) -> bool:
    return all(stack.num_queued(worker) == 0 for worker in stack.workers)


def worker_tiers(stack: Stack) -> Any:
    worker = stack.workers[0]
    return worker.call(lambda: worker_counts(worker.engine)).tiers


def test_names_that_dashboards_know(stack: Stack) -> None:
    for _ in range(2):
        usage = ask(stack, 1, n=2)["usage"]
    page = scraped(stack)
    assert page["vllm:prefix_cache_queries_total"][()] == 2 * usage["prompt_tokens"]
    assert page["vllm:prefix_cache_hits_total"][()] == usage["prompt_tokens_details"]["cached_tokens"] > 0
    assert page["vllm:generation_tokens_total"][()] == 4 * 4
    for worker in stack.workers:
        role = worker.engine.config.role
        assert page["dockyard:worker_up"][role,] == 1.0
        assert page["vllm:num_preemptions_total"][role,] == 0.0
        assert page["dockyard:engine_steps_total"][role,] > 0
        used = worker.call(worker.engine.pool.statistics)
        assert page["vllm:kv_cache_usage_perc"][role,] == pytest.approx(used.held / used.total)
    for name in (
        "time_to_first_token", "e2e_request_latency", "request_queue_time", "request_prefill_time",
        "request_decode_time", "request_time_per_output_token",
    ):  # fmt: skip
        assert page[f"vllm:{name}_seconds_count"][()] == 4, name
    parts = sum(page[f"vllm:request_{part}_time_seconds_sum"][()] for part in ("queue", "prefill", "decode"))
    assert parts == pytest.approx(page["vllm:e2e_request_latency_seconds_sum"][()])


def test_a_worker_that_is_gone_is_told_and_the_page_stays(stack: Stack) -> None:
    stack.workers[-1].stop()
    page = scraped(stack)
    up = {labels[0]: value for labels, value in page["dockyard:worker_up"].items()}
    assert up.pop(stack.workers[-1].engine.config.role) == 0.0
    assert all(up.values())
