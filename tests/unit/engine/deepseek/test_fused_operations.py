"""What C runs in one call against the same of PyTorch's operations, and row by row, in every form of C."""

from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from golden_sets import RandomTensors
from torch import Tensor

from engine.model.deepseek.core_attention import Entries, attend, attend_composed
from engine.model.deepseek.hyper_connections import Coefficients, HyperConnection, add_output
from engine.model.deepseek.indexer import index_scores
from engine.model.deepseek.moe import MixtureOfExperts
from engine.model.deepseek.norm import RmsNorm
from engine.model.deepseek.projections import GroupedOutput, Keys, Queries
from engine.model.deepseek.records import IndexRecord, MainRecord, WindowRecord, decode, encode
from engine.model.deepseek.rope import Angles
from engine.model.deepseek.step import KeyRows
from engine.model.deepseek_v4.records import Fp8IndexRecord, SplitRecord
from engine.model.deepseek_v4.routing import HashedExperts
from engine.numerics import Dense
from kernels.cpu.build import compile_to
from kernels.cpu.library import open_library
from kernels.cpu.operations import CpuOperations
from kernels.fused import EntrySource
from kernels.operations import Operations
from kernels.torch_operations import TorchOperations

FORMS = {"of this processor": (), "8 lanes": ("-DLANES=8",), "16 lanes": ("-DLANES=16", "-mno-avx512f")}
COUNTS = (1, 2, 3, 7, 8, 15, 16, 17, 64, 512)
ROWS = max(COUNTS)
SHAPE = cast(Any, SimpleNamespace(
    hidden_size=80, head_dim=48, num_attention_heads=6, q_lora_rank=48, o_groups=2, o_lora_rank=48,
    index_n_heads=5, index_head_dim=32, rms_norm_eps=1e-6, hc_mult=4, hc_sinkhorn_iters=20, hc_eps=1e-6,
    moe_intermediate_size=40, swiglu_limit=1.5, routed_scaling_factor=1.5, n_routed_experts=9,
    num_experts_per_tok=3, vocab_size=50,
))  # fmt: skip


def _randn(*shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape)))


@pytest.fixture(scope="module", params=FORMS)
def library(request, tmp_path_factory, cpu_library):
    if not FORMS[request.param]:
        return open_library(cpu_library)
    path = tmp_path_factory.mktemp("forms") / "form.so"
    compile_to(path, *FORMS[request.param])
    return open_library(path)


@dataclass(frozen=True)
class Tables(RandomTensors):
    """Weights that are bfloat16's, and the table of a hash layer."""

    narrow: bool = False
    experts_in_fp4: bool = False
    in_fp8: bool = False

    def take(self, name: str, shape: tuple[int, ...]) -> Tensor:
        if name.endswith("tid2eid"):
            chosen = torch.rand(shape[0], SHAPE.n_routed_experts, generator=torch.Generator().manual_seed(3))
            return chosen.argsort(1)[:, : shape[1]].float()
        values = super().take(name, shape)
        if self.in_fp8 and "gate.weight" not in name and values.dim() == 2:
            values = (values / 8).to(torch.float8_e4m3fn).float() * 8
        if self.experts_in_fp4 and ".experts." in name:
            return values.sign() * (values.abs() * 8).round().clamp(max=4) / 4
        return values.bfloat16().float() if self.narrow else values


def _angles(rows: slice) -> Angles:
    return Angles(_randn(ROWS, 16)[rows], _randn(ROWS, 16)[rows].flip(1))


def _site(source: Tables, ops: Operations, streams: int, delayed: bool):
    shape = replace_shape(hc_mult=streams)
    norm = RmsNorm.take(source, "norm", SHAPE.hidden_size, 1e-6)
    site = HyperConnection(shape, source, "s", norm)
    assert site._site is not None
    x, premix = _randn(ROWS, streams, 80), _randn(ROWS, streams)

    def run(ops, rows):
        found, normed = site.enter(ops, x[rows], premix[rows] if delayed else None)
        return torch.cat((found.pre, found.post, found.mix.flatten(1), normed), 1)

    return run


def _streams(source: Tables, ops: Operations):
    x, y, post, mix = _randn(ROWS, 4, 80), _randn(ROWS, 80), _randn(ROWS, 4), _randn(ROWS, 4, 4)
    return lambda ops, r: add_output(ops, x[r], y[r], Coefficients(post[r], post[r], mix[r])).x


def _experts(source: Tables, ops: Operations):
    mixture, x = MixtureOfExperts(SHAPE, source, ops, "ffn", experts=9, experts_per_row=3), _randn(ROWS, 80)
    assert mixture._fused is not None
    image = torch.arange(ROWS) % 5 == 0
    return lambda ops, rows: mixture(ops, x[rows], image[rows])


