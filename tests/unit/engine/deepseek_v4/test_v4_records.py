"""V4's records: sizes, round trips worked by hand, and an entry that depends on itself alone."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tiny_v4 import QUANTISED, tiny_config

from engine.model.deepseek.records import IndexRecord, PlainRecord
from engine.model.deepseek_v4.records import Fp8IndexRecord, SplitRecord, v4_records

RECORDS = {"split": (SplitRecord(512, 64), 584), "fp8 index": (Fp8IndexRecord(128), 132)}


@pytest.mark.parametrize("name", RECORDS)
def test_records_have_the_released_sizes(name):
    record, width = RECORDS[name]
    stored = record.encode(torch.randn(3, 2, record.channels))
    assert (record.width, stored.shape, stored.dtype) == (width, (3, 2, width), torch.uint8)
    assert record.decode(stored).shape == (3, 2, record.channels)


def _fp8_by_hand(group):
    """Through float64: the smallest power of two that brings the largest magnitude to 448 or less."""
    largest, exponent = max(float(group.abs().max()), float(torch.tensor(1e-4))), -140
    while largest * (1 / 448) > 2.0**exponent:
        exponent += 1
    return (group.double() / 2.0**exponent).float().to(torch.float8_e4m3fn).float() * 2.0**exponent


@given(seed=st.integers(0, 2**31), scale=st.sampled_from([1e-6, 1e-3, 1.0, 22.6, 3000.0]))
@settings(max_examples=20, deadline=None)
def test_round_trips_equal_the_formulas_worked_by_hand(seed, scale):
    x = torch.randn(136, generator=torch.Generator().manual_seed(seed)) * scale
    groups = [_fp8_by_hand(group) for group in x[:128].split(64)]
    expected = torch.cat([*groups, x[128:].bfloat16().float()])
    record = SplitRecord(136, 8)
    assert torch.equal(record.decode(record.encode(x)), expected)
    record = Fp8IndexRecord(128)
    assert torch.equal(record.decode(record.encode(x[:128])), _fp8_by_hand(x[:128]))


@pytest.mark.parametrize("name", RECORDS)
def test_an_entry_depends_on_itself_alone(name):
    record = RECORDS[name][0]
    x = torch.randn(64, record.channels)
    together = record.encode(x)
    assert all(torch.equal(record.encode(x[i : i + 1])[0], together[i]) for i in (0, 1, 17, 63))
    assert torch.equal(record.decode(together)[5], record.decode(together[5:6])[0])


@pytest.mark.parametrize("name", RECORDS)
def test_zero_stays_zero_and_extremes_stay_finite(name):
    record = RECORDS[name][0]
    assert not record.decode(record.encode(torch.zeros(1, record.channels))).any()
    for value in (1e-38, 1e30, -1e37):
        assert record.decode(record.encode(torch.full((1, record.channels), value))).isfinite().all()


def test_each_cache_has_its_own_switch():
    records = {name: v4_records(tiny_config(on)) for name, on in QUANTISED.items()}
    assert records["released"].window == records["released"].main == SplitRecord(72, 8)
    assert records["released"].index == IndexRecord(32)
    assert records["fp8 index"].index == Fp8IndexRecord(32)
    assert (records["off"].window, records["off"].index) == (PlainRecord(72), PlainRecord(32))
