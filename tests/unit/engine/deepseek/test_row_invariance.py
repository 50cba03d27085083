"""A row's bits depend on that row alone: every operation, however many rows, wherever they start."""

import pytest
import torch
from golden_sets import golden_model

from engine import numerics
from engine.model.deepseek.compressor import pool_group
from engine.model.deepseek.core_attention import Entries, attend
from engine.model.deepseek.hyper_connections import Coefficients, add_output, sinkhorn
from engine.model.deepseek.indexer import index_scores
from engine.model.deepseek.norm import RmsNorm
from engine.model.deepseek.records import IndexRecord, MainRecord, WindowRecord
from engine.model.deepseek.rope import Angles, rotate_
from engine.model.deepseek.rows import SequenceRows
from engine.model.deepseek.step import KeyRows
from engine.numerics import Dense
from kernels.operations import select_operations

ROWS = (1, 2, 3, 7, 8, 15, 16, 17, 64, 512)
ALL = 512


def _randn(*shape):
    return torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape)))


WEIGHTS = (Dense.of(_randn(37, 100)), Dense.of(_randn(64, 100)))
WIDE = Dense.of(_randn(9, 16_500))
KEYS = _randn(131, 40)
POOL = torch.cat((torch.zeros(1, 64), _randn(300, 64)))
INDEX = torch.randint(0, 301, (ALL, 90), generator=torch.Generator().manual_seed(1))
SINKS = _randn(6)
POSITIONS = torch.randint(1, 130, (ALL,), generator=torch.Generator().manual_seed(2))


def _product(_, a, b):
    return numerics.batched_product(a, b)


def _rotated(x, cos, sin):
    x = x.clone()
    rotate_(x, Angles(cos, sin))
    return x


MODEL = golden_model("a", kind="torch")  # for its weights


def _engram(ops, x, found, dead):
    return MODEL._engram.layers[1](ops, x, found, dead)


def _moe(ops, x, image):
    return MODEL._blocks[4]._experts(ops, x, image)


def _site(ops, x, *premix):
    found, normed = MODEL._blocks[4]._attention_connection.enter(ops, x, *premix)
    return torch.cat((found.pre, found.post, found.mix.flatten(1), normed), 1)