def _hashed(source: Tables, ops: Operations):
    mixture, x, ids = HashedExperts(SHAPE, source, ops, "ffn"), _randn(ROWS, 80), torch.arange(ROWS) % 50
    assert mixture._fused is not None
    return lambda ops, rows: mixture(ops, x[rows], ids[rows])


def _keys(source: Tables, ops: Operations):
    more = (Dense.of(source.take("more", (21, 80))),)
    keys, x = Keys(SHAPE, source, ops, "a", more), _randn(ROWS, 80)
    assert keys._fused is not None
    return lambda ops, rows: torch.cat(keys(ops, x[rows], _angles(rows)), 1)


def _queries(source: Tables, ops: Operations, head_norm: bool):
    queries = Queries(SHAPE, source, ops, "a", indexed=True, head_norm=head_norm)
    assert queries._fused is not None
    x = _randn(ROWS, 80)
    return lambda ops, rows: torch.cat(queries(ops, x[rows], _angles(rows)), 1)


def _attention(source: Tables, ops: Operations, heads: int):
    pool = torch.cat((torch.zeros(1, 80), _randn(90, 80)))
    index = torch.randint(0, 91, (ROWS, 50), generator=torch.Generator().manual_seed(1))
    q, sinks = _randn(ROWS, heads, 80), _randn(heads)

    def run(ops, rows):
        entries = [Entries(pool, index[rows]), Entries(pool, index[rows, :7])]
        return attend(ops, q[rows], entries, sinks, scale=0.1, angles=_angles(rows))

    return run


def _output(source: Tables, ops: Operations):
    shape = replace_shape(head_dim=32)
    output, x = GroupedOutput(shape, source, ops, "a"), _randn(ROWS, 6, 32)
    assert output._fused is not None
    return lambda ops, rows: output(ops, x[rows])


def _scores(source: Tables, ops: Operations):
    keys = KeyRows(_randn(200, 32), torch.randperm(200, generator=torch.Generator().manual_seed(1))[:131])
    q, weights, visible = _randn(ROWS, 5, 32), _randn(ROWS, 5), torch.arange(ROWS) * 4 % 140
    return lambda ops, rows: index_scores(ops, q[rows], weights[rows], keys, visible[rows])


def replace_shape(**fields: int) -> Any:
    return SimpleNamespace(**{**vars(SHAPE), **fields})


CALLS = {
    "site": lambda source, ops: _site(source, ops, 4, delayed=False),
    "site of two streams": lambda source, ops: _site(source, ops, 2, delayed=True),
    "site of eight streams": lambda source, ops: _site(source, ops, 8, delayed=True),
    "streams": _streams,
    "experts by score": _experts,
    "experts by token": _hashed,
    "keys": _keys,
    "queries": lambda source, ops: _queries(source, ops, head_norm=False),
    "queries with a norm of heads": lambda source, ops: _queries(source, ops, head_norm=True),
    "attention": lambda source, ops: _attention(source, ops, 8),
    "attention of three heads": lambda source, ops: _attention(source, ops, 3),
    "output": _output,
    "index scores": _scores,
}


def _check_every_count(run, ops: Operations, together: Tensor) -> None:
    """Any number of rows from the first, from another, and up to the last."""
    for count in COUNTS:
        for start in {0, min(5, ROWS - count), ROWS - count}:
            found = run(ops, slice(start, start + count))
            assert torch.equal(found, together[start : start + count]), (count, start)


@pytest.mark.parametrize("narrow", [False, True], ids=["float32", "bfloat16"])
@pytest.mark.parametrize("name", CALLS)
@torch.inference_mode()
def test_one_call_agrees_with_pytorch_and_a_row_with_itself(library, name, narrow):
    run = CALLS[name](Tables(narrow=narrow), TorchOperations())
    together = run(CpuOperations(2, library=library), slice(0, ROWS))
    torch.testing.assert_close(together, run(TorchOperations(), slice(0, ROWS)), rtol=2e-5, atol=2e-5)
    one = CpuOperations(1, library=library)
    _check_every_count(run, one, together)


IN_WHOLE_NUMBERS = (
    "experts by score", "experts by token", "keys", "queries", "queries with a norm of heads", "output"
)  # fmt: skip


