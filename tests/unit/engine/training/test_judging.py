"""Windows, ratios of sums and their errors, and what is spread over processes."""

import math
import random
from functools import partial
from operator import mul
from statistics import stdev

import pytest
import torch
from tokenizers import Tokenizer

from engine.training.judging import Judgement, Window, alike, evenly, padded, ratio, windows_of
from engine.training.paired import compared, effect
from engine.training.spread import spread
from engine.training.vocabulary import encode_texts, learn_vocabulary


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return learn_vocabulary(["def one():\n    return 'größer'\n"])


def test_windows_count_the_bytes_of_their_text(tokenizer: Tokenizer):
    text = "x = 'größer' * 3\n" * 9
    (ids,) = encode_texts(tokenizer, [text])
    (whole,) = windows_of(tokenizer, [ids], 10_000, least=2)
    assert whole.num_bytes == len(text.encode())  # the first token begins the text and has none
    cut = windows_of(tokenizer, [ids, ids[:3]], 20, least=4)
    assert [len(window.ids) for window in cut] == [len(ids[at : at + 20]) for at in range(0, len(ids), 20)]
    assert sum(window.num_bytes + window.sizes[0] for window in cut) == whole.num_bytes


def test_an_error_is_that_of_many_samples():
    """A ratio's standard error against the spread of the ratio over samples drawn anew."""
    noise = random.Random(1)

    def sample():
        sizes = [noise.uniform(100, 1000) for _ in range(60)]
        return ratio([size * noise.gauss(1.3, 0.2) for size in sizes], sizes)

    samples = [sample() for _ in range(400)]
    assert stdev(each.value for each in samples) == pytest.approx(
        sum(each.error for each in samples) / len(samples), rel=0.15
    )
    assert ratio([1.0], [2.0]).error == math.inf


def test_bits_per_byte_weigh_windows_by_their_bytes():
    judged = Judgement((math.log(2) * 10, math.log(2) * 2), (5, 5))
    assert judged.bits_per_byte == pytest.approx(1.2)


def test_some_of_all_are_spread_evenly():
    assert evenly(range(10), 5) == [0, 2, 4, 6, 8]
    assert evenly(range(3), None) == evenly(range(3), 9) == [0, 1, 2]
    windows = [Window((1,) * n, (1,) * n) for n in (5, 2, 9)]
    assert [len(window.ids) for window in alike(windows)] == [9, 5, 2]
    assert padded(windows, 4).shape == (3, 12)


def test_a_difference_is_taken_row_by_row():
    noise = torch.Generator().manual_seed(0)
    base = torch.randn(3, 7, generator=noise)
    window = Window((4, 1, 2, 3), (0, 3, 2, 1))
    same = compared(base, base, window, slice(0, 3))
    assert (same.rows, same.num_bytes, same.nats, same.divergence, same.agreed) == (3, 6, 0.0, 0.0, 3)
    worse = base.clone()
    worse[0, 1] -= 2.0
    late = compared(base[1:], worse[1:], window, slice(1, 3))
    assert (late.rows, late.num_bytes, late.nats) == (2, 3, 0.0)
    all_rows = compared(base, worse, window, slice(0, 3))
    before, after = torch.log_softmax(base[0], -1), torch.log_softmax(worse[0], -1)
    assert all_rows.nats == pytest.approx(float(before[1] - after[1]), abs=1e-6)
    assert all_rows.divergence == pytest.approx(float((before.exp() * (before - after)).sum()), abs=1e-6)
    found = effect("worse", [all_rows, same])
    assert found.tokens == 6
    assert found.nats.value == pytest.approx(all_rows.nats / 6)
    assert found.bits_per_byte.value == pytest.approx(all_rows.nats / math.log(2) / 12)


@pytest.mark.parametrize("processes", [1, 2])
def test_jobs_come_back_in_their_order(processes: int):
    said: list[str] = []
    jobs = [partial(mul, number, number) for number in range(5)]
    assert spread(jobs, processes, said.append) == [0, 1, 4, 9, 16]
    assert len(said) == 5
