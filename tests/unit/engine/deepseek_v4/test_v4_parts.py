"""A rank's experts of a V4, hashed, scored and of the draft block: together they say the whole's bits."""

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from tiny_v4 import RandomTensors, ids_of, tiny_config
from torch import Tensor

from engine.checkpoint.parts import Part
from engine.model.deepseek.rows import SequenceRows
from engine.model.deepseek_v4.model import DeepseekV4Model
from engine.model.deepseek_v4.mtp import DraftBlock
from kernels.operations import select_operations
from kernels.torch_operations import TorchOperations
from protocol.errors import InvalidInput

IDS = ids_of(40)
SHARES = {"halves": [{0, 1, 2, 3}, {4, 5, 6, 7}], "one has one": [{5}, {0, 1, 2, 3, 4, 6, 7}]}


class Meeting:
    """The exchange of two ranks that are threads."""

    def __init__(self) -> None:
        self._barrier = threading.Barrier(2, timeout=60)
        self._given: dict[int, Tensor] = {}

    def of(self, rank: int) -> Callable[[Tensor], Tensor]:
        def exchange(own: Tensor) -> Tensor:
            self._given[rank] = own
            self._barrier.wait()
            total = self._given[0] + self._given[1]
            self._barrier.wait()
            return total

        return exchange


class PartTensors(RandomTensors):
    """Has what a part holds."""

    def __init__(self, part: Part) -> None:
        self._part = part

    def take(self, name: str, shape: tuple[int, ...]) -> Tensor:
        assert self._part.holds(name, 0), f"{name} is not of this part"
        return super().take(name, shape)


def said(part: Part, exchange: Callable[[Tensor], Tensor] | None) -> tuple[Tensor, Tensor]:
    """Logits of the text, and the draft block's, of what one rank comes to."""
    source = PartTensors(part)
    model = DeepseekV4Model(tiny_config(), source, TorchOperations(), part=part, exchange=exchange)
    drafts = DraftBlock(model, source, 0)
    cache = model.new_cache(4, 16, 1)
    rows = [SequenceRows(0, range(4), 0, len(IDS))]
    hidden = model.forward(torch.tensor(IDS), rows, cache)
    streams = model.embed(torch.tensor(IDS))[:, None].expand(-1, model.config.hc_mult, -1).contiguous()
    return model.head(hidden), drafts.forward(torch.tensor(IDS), streams, rows, cache)[0]


@pytest.mark.parametrize("shares", SHARES.values(), ids=SHARES)
def test_ranks_that_share_the_experts_say_what_the_whole_says(shares: list[set[int]]):
    expected, meeting = said(Part(), None), Meeting()

    def run(rank: int) -> tuple[Tensor, Tensor]:
        held = frozenset(shares[rank])
        return said(Part(held, held), meeting.of(rank))

    with ThreadPoolExecutor(2) as pool:
        found = list(pool.map(run, range(2)))
    for each in found:
        for own, whole in zip(each, expected, strict=True):
            assert torch.equal(own.view(torch.uint8), whole.view(torch.uint8))


def test_what_v4_cannot_run_as_is_refused():
    with pytest.raises(InvalidInput, match="a part of 4 experts a layer, and no exchange"):
        said(Part(frozenset(range(4))), None)
    with pytest.raises(InvalidInput, match="encoder_only: a DeepSeek-V4 has no encoder apart"):
        said(Part(encoder_only=True), None)


def test_shares_have_a_name_of_their_own(cpu_library: object):
    every, operations = frozenset(range(8)), select_operations(1)
    whole = DeepseekV4Model(tiny_config(), RandomTensors(), operations)
    shared = DeepseekV4Model(
        tiny_config(), RandomTensors(), operations, part=Part(every, every), exchange=lambda own: own
    )
    assert whole.identity != shared.identity
