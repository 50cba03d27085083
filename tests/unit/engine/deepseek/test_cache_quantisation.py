"""Codes against a brute-force nearest value, record layouts, and the thresholds of section 4."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.model.deepseek.quantisation import (
    ceil_log2,
    e2m1_codes,
    e2m1_values,
    e4m3_bytes,
    e4m3_values,
    e8m0_values,
    pack_e2m1,
    unpack_e2m1,
)  # fmt: skip
from engine.model.deepseek.records import IndexRecord, MainRecord, PlainRecord, WindowRecord

E2M1 = [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0]
floats = st.floats(-1e4, 1e4, width=32)


def _nearest(value, magnitudes):
    """The code of the nearest magnitude, ties to the even code, with the sign kept."""
    distance = [abs(abs(value) - m) for m in magnitudes]
    least = min(distance)
    code = min((c for c, d in enumerate(distance) if d == least), key=lambda c: c % 2)
    return math.copysign(magnitudes[code], value)


def _e4m3_magnitudes():
    values = [m / 8 * 2.0**-6 for m in range(8)]
    values += [(1 + m / 8) * 2.0 ** (e - 7) for e in range(1, 16) for m in range(8)]
    return values[:-1]  # the last code is NaN


@given(st.lists(floats | st.sampled_from([0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0]), min_size=1, max_size=40))
def test_e2m1_takes_the_nearest_value(values):
    found = e2m1_values(e2m1_codes(torch.tensor(values)))
    assert [float(v) for v in found] == [_nearest(v, E2M1) for v in torch.tensor(values).tolist()]


@given(st.lists(floats, min_size=1, max_size=40))
@settings(deadline=None)
def test_e4m3_takes_the_nearest_value(values):
    magnitudes = _e4m3_magnitudes()
    found = e4m3_values(e4m3_bytes(torch.tensor(values)))
    assert [float(v) for v in found] == [_nearest(v, magnitudes) for v in torch.tensor(values).tolist()]


@pytest.mark.parametrize(
    ("threshold", "at", "above"),
    [(0.25, 0.0, 0.5), (0.75, 1.0, 1.0), (1.25, 1.0, 1.5), (1.75, 2.0, 2.0), (2.5, 2.0, 3.0), (3.5, 4.0, 4.0),
     (5.0, 4.0, 6.0), (6.0, 6.0, 6.0)],
)  # fmt: skip
def test_e2m1_thresholds(threshold, at, above):
    up = math.nextafter(threshold, math.inf) + threshold * 2**-22
    down = threshold * (1 - 2**-22)
    for sign in (1, -1):
        found = e2m1_values(e2m1_codes(sign * torch.tensor([threshold, up, down]))) * sign
        assert found[0] == at
        assert found[1] == above
        assert found[2] == _nearest(down, E2M1)


def test_every_e2m1_byte_unpacks_and_packs_back():
    codes = torch.arange(256, dtype=torch.uint8)[:, None]
    values = unpack_e2m1(codes)
    assert values.shape == (256, 2)
    low, high = codes[:, 0] & 15, codes[:, 0] >> 4
    assert torch.equal(values, torch.stack((e2m1_values(low), e2m1_values(high)), 1))
    assert torch.equal(pack_e2m1(torch.stack((low, high), 1)), codes)


def test_e8m0_is_a_power_of_two():
    bytes_ = torch.arange(255, dtype=torch.uint8)
    assert [float(v) for v in e8m0_values(bytes_)] == [2.0 ** (b - 127) for b in range(255)]
    assert e8m0_values(torch.tensor([255], dtype=torch.uint8)).isnan().all()


@given(st.floats(2.0**-126, 2.0**126, width=32))
def test_ceil_log2_is_exact(value):
    exponent = int(ceil_log2(torch.tensor([value]))[0])
    assert 2.0 ** (exponent - 1) < value <= 2.0**exponent


@pytest.mark.parametrize("exponent", range(-126, 127, 7))
def test_ceil_log2_at_powers_of_two_and_beside_them(exponent):
    power = torch.tensor([2.0**exponent])
    both = torch.cat((power, torch.nextafter(power, power * 2)))
    assert ceil_log2(both).tolist() == [exponent, exponent + 1]


RECORDS = {
    "window": (WindowRecord(512), 528), "main": (MainRecord(512), 288), "index": (IndexRecord(128), 68),
}  # fmt: skip


@pytest.mark.parametrize("name", RECORDS)
def test_records_have_the_released_sizes(name):
    record, width = RECORDS[name]
    assert record.width == width
    stored = record.encode(torch.randn(3, 2, record.channels))
    assert (stored.shape, stored.dtype) == ((3, 2, width), torch.uint8)
    assert record.decode(stored).shape == (3, 2, record.channels)


def _window_group(group):
    amax = max(*(abs(v) for v in group), float(torch.tensor(1e-4)))
    exponent = int(ceil_log2(torch.tensor([amax]) * (torch.tensor(1.0) / 448))[0])
    scaled = [max(-448.0, min(448.0, v * 2.0**-exponent)) for v in group]
    return [_nearest(v, _e4m3_magnitudes()) * 2.0**exponent for v in scaled]


def _main_group(group):
    amax = float(torch.tensor(max(abs(v) for v in group)) / 6)
    scale = _nearest(min(max(amax, 2.0**-9), 448.0), _e4m3_magnitudes())
    return [_nearest(float(torch.tensor(v) / scale), E2M1) * scale for v in group]


def _index_group(group):
    amax = max(*(abs(v) for v in group), 6 * 2.0**-126)
    exponent = int(ceil_log2(torch.tensor([amax]) * (torch.tensor(1.0) / 6))[0])
    return [_nearest(v * 2.0**-exponent, E2M1) * 2.0**exponent for v in group]


BY_HAND = {"window": (32, _window_group), "main": (16, _main_group), "index": (32, _index_group)}


@pytest.mark.parametrize("name", RECORDS)
@given(seed=st.integers(0, 2**31), scale=st.sampled_from([1e-6, 1e-3, 1.0, 22.6, 3000.0]))
@settings(max_examples=15, deadline=None)
def test_round_trips_equal_the_formulas_worked_by_hand(name, seed, scale):
    size, by_hand = BY_HAND[name]
    record = type(RECORDS[name][0])(64)
    x = torch.randn(64, generator=torch.Generator().manual_seed(seed)) * scale
    found = record.decode(record.encode(x))
    expected = [v for start in range(0, 64, size) for v in by_hand(x[start : start + size].tolist())]
    assert torch.equal(found, torch.tensor(expected))


@pytest.mark.parametrize("name", RECORDS)
def test_zero_stays_zero_and_extremes_stay_finite(name):
    record = RECORDS[name][0]
    assert not record.decode(record.encode(torch.zeros(1, record.channels))).any()
    for value in (1e-38, 1e30, -1e37):
        assert record.decode(record.encode(torch.full((1, record.channels), value))).isfinite().all()


def test_an_entry_depends_on_itself_alone():
    x = torch.randn(64, 512)
    for record, _ in RECORDS.values():
        part = x[:, : record.channels].contiguous()
        together = record.encode(part)
        assert all(torch.equal(record.encode(part[i : i + 1])[0], together[i]) for i in (0, 1, 17, 63))


def test_a_plain_record_keeps_every_bit():
    x = torch.randn(4, 48)
    record = PlainRecord(48)
    assert torch.equal(record.decode(record.encode(x)), x)
    assert (record.width, record.dtype) == (48, torch.float32)