# Name: function of operations and row tensors, and those tensors with all rows.
OPERATIONS = {
    "linear": (lambda ops, x: torch.cat(numerics.linear(ops, x, WEIGHTS), 1), [_randn(ALL, 100)]),
    "linear over many columns": (lambda ops, x: numerics.linear(ops, x, (WIDE,))[0], [_randn(ALL, 16_500)]),
    "dot products": (lambda ops, x: numerics.dot_products(ops, x, KEYS), [_randn(ALL, 40)]),
    "batched product, narrow": (_product, [_randn(ALL, 4, 4), _randn(ALL, 4, 48)]),
    "batched product": (_product, [_randn(ALL, 6, 64), _randn(ALL, 64, 90)]),
    "batched product, transposed": (
        lambda _, a, b: _product(0, a, b.transpose(1, 2)), [_randn(ALL, 6, 64), _randn(ALL, 90, 64)]),
    "tree sum": (lambda _, x: numerics.tree_sum(x, 1), [_randn(ALL, 13, 7)]),
    "mean square": (lambda _, x: numerics.mean_square(x), [_randn(ALL, 193)]),
    "row sum": (lambda _, x: numerics.row_sum(x), [_randn(ALL, 3, 193)]),
    "softmax": (lambda _, x: numerics.softmax(x), [_randn(ALL, 6, 91)]),
    "sigmoid": (lambda _, x: numerics.sigmoid(x), [_randn(ALL, 7)]),
    "silu": (lambda _, a, b: numerics.silu_mul(a, b), [_randn(ALL, 33), _randn(ALL, 33)]),
    "softplus": (lambda _, x: numerics.softplus(x), [_randn(ALL, 7)]),
    "top k": (lambda ops, x: numerics.top_k(x.round(decimals=1), 5, ops), [_randn(ALL, 70)]),
    "norm": (RmsNorm(_randn(80), 1e-6), [_randn(ALL, 80)]),
    "norm of an odd width": (RmsNorm(_randn(77), 1e-6), [_randn(ALL, 77)]),
    "rotation": (_rotated, [_randn(ALL, 3, 24), _randn(ALL, 10), _randn(ALL, 10)]),
    "pooling": (lambda _, u, s: pool_group(u, s), [_randn(ALL, 2, 24), _randn(ALL, 2, 24)]),
    "Sinkhorn": (lambda _, m: sinkhorn(m, 20, 1e-6), [_randn(ALL, 4, 4).exp()]),
    "site": (_site, [_randn(ALL, 4, 48)]),
    "site with a mix handed on": (_site, [_randn(ALL, 4, 48), _randn(ALL, 4)]),
    "streams": (
        lambda _, x, y, post, mix: add_output(_, x, y, Coefficients(post, post, mix)).x,
        [_randn(ALL, 4, 48), _randn(ALL, 48), _randn(ALL, 4), _randn(ALL, 4, 4)]),
    "attention": (
        lambda ops, q, index, cos, sin: attend(
            ops, q, [Entries(POOL, index), Entries(POOL, index[:, :40])], SINKS, scale=0.125,
            angles=Angles(cos, sin)),
        [_randn(ALL, 6, 64), INDEX, _randn(ALL, 10), _randn(ALL, 10)]),
    "index scores": (lambda ops, q, a, seen: index_scores(ops, q, a, KeyRows(KEYS, torch.arange(131)), seen),
        [_randn(ALL, 16, 40), _randn(ALL, 16), POSITIONS]),
    "index scores in one call": (
        lambda ops, q, a, seen: index_scores(ops, q, a, KeyRows(POOL, torch.arange(131).flip(0)), seen),
        [_randn(ALL, 16, 64), _randn(ALL, 16), POSITIONS]),
    "experts": (_moe, [_randn(ALL, 48), POSITIONS % 9 == 0]),
    "Engram": (_engram, [_randn(ALL, 4, 48), _randn(ALL, 192), POSITIONS % 9 == 0]),
    "window record": (lambda _, x: WindowRecord(64).encode(x), [_randn(ALL, 64)]),
    "main record": (lambda _, x: MainRecord(64).encode(x), [_randn(ALL, 64)]),
    "index record": (lambda _, x: IndexRecord(64).encode(x), [_randn(ALL, 3, 64)]),
}  # fmt: skip


@pytest.fixture(params=[1, 2], ids=["one-thread", "two-threads"])
def threads(request):
    before = torch.get_num_threads()
    torch.set_num_threads(request.param)
    yield request.param
    torch.set_num_threads(before)


@pytest.mark.parametrize("name", OPERATIONS)
@pytest.mark.parametrize("kind", ["c", "torch"])
@torch.inference_mode()
def test_a_row_depends_on_itself_alone(name, kind, threads, cpu_library):
    run, tensors = OPERATIONS[name]
    operations = select_operations(threads, kind)
    arguments = () if name == "rotation" else (operations,)
    together = run(*arguments, *tensors)
    for count in ROWS:
        for start in {0, min(5, ALL - count)}:
            part = [t[start : start + count].clone() for t in tensors]
            assert torch.equal(run(*arguments, *part), together[start : start + count]), (count, start)


E2M1 = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6])
IN_4_BITS = E2M1[torch.randint(0, 8, (64, 100))] * _randn(64, 100).sign()
IN_8_BITS = _randn(37, 100).to(torch.float8_e4m3fn).float()


def _in_whole_numbers(operations):
    """As OPERATIONS, of weights that these operations have prepared."""

    def prepared(*weights):
        return [Dense.prepared(weight, operations) for weight in weights]

    model = golden_model("a", kind=operations.name, profile="fast")
    alike, wide = prepared(IN_4_BITS, IN_8_BITS, _randn(37, 100)), prepared(_randn(9, 16_500))
    assert {w.format for dense in alike for w in dense.parts} == {"mxfp4", "mxfp8", "mxint8"}
    mixed = (alike[0], *WEIGHTS, *alike[1:])
    engram, experts = model._engram.layers[1], model._blocks[4]._experts
    return {
        "linear": (lambda ops, x: torch.cat(numerics.linear(ops, x, mixed), 1), [_randn(ALL, 100)]),
        "linear over many columns": (
            lambda ops, x: numerics.linear(ops, x, wide)[0], [_randn(ALL, 16_500)]),
        "experts": (experts, [_randn(ALL, 48), POSITIONS % 9 == 0]),
        "Engram": (engram, [_randn(ALL, 4, 48), _randn(ALL, 192), POSITIONS % 9 == 0]),
    }  # fmt: skip