@pytest.mark.parametrize("experts_in_fp4", [False, True], ids=["MXFP8", "MXFP4"])
@pytest.mark.parametrize("name", IN_WHOLE_NUMBERS)
@torch.inference_mode()
def test_one_call_in_whole_numbers_agrees_with_pytorch_and_a_row_with_itself(library, name, experts_in_fp4):
    source = Tables(experts_in_fp4=experts_in_fp4, in_fp8=True)
    two, one = (CpuOperations(threads, "fast", library=library) for threads in (2, 1))
    run = CALLS[name](source, two)
    together, plain = run(two, slice(0, ROWS)), TorchOperations("fast")
    expected = CALLS[name](source, plain)(plain, slice(0, ROWS))
    torch.testing.assert_close(together, expected, rtol=2e-4, atol=2e-4)
    apart_T = ((together - expected).abs() > 2e-5 * (1 + expected.abs())).flatten(1).any(1)
    assert apart_T.sum() <= ROWS // 50  # whose inner values round to the whole number beside
    _check_every_count(run, one, together)


def test_attention_reads_a_cache_as_it_reads_a_pool(library):
    """Entries by number and how many, -1 for none, against a pool with a row of zeros for none."""
    ops, store, q, sinks = CpuOperations(2, library=library), _randn(90, 48), _randn(5, 4, 48), _randn(4)
    index = torch.randint(-1, 90, (5, 20), generator=torch.Generator().manual_seed(1))
    table, counts = torch.randperm(90)[:30], torch.tensor([0, 1, 8, 29, 30])
    sources = [EntrySource(store, index, 0), EntrySource(store, table, 0, counts)]
    found = ops.fused.attend(q, sources, sinks, 0.2, None)
    seen = torch.where(torch.arange(30) < counts[:, None], table + 1, 0)
    pool = torch.cat((torch.zeros(1, 48), store))
    expected = attend_composed(q, [Entries(pool, index + 1), Entries(pool, seen)], sinks, 0.2)
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)


RECORDS = [
    WindowRecord(64), MainRecord(64), IndexRecord(64), SplitRecord(80, 16), SplitRecord(576, 64),
    Fp8IndexRecord(64),
]  # fmt: skip


def _values_of_all_magnitudes(channels: int) -> Tensor:
    """Rows and channels apart by powers of two, ties between codes, zeros, and both ends of float32."""
    exponents = torch.Generator().manual_seed(5)
    return torch.cat((
        _randn(300, channels) * torch.randint(-60, 60, (300, 1), generator=exponents).float().exp2(),
        _randn(300, channels) * torch.randint(-12, 12, (300, channels), generator=exponents).float().exp2(),
        torch.randint(-24, 25, (300, channels), generator=exponents) / 4,
        torch.tensor([0.0, -0.0, 3e38, -3e38, 1e-44])[:, None].expand(5, channels),
    ))  # fmt: skip


