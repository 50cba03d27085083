"""A worker's part of a model: a prefill worker leaves what the whole would, ranks make its bits together."""

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from dspark_models import COMPRESSED_IDS, config_of, raw_config, text
from golden_sets import FOLDER, RandomTensors, golden_config, golden_ids, golden_model
from tokenizers import Tokenizer
from torch import Tensor

from engine.checkpoint.family import read_family
from engine.checkpoint.parts import Part, rank_part
from engine.checkpoint.source import open_checkpoint
from engine.errors import BrokenModelFile, InvalidRequest
from engine.model.deepseek.config import DeepseekConfig, Quantisation
from engine.model.deepseek.dspark import DraftModel
from engine.model.deepseek.dspark_context import Anchor
from engine.model.deepseek.engram_hash import compress_ids
from engine.model.deepseek.model import DeepseekModel
from engine.model.deepseek.moe import MixtureOfExperts, Share
from engine.model.deepseek.roles import cut_layer
from engine.model.deepseek.rows import SequenceRows
from kernels.operations import Operations, select_operations
from kernels.torch_operations import TorchOperations
from protocol.errors import InvalidInput

ENCODER = Part(encoder_only=True)
TEXT = text(90)


class PartTensors(RandomTensors):
    """Has what a part holds, and notes what was taken."""

    def __init__(self, part: Part, cut: int) -> None:
        self._part, self._cut = part, cut
        self.taken: dict[str, int] = {}  # values, by name

    def take(self, name: str, shape: tuple[int, ...]) -> Tensor:
        assert self._part.holds(name, self._cut), f"{name} is not of this part"
        tensor = super().take(name, shape)
        self.taken[name] = tensor.numel()
        return tensor


def part_model(
    config: DeepseekConfig,
    part: Part,
    operations: Operations,
    exchange: Callable[[Tensor], Tensor] | None = None,
) -> tuple[DeepseekModel, PartTensors]:
    source = PartTensors(part, cut_layer(config))
    model = DeepseekModel(config, source, operations, COMPRESSED_IDS, part=part, exchange=exchange)
    return model, source


def read(model: DeepseekModel, ids: list[int], chunk: int, **bounds: int):
    """A cache of one sequence whose rows have run in chunks."""
    cache = model.new_cache(len(ids) // 16 + 1, 16, 1)
    for start in range(0, len(ids), chunk):
        part = ids[start : start + chunk]
        rows = SequenceRows(0, range(cache.num_blocks), start, len(part), **bounds)
        hidden = model.forward(torch.tensor(part), [rows], cache)
        assert hidden.shape == (len(part), model.config.hidden_size)
    return cache


def raw(tensor: Tensor) -> Tensor:
    return tensor.contiguous().view(torch.uint8)


@pytest.mark.parametrize("kind", ["auto", "torch"])
@pytest.mark.parametrize("chunk", [1, 7, 90])
@pytest.mark.parametrize("replayed", [False, True], ids=["all rows", "the decoder sees the last"])
@pytest.mark.parametrize("quantised", [True, False], ids=["released", "float32"])
def test_an_encoder_only_model_leaves_the_entries_of_the_whole(cpu_library, kind, chunk, replayed, quantised):
    """Bit for bit: main entries, index keys, open groups, windows up to the cut, look-back."""
    config = config_of(Quantisation() if quantised else Quantisation.off())
    ids = TEXT if chunk > 1 else TEXT[:24]
    bounds = {"decoder_from": len(ids) - config.sliding_window} if replayed else {}
    whole, _ = part_model(config, Part(), select_operations(1, kind))
    encoder, _ = part_model(config, ENCODER, select_operations(1, kind))
    expected, found = read(whole, ids, chunk, **bounds), read(encoder, ids, chunk, **bounds)
    assert found.sources.keys() == expected.sources.keys()
    for layer, entries in expected.sources.items():
        assert entries.main.any()
        for name in ("main", "index", "open"):
            own, other = getattr(entries, name), getattr(found.sources[layer], name)
            assert (own is None) == (other is None)
            assert own is None or torch.equal(raw(own), raw(other)), (layer, name)
    held = cut_layer(config) + 1
    assert torch.equal(raw(expected.window_LF[:held]), raw(found.window_LF[:held]))
    assert torch.equal(expected.lookback_F, found.lookback_F)


def test_an_encoder_only_model_takes_its_part_and_nothing_else():
    """About half of what is no Engram, as of the release, where that is 49%."""
    config = config_of()
    _, whole = part_model(config, Part(), TorchOperations())
    _, encoder = part_model(config, ENCODER, TorchOperations())
    held = {name for name in whole.taken if ENCODER.holds(name, cut_layer(config))}
    assert encoder.taken.keys() == held
    sizes = [
        sum(count for name, count in taken.items() if ".engram." not in name)
        for taken in (whole.taken, encoder.taken)
    ]
    assert 0.4 < sizes[1] / sizes[0] < 0.55


def test_an_encoder_only_folder_is_read_to_its_end(cpu_library):
    """The folder's own source: nothing of the part is left, and nothing else is there."""
    source, ids = open_checkpoint(FOLDER / "a", ENCODER), golden_ids("a")
    compressed = compress_ids(Tokenizer.from_file(str(FOLDER / "a" / "tokenizer.json")))
    config, operations = golden_config("a"), select_operations(1)
    encoder = DeepseekModel(config, source, operations, compressed, part=ENCODER)
    source.check_all_taken()
    expected, found = read(golden_model("a"), ids, 64), read(encoder, ids, 64)
    assert torch.equal(raw(expected.sources[6].main), raw(found.sources[6].main))
    with pytest.raises(BrokenModelFile, match="not of this worker's part"):
        DeepseekModel(config, open_checkpoint(FOLDER / "a", ENCODER), operations, compressed)


def test_an_encoder_only_model_makes_no_logits(cpu_library):
    encoder, source = part_model(config_of(), ENCODER, select_operations(1))
    with pytest.raises(InvalidRequest, match="encoder alone leaves keys and values"):
        encoder.logits(TEXT)
    with pytest.raises(InvalidInput, match="encoder_only: drafts read"):
        DraftModel(encoder, source)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"engram_layer_ids": [1, 7]}, r"engram_layer_ids has \[7\], not before .* 6"),
    ],
)
def test_a_model_that_cannot_be_cut_is_refused(change, message):
    with pytest.raises(InvalidInput, match=message):
        part_model(config_of(**change), ENCODER, TorchOperations())