@pytest.mark.parametrize("name", ["linear", "linear over many columns", "experts", "Engram"])
@pytest.mark.parametrize("kind", ["c", "torch"])
@torch.inference_mode()
def test_a_row_depends_on_itself_alone_in_whole_numbers(name, kind, threads, cpu_library):
    operations = select_operations(threads, kind, "fast")
    run, tensors = _in_whole_numbers(operations)[name]
    together = run(operations, *tensors)
    for count in ROWS:
        for start in {0, min(5, ALL - count)}:
            part = [t[start : start + count].clone() for t in tensors]
            assert torch.equal(run(operations, *part), together[start : start + count]), (count, start)


@pytest.mark.parametrize("function", [numerics.mean_square, numerics.row_sum])
def test_a_long_row_alone_is_summed_as_among_others(function, threads):
    """A single sum of more than 32,768 terms is what torch would cut among its threads."""
    x = _randn(3, 40_000)
    together = function(x)
    assert all(torch.equal(function(x[row : row + 1].clone()), together[row : row + 1]) for row in range(3))


@pytest.mark.parametrize("kind", ["c", "torch"])
def test_a_score_depends_on_its_row_and_its_key_alone(kind, cpu_library):
    """A longer context has the scores of a shorter one, and more."""
    operations, x = select_operations(1, kind), _randn(3, 40)
    together = numerics.dot_products(operations, x, KEYS)
    for count in (1, 2, 15, 63, 64, 65, 128):
        assert torch.equal(numerics.dot_products(operations, x, KEYS[:count]), together[:, :count])


@pytest.mark.parametrize("kind", ["c", "torch"])
def test_ties_go_to_the_lowest_positions(kind, cpu_library):
    scores = torch.tensor([[1.0, 2, 2, 2, 3], [0, 0, 0, 0, 0], [-torch.inf, 1, -torch.inf, 0, -torch.inf]])
    ops = select_operations(1, kind)
    assert numerics.top_k(scores, 3, ops).tolist() == [[1, 2, 4], [0, 1, 2], [1, 3, -1]]
    assert numerics.top_k(scores, 9, ops).tolist() == [[0, 1, 2, 3, 4], [0, 1, 2, 3, 4], [1, 3, -1, -1, -1]]


@pytest.mark.parametrize("profile", ["exact", "fast"])
@pytest.mark.parametrize("rows", [r for r in ROWS if r > 1])
def test_a_whole_step_of_many_sequences_gives_each_its_own_bits(rows, profile, cpu_library):
    """Decode rows of up to 512 sequences in one step, against each of some alone."""
    model = golden_model("a", profile=profile)
    cache = model.new_cache(rows, 2, rows)
    ids = torch.arange(rows) % 290 + 4
    together = model.forward(ids, [SequenceRows(s, [s], 0, 1) for s in range(rows)], cache)
    for s in (0, rows // 2, rows - 1):
        alone = model.forward(ids[s : s + 1], [SequenceRows(s, [s], 0, 1)], cache)
        assert torch.equal(alone[0], together[s])


def test_sinkhorn_leaves_its_input_alone_and_ends_doubly_stochastic():
    for rows in (1, 5):
        mix = _randn(rows, 4, 4).exp()
        before = mix.clone()
        balanced = sinkhorn(mix, 40, 1e-9)
        assert torch.equal(mix, before)
        assert torch.allclose(balanced.sum(1), torch.ones(rows, 4), atol=1e-5)
        assert torch.allclose(balanced.sum(2), torch.ones(rows, 4), atol=1e-3)
