"""Look-ups behind a gate: the same rows and outputs, and begun when they should be."""

import threading
from dataclasses import replace

import pytest
import torch
from test_random_deepseek import TINY

from bench.engram_lookup import (
    FULL,
    QUICK,
    STEPS,
    Gate,
    GatedTable,
    StepTime,
    Verdict,
    lookup_steps,
    measure,
    measure_inside,
    median_at_most,
    summary,
)
from bench.page_cache import drop_pages, memory_group
from bench.random_deepseek import config_json, write_folder
from engine.checkpoint.source import open_checkpoint
from engine.model.tensor_source import RowsInMemory

STREAM = ROWS = None  # a gate looks at neither


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    path = tmp_path_factory.mktemp("engram") / "model"
    write_folder(path, config_json(replace(TINY, engram_rows_a_head=2000)))
    return path


def table(gate, layer):
    return GatedTable(RowsInMemory(torch.eye(4)), layer, 5, gate)


def test_ahead_nothing_waits():
    gate = Gate()
    gate.begin(at_layer=False)
    assert torch.equal(table(gate, 4).rows(torch.tensor([2])), torch.eye(4)[2:3])
    assert gate.asked_bytes == 5


def test_at_its_layer_a_look_up_waits_for_the_layer_before():
    gate, found = Gate(), []
    gate.begin(at_layer=True)
    reader = threading.Thread(target=lambda: found.append(table(gate, 2).rows(torch.tensor([1]))))
    reader.start()
    gate.left(0, STREAM, ROWS)
    assert not found
    gate.left(1, STREAM, ROWS)
    reader.join(10.0)
    assert torch.equal(found[0], torch.eye(4)[1:2])


@pytest.mark.parametrize("drop", [False, True])
def test_steps_ask_for_the_same_bytes_both_ways(folder, drop):
    with lookup_steps(folder, drop=drop) as steps:
        ahead, at_layer = measure(steps, 2, 3, 2)
    rows = 2 * 3 * 2 * 3 * TINY.engram_heads  # sequences, rows, layers, orders
    asked = rows * (TINY.engram_channels + 1)
    assert [step.asked_bytes for step in (*ahead, *at_layer)] == [asked] * 4
    assert min(step.step_ms for step in (*ahead, *at_layer)) > 0


def test_dropped_pages_come_back_as_they_were(folder):
    source = open_checkpoint(folder)
    weight = source.take_stored("layers.1.engram.embed.weight")
    before = weight.values.view(torch.uint8).clone()
    drop_pages(folder)
    assert torch.equal(weight.values.view(torch.uint8), before)


def test_what_is_hidden_is_the_difference_and_its_share_of_the_reading():
    ahead = [StepTime(10.0, 4.0, 100, 4096), StepTime(12.0, 4.0, 100, 0)]
    at_layer = [StepTime(13.0, 4.0, 100, 4096), StepTime(15.0, 4.0, 100, 4096)]
    found = summary(ahead, at_layer)
    assert (found["hidden_ms"], found["hidden_share"]) == (3.0, 0.75)
    assert (found["asked_bytes"], found["read_bytes"]) == (100, 3072)


def test_the_median_is_bounded_by_as_many_values_as_a_coin_seldom_brings():
    """Of 15, 12 heads or more come in 1.8% of all trials, 11 or more in 5.9%; four are too few."""
    assert median_at_most([n / 10 for n in range(15)]) == 1.1
    assert median_at_most([0.5] * 12 + [9.0] * 3) == 0.5
    assert median_at_most([0.5] * 11 + [9.0] * 4) == 9.0
    assert median_at_most([0.5] * 4) == float("inf")


def test_without_look_ahead_the_target_is_missed_nineteen_times_in_twenty():
    noise, missed = torch.Generator().manual_seed(1), 0
    for _ in range(400):
        ratios = (1 + 0.05 * torch.randn(QUICK.pairs, generator=noise)).tolist()
        missed += not Verdict("n", "ms", 1.0, "p", 1.0, 1.0, median_at_most(ratios)).met
    assert missed > 0.95 * 400


@pytest.mark.parametrize("size", [FULL, QUICK])
def test_the_tables_are_larger_than_the_memory(size):
    assert 2 * 24 * 33 * size.rows_a_head > size.limit_bytes


def test_a_process_of_its_own_measures(folder):
    with memory_group(1 << 30) as group:
        times = measure_inside(folder, group, 2)
    assert {rows: (len(ahead), len(at_layer)) for rows, (ahead, at_layer) in times.items()} == dict.fromkeys(
        STEPS, (2, 2)
    )


def test_without_a_group_it_drops_the_pages(folder):
    times = measure_inside(folder, None, 1)
    assert times["1"][1][0].step_ms > 0


def test_a_group_has_its_limit_and_is_gone_afterwards():
    with memory_group(64 << 20) as group:
        if group is None:
            pytest.skip("this process cannot make cgroups with a memory limit")
        limits = [group / name for name in ("memory.limit_in_bytes", "memory.max")]
        assert [int(path.read_text()) for path in limits if path.exists()] == [64 << 20]
    assert not group.exists()