class Meeting:
    """The exchange of ranks that are threads: all give, then each adds up in an order of its own."""

    def __init__(self, ranks: int) -> None:
        self._barrier = threading.Barrier(ranks, timeout=60)
        self._given: list[Tensor] = [torch.empty(0)] * ranks

    def of(self, rank: int) -> Callable[[Tensor], Tensor]:
        def add_up(own: Tensor) -> Tensor:
            self._given[rank] = own
            self._barrier.wait()
            total = self._given[rank]
            for other in (each for number, each in enumerate(self._given) if number != rank):
                total = total + other
            self._barrier.wait()
            return total

        return add_up


@pytest.mark.parametrize("ranks", [2, 4])
def test_ranks_that_share_the_experts_say_what_the_whole_says(ranks):
    """Each holds its part alone, and all come to the bits of one that holds everything."""
    config, family = config_of(), read_family(raw_config())
    whole, _ = part_model(config, Part(), TorchOperations())
    expected, meeting = whole.logits(TEXT), Meeting(ranks)

    def run(rank: int) -> tuple[Tensor, Tensor]:
        part = rank_part(family, rank, ranks)
        model, source = part_model(config, part, TorchOperations(), meeting.of(rank))
        assert not any(".experts." in name and not part.holds(name, 6) for name in source.taken)
        drafts = DraftModel(model, source)
        proposal = drafts.propose(drafts.new_cache(1), [Anchor(0, 9, 0)])
        return model.logits(TEXT), proposal.logits

    with ThreadPoolExecutor(ranks) as pool:
        found = list(pool.map(run, range(ranks)))
    drafts = DraftModel(whole, RandomTensors())
    drafted = drafts.propose(drafts.new_cache(1), [Anchor(0, 9, 0)]).logits
    for logits, proposed in found:
        assert torch.equal(raw(logits), raw(expected))
        assert torch.equal(raw(proposed), raw(drafted))


@pytest.mark.parametrize("kind", ["auto", "torch"])
@pytest.mark.parametrize("rows", [1, 2, 33])
@pytest.mark.parametrize("held", [{0, 1, 2, 3}, {5}, set(), set(range(8))], ids=str)
def test_partial_outputs_add_up_to_the_wholes_bits(cpu_library, kind, rows, held):
    """Of any two parts, one of which may have no expert, and in operations of either kind."""
    operations, config = select_operations(1, kind), config_of()
    x_TC = torch.randn(rows, config.hidden_size, generator=torch.Generator().manual_seed(rows))
    given: list[Tensor] = []

    def mixture(share: Share | None) -> MixtureOfExperts:
        return MixtureOfExperts(
            config, RandomTensors(), operations, "layers.0.ffn", experts=8, experts_per_row=2, share=share
        )

    def note(own: Tensor) -> Tensor:
        given.append(own)
        return own

    whole = mixture(None)
    routes = whole.router(operations, x_TC, None)
    expected = whole.experts(operations, x_TC, routes)
    for experts in (held, set(range(8)) - held):
        mixture(Share(frozenset(experts), note))(operations, x_TC, None)
    here = torch.isin(routes.experts, torch.tensor(sorted(held)).long())
    assert not given[0][~here].any()
    assert not given[1][here].any()
    combined = mixture(Share(frozenset(held), lambda own: own + given[1]))(operations, x_TC, None)
    assert torch.equal(raw(combined), raw(expected))
    assert torch.allclose(combined, whole(operations, x_TC, None), atol=2e-5)  # which may be one call


def test_a_part_without_an_exchange_is_refused():
    with pytest.raises(InvalidInput, match="a part of 4 experts a layer, and no exchange"):
        part_model(config_of(), Part(experts=frozenset(range(4))), TorchOperations())


def test_shares_and_tokenizers_have_names_of_their_own(cpu_library: object):
    """A fingerprint has them, since rounding and ids differ. A prefill worker's entries are the whole's."""
    config, operations = config_of(), select_operations(1)
    every = Part(frozenset(range(config.n_routed_experts)), frozenset(range(config.dspark_n_routed_experts)))
    whole, _ = part_model(config, Part(), operations)
    shared, _ = part_model(config, every, operations, lambda outputs: outputs)
    encoder, _ = part_model(config, ENCODER, operations)
    assert whole.identity == encoder.identity != shared.identity
    other = COMPRESSED_IDS.flip(0)
    swapped = DeepseekModel(config, PartTensors(Part(), cut_layer(config)), operations, other)
    assert swapped.identity != whole.identity
    for model in (whole, shared, encoder, swapped):
        model.close()
