"""The bench's peer is the definition of top-p, on rows of both shapes."""

from dataclasses import replace

import numpy as np

from bench import sampling_cost
from bench.sampling_cost import KINDS, NUCLEUS, by_sorting, choosers, rows
from engine.sampling.past import Past
from engine.sampling.sampler import choose


def test_the_peer_chooses_the_same_tokens() -> None:
    for index, row in enumerate(rows(10)):
        for top_p in (0.5, 0.95):
            sampling = replace(NUCLEUS, top_p=top_p)
            assert by_sorting(row, sampling, index) == choose(row, sampling, index)


def test_every_kind_of_request_runs() -> None:
    (row,) = rows(1)
    kinds = choosers(Past.of([1, 2], [3]), np.ones(sampling_cost.VOCABULARY, np.bool_))
    assert kinds.keys() == {*KINDS, "20 logprobs"}
    for work in kinds.values():
        assert work(row, 0) is not None
