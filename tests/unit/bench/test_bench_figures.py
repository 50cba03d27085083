"""The small sums of the benches: quantiles, timelines, noise, and who used the machine."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bench import common
from bench.common import MAX_OTHERS, MAX_PRESSURE, Surroundings, parse
from bench.demo_overhead import quantiles, share_of
from bench.model_calls import Ledger, Reply, Span, Usage, call_of
from bench.neighbours import Sample, sample, share
from bench.team_report import Finding, report
from teams.attribution import Attribution, Share


@given(st.lists(st.floats(0.0, 1e6), min_size=1, max_size=200))
def test_quantiles_are_values_of_the_sample_with_enough_below_them(values):
    found = quantiles(values)
    for q, at in ((0.5, found.p50_ms), (0.99, found.p99_ms)):
        assert at in values
        assert sum(value <= at for value in values) >= q * len(values)
        assert sum(value < at for value in values) < q * len(values)


def test_overhead_is_what_is_neither_model_nor_tool_nor_sandbox():
    def of(key, seconds):
        return Share(key, round(seconds * 1e9), seconds * 10)

    table = (
        of("model.decode", 7.0),
        of("tool.run", 2.0),
        of("harness", 0.5),
        of("handoff", 0.3),
        of("wait", 0.2),
    )
    found = share_of(10.0, Attribution(table, (), (), 0.0, 0.05, 0.04, 0.05))
    assert found.overhead == pytest.approx(0.1)
    assert (found.harness_gaps, found.by_kind["tool.run"]) == (0.04, 0.2)


def test_a_calls_latency_is_split_by_its_timeline():
    spans = [
        Span("model.queue", 1_000_000, 2_000_000),
        Span("model.transfer", 3_000_000, 5_000_000),
        Span("model.decode", 5_000_000, 9_000_000),
    ]
    call = call_of(Reply(Ledger(spans), Usage(10, 4)), 11.0)
    assert (call.engine_ms, call.transfer_ms, call.decode_ms) == (8.0, 2.0, 4.0)
    assert (call.prompt_tokens, call.completion_tokens) == (10, 4)


def test_others_are_what_is_busy_and_not_own():
    before, after = Sample(0.0, 100.0, 10.0), Sample(10.0, 105.0, 12.0)
    cores = after.at_s and share(Sample(0.0, 0.0, 0.0), Sample(1.0, 1.0, 0.0)) ** -1
    assert share(before, after) == pytest.approx(3.0 / (10.0 * cores))


def test_a_share_stays_a_share():
    assert share(Sample(0.0, 0.0, 0.0), Sample(1.0, 0.0, 5.0)) == 0.0
    assert share(Sample(0.0, 0.0, 0.0), Sample(1.0, 1e6, 0.0)) == 1.0
    assert share(Sample(1.0, 0.0, 0.0), Sample(1.0, 0.0, 0.0)) == 0.0


def test_samples_only_grow():
    before = sample()
    assert sum(range(100_000))
    after = sample()
    assert after.at_s > before.at_s
    assert after.own_s >= before.own_s


@pytest.mark.parametrize(
    ("pressure", "others", "noisy"),
    [
        (0.0, 0.0, False),
        (None, 0.0, False),
        (MAX_PRESSURE + 1, 0.0, True),
        (0.0, MAX_OTHERS + 0.01, True),
    ],
)
def test_noise_makes_a_verdict_void(pressure, others, noisy, monkeypatch):
    monkeypatch.setattr(common, "cpu_pressure", lambda: pressure)
    monkeypatch.setattr(common, "CALM_S", 0.0)
    said = report(Finding("speed", 1.0, "s", 2.0, True), Surroundings(()), others, {"more": 1})
    assert (said["met"], said["noisy"], said["more"]) == (None if noisy else True, noisy, 1)
    assert said["env"]["others"] == others


def test_a_bench_waits_until_the_machine_is_calm(monkeypatch):
    readings = iter([90.0, 30.0, 1.0, 2.0])
    monkeypatch.setattr(common, "cpu_pressure", lambda: next(readings))
    monkeypatch.setattr(common.time, "sleep", lambda seconds: None)
    assert Surroundings(()).describe()["cpu_pressure"] == 2.0


def test_the_stable_fields_come_first():
    said = report(Finding("speed", 1.0, "s", 2.0, True), Surroundings(()), 0.0, {})
    fields = "name value unit peer peer_value ratio target met"
    assert list(said)[:8] == fields.split()


def test_options():
    assert parse("speed", "", ["--quick", "--json"]) == parse("speed", "", ["--json", "--quick"])
    with pytest.raises(SystemExit):
        parse("speed", "", ["--fast"])