@pytest.mark.parametrize("record", RECORDS, ids=repr)
def test_records_have_the_bytes_and_values_of_their_definition(library, record):
    ops, x = CpuOperations(2, library=library), _values_of_all_magnitudes(record.channels)
    stored = record.encode(x)
    assert torch.equal(encode(ops, record, x), stored)
    assert torch.equal(decode(ops, record, stored).view(torch.int32), record.decode(stored).view(torch.int32))
    any_bytes = torch.randint(0, 256, (300, record.width), dtype=torch.uint8)
    found, expected = decode(ops, record, any_bytes), record.decode(any_bytes)
    torch.testing.assert_close(found, expected, rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("record", RECORDS, ids=repr)
def test_what_is_not_a_number_stays_seen_in_records(library, record):
    """A NaN takes its group with it, and nothing else; what is infinite becomes the largest that there is."""
    ops, x = CpuOperations(2, library=library), _randn(4, record.channels)
    clean = decode(ops, record, encode(ops, record, x))
    x[0, 5], x[1, 5], x[2, 5] = torch.nan, torch.inf, -torch.inf
    x[3, -1] = -torch.nan
    stored = encode(ops, record, x)
    assert torch.equal(stored, record.encode(x))
    found = decode(ops, record, stored)
    torch.testing.assert_close(found, record.decode(stored), rtol=0, atol=0, equal_nan=True)
    coded, layout = record.layout.channels, record.layout
    taken = torch.zeros(4, record.channels, dtype=torch.bool)
    taken[0, : layout.group] = True
    taken[3, -layout.group if not layout.rotary else -1 :] = True
    assert torch.equal(found.isnan(), taken)
    assert torch.equal(found[:, layout.group : coded][~taken[:, layout.group : coded]],
                       clean[:, layout.group : coded][~taken[:, layout.group : coded]])  # fmt: skip
    assert float(found[1, 5]) == -float(found[2, 5]) == float(found[1].max()) >= 448
    if layout.rotary:
        x[3, -1], x[3, -2] = torch.inf, -torch.inf
        assert decode(ops, record, encode(ops, record, x))[3, -2:].tolist() == [-torch.inf, torch.inf]


@pytest.mark.parametrize("count", [1, 7, 64, 1000])
@pytest.mark.parametrize("k", [0, 1, 6, 64])
def test_the_largest_with_ties(library, count, k):
    scores = _randn(9, count).mul(2).round()
    scores[0, ::2] = -torch.inf
    scores[1] = -torch.inf
    found = CpuOperations(1, library=library).fused.top_k(scores, k).tolist()
    for row, positions in zip(scores.tolist(), found, strict=True):
        best = sorted((-value, i) for i, value in enumerate(row) if value > -torch.inf)[:k]
        expected = sorted(i for _, i in best)
        assert positions == expected + [-1] * (k - len(expected))


def test_what_does_not_exist_is_refused(library):
    ops = CpuOperations(1, library=library).fused
    q, store = _randn(1, 2, 48), _randn(10, 48)
    with pytest.raises(ValueError, match="outside"):
        ops.attend(q, [EntrySource(store, torch.tensor([[10]]), 0)], _randn(2), 0.1, None)
    table = torch.arange(10)
    with pytest.raises(ValueError, match="outside"):
        ops.attend(q, [EntrySource(store, table, 0, torch.tensor([11]))], _randn(2), 0.1, None)
    with pytest.raises(ValueError, match="k is negative"):
        ops.top_k(_randn(2, 5), -1)
    mixture = MixtureOfExperts(SHAPE, Tables(), TorchOperations(), "ffn", experts=9, experts_per_row=3)
    with pytest.raises(ValueError, match="numbers"):
        mixture(CpuOperations(1, library=library), torch.full((1, 80), torch.nan), None)


def test_what_c_would_misread_is_refused_by_name(library):
    ops, angles = CpuOperations(1, library=library).fused, Angles(_randn(3, 16), _randn(3, 16))
    q, store, sinks = _randn(3, 2, 48), _randn(10, 48), _randn(2)
    index = torch.zeros(3, 5, dtype=torch.int64)
    streams, post, mix = _randn(3, 9, 16), _randn(3, 9), _randn(3, 9, 9)
    with pytest.raises(ValueError, match="9 streams; the kernel takes 1 to 8"):
        ops.spread(streams, _randn(3, 16), post, mix)
    with pytest.raises(ValueError, match="post: "):
        ops.spread(streams[:, :4].contiguous(), _randn(3, 16), post[:, :4], mix[:, :4, :4].contiguous())
    calls = {
        "q": (q.double(), EntrySource(store, index, 0), None),
        "pool": (q, EntrySource(store.double(), index, 0), None),
        "index": (q, EntrySource(store, index.int(), 0), None),
        "counts": (q, EntrySource(store, index[0], 0, torch.ones(3).int()), None),
        "rotation: 16 channels of 3 rows, for 2": (q[:2], EntrySource(store, index[:2], 0), angles),
    }
    for name, (rows, entries, rotation) in calls.items():
        with pytest.raises(ValueError, match=f"^{name}"):
            ops.attend(rows, [entries], sinks, 0.1, rotation)
    for name, arguments in {
        "weights": (q, _randn(3, 4)[:, ::2], store, index[0], index[0, :3]),
        "keys": (q, _randn(3, 2), store, index[0].int(), index[0, :3]),
        "visible": (q, _randn(3, 2), store, index[0], index[0, :2]),
    }.items():
        with pytest.raises(ValueError, match=f"^{name}"):
            ops.index_scores(*arguments)


def test_more_rotary_channels_than_an_index_head_has_are_refused(library):
    """C would turn the head before, too."""
    shape, ops = replace_shape(index_head_dim=8), CpuOperations(1, library=library)
    queries = Queries(shape, Tables(), ops, "a", indexed=True)
    with pytest.raises(ValueError, match="16 channels of 3 rows, for 3 rows of heads of 8 channels"):
        queries(ops, _randn(3, 80), Angles(_randn(3, 16), _randn(3, 16)))


@torch.inference_mode()
def test_a_site_of_the_released_width_is_one_call(library):
    """Four streams of 5,120 channels are 20,480 columns."""
    shape, ops = replace_shape(hidden_size=5120), CpuOperations(2, library=library)
    source = Tables()
    site = HyperConnection(shape, source, "s", RmsNorm.take(source, "norm", 5120, 1e-6))
    assert site._site is not None
    x, premix = _randn(3, 4, 5120), _randn(3, 4)
    (ours, normed), (found, expected) = (site.enter(o, x, premix) for o in (ops, TorchOperations()))
    torch.testing.assert_close(normed, expected, rtol=2e-5, atol=2e-5)
    for name in ("pre", "post", "mix"):
        torch.testing.assert_close(getattr(ours, name), getattr(found, name), rtol=2e-5, atol=2e-5)
    alone = site.enter(ops, x[1:2].clone(), premix[1:2].clone())
    assert torch.equal(alone[0].mix, ours.mix[1:2])
    assert torch.equal(alone[1], normed[1:2])
