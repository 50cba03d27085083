"""Tied rows take our choice; a clear difference is counted and left."""

import torch
from torch.nn import functional as F

from bench.v4_ties import TIE, TieCounts, settle_experts, settle_groups

K, GROUPS = 2, 5


def scores_of(second: float, third: float) -> torch.Tensor:
    """[T, N] of 20 tokens, five groups; rows from the third visible group on choose."""
    return torch.tensor([1.0, second, third, 0.1, 0.0]).repeat(4 * GROUPS, 1)


def best(scores: torch.Tensor, row: int) -> list[int]:
    return sorted(scores[row].topk(K).indices.tolist())


def test_a_tied_row_selects_our_groups_and_no_other_row_changes() -> None:
    scores = scores_of(0.5, 0.5 - TIE / 2)
    ours = torch.tensor([0, 1]).repeat(len(scores), 1)
    ours[15] = torch.tensor([0, 2])
    counts = TieCounts()
    found = settle_groups(scores, ours, counts)
    assert best(found, 15) == [0, 2]
    assert torch.equal(found[:15], scores[:15])
    assert torch.equal(found[16:], scores[16:])
    assert (counts.rows, counts.settled, counts.unexplained) == (9, 1, 0)  # rows 11 to 19 choose
    assert 0 < counts.widest <= TIE


def test_a_clear_difference_keeps_their_groups_and_is_counted() -> None:
    scores, counts = scores_of(0.5, 0.4), TieCounts()
    ours = torch.tensor([0, 1]).repeat(len(scores), 1)
    ours[15] = torch.tensor([0, 2])
    assert best(settle_groups(scores, ours, counts), 15) == [0, 1]
    assert (counts.settled, counts.unexplained) == (0, 1)


def test_rows_that_see_no_more_than_k_groups_choose_nothing() -> None:
    counts = TieCounts()
    ours = torch.tensor([3, 4]).repeat(11, 1)
    settle_groups(scores_of(0.5, 0.4)[:11], ours, counts)
    assert counts.rows == 0


def test_a_tied_row_goes_to_our_experts() -> None:
    wanted = torch.tensor([[1.0, 0.5, 0.5 - TIE / 2, 0.1], [1.0, 0.5, 0.4, 0.1]])
    logits = torch.special.expm1(wanted.square()).log()  # sqrt(softplus(logits)) = wanted
    assert torch.allclose(F.softplus(logits).sqrt(), wanted, atol=1e-6)
    theirs, ours = torch.tensor([[0, 1], [0, 1]]), torch.tensor([[0, 2], [0, 2]])
    counts = TieCounts()
    chosen = settle_experts(logits, torch.zeros(4), theirs, ours, counts)
    assert chosen.tolist() == [[0, 2], [0, 1]]
    assert (counts.settled, counts.unexplained) == (1, 1)
