"""A row's bits depend on that row alone: every operation, however many rows, wherever they start."""

from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from golden_sets import RandomTensors, golden_model

from engine import numerics
from engine.checkpoint.v4_shape import V4Layer
from engine.model.deepseek.compressor import Compressor, pool_group
from engine.model.deepseek.core_attention import Entries, attend
from engine.model.deepseek.hyper_connections import Coefficients, add_output, sinkhorn
from engine.model.deepseek.indexer import index_scores
from engine.model.deepseek.norm import RmsNorm
from engine.model.deepseek.projections import GroupedOutput, Keys, Queries
from engine.model.deepseek.records import IndexRecord, MainRecord, PlainRecord, WindowRecord
from engine.model.deepseek.rope import Angles, rotate_
from engine.model.deepseek.rows import Rows, SequenceRows
from engine.model.deepseek.step import KeyRows
from engine.model.deepseek_v4.compressor import Compressor as V4Compressor
from engine.model.deepseek_v4.heavy_attention import Compressed, HeavyAttention, Visible
from engine.model.deepseek_v4.hyper_head import HyperHead
from engine.model.deepseek_v4.routing import HashRouter
from engine.numerics import Dense
from kernels.operations import select_operations
from kernels.torch_operations import TorchOperations

ROWS = (1, 2, 3, 7, 8, 15, 16, 17, 64, 512)
ALL = 512


def _randn(*shape):
    return torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape)))


WEIGHTS = (Dense.of(_randn(37, 100)), Dense.of(_randn(64, 100)))
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


# Widths that no operation takes in one call: test_fused_operations.py has those.
SHAPE = cast(Any, SimpleNamespace(
    hidden_size=80, head_dim=40, num_attention_heads=6, q_lora_rank=24, o_groups=2, o_lora_rank=24,
    index_n_heads=5, index_head_dim=24, rms_norm_eps=1e-6, hc_mult=4, hc_eps=1e-6, vocab_size=50,
    n_routed_experts=9, num_experts_per_tok=3, routed_scaling_factor=1.5,
))  # fmt: skip
PLAIN, WEIGHTS_OF = TorchOperations(), RandomTensors()
ANGLES = [_randn(ALL, 10), _randn(ALL, 10).flip(1)]
MORE = (Dense.of(_randn(21, 80)),)
KEYS_OF, OUTPUT = Keys(SHAPE, WEIGHTS_OF, PLAIN, "a", MORE), GroupedOutput(SHAPE, WEIGHTS_OF, PLAIN, "a")
QUERIES = Queries(SHAPE, WEIGHTS_OF, PLAIN, "a", indexed=True)
V4_QUERIES = Queries(SHAPE, WEIGHTS_OF, PLAIN, "a", indexed=True, head_norm=True)
PAIRS, V4_GROUPS = (
    Compressor(SHAPE, WEIGHTS_OF, "c", 2), V4Compressor(SHAPE, V4Layer("csa", 4), WEIGHTS_OF, "c")
)  # fmt: skip
HYPER_HEAD, HEAVY = HyperHead(SHAPE, WEIGHTS_OF, ""), HeavyAttention(SINKS, 0.125)


class HashTable(RandomTensors):
    """Experts of tokens, beside random weights."""

    def take(self, name, shape):
        if not name.endswith("tid2eid"):
            return super().take(name, shape)
        return (
            torch.rand(shape[0], 9, generator=torch.Generator().manual_seed(3))
            .argsort(1)[:, : shape[1]]
            .float()
        )


HASH_ROUTER = HashRouter(SHAPE, HashTable(), "r")


def _pairs(ops, x):
    """Each row two tokens, that make an entry."""
    tokens = x.flatten(0, 1)
    plan = Rows([SequenceRows(0, range(len(x)), 0, len(tokens))], 2).groups(2, 9)
    projected = numerics.linear(ops, tokens, PAIRS.weights)
    return PAIRS.latents(ops, projected, plan, torch.zeros(9, 2 * SHAPE.head_dim))


def _v4_groups(ops, x):
    """Each row the eight tokens of an entry and of an index key, values and gates."""
    return torch.cat([pool.norm(ops, pool.pooled(x)) for pool in V4_GROUPS._pools], 1)


def _hashed(ops, x, ids):
    routes = HASH_ROUTER(ops, x, ids)
    return torch.cat((routes.experts.float(), routes.weights), 1)


def _heavy(width):
    """As many entries as the row with the most sees: the number of tiles goes with the step's rows."""
    pool = torch.cat((torch.zeros(1, width), _randn(300, width)))

    def run(ops, q, index, counts, *angles):
        seen = Visible(slice(0, len(q)), torch.arange(int(counts.max())), counts)
        far = Compressed(pool, PlainRecord(width), [seen])
        return HEAVY(ops, q, Entries(pool, index), far, Angles(*angles))

    return run, [_randn(ALL, 6, width), INDEX[:, :16], POSITIONS, *ANGLES]


# Name: function of operations and row tensors, and those tensors with all rows.
OPERATIONS = {
    "linear": (lambda ops, x: torch.cat(numerics.linear(ops, x, WEIGHTS), 1), [_randn(ALL, 100)]),
    "linear in parts": (lambda ops, x: numerics.linear(ops, x, (_in_parts(),))[0], [_randn(ALL, 1500)]),
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
    "keys": (lambda ops, x, *a: torch.cat(KEYS_OF(ops, x, Angles(*a)), 1), [_randn(ALL, 80), *ANGLES]),
    "queries": (lambda ops, x, *a: torch.cat(QUERIES(ops, x, Angles(*a)), 1), [_randn(ALL, 80), *ANGLES]),
    "queries with a norm of heads": (
        lambda ops, x, *a: torch.cat(V4_QUERIES(ops, x, Angles(*a)), 1), [_randn(ALL, 80), *ANGLES]),
    "output": (OUTPUT, [_randn(ALL, 6, 40)]),
    "compressor": (_pairs, [_randn(ALL, 2, 80)]),
    "compressor of V4": (_v4_groups, [_randn(ALL, 8, V4_GROUPS.weight.rows)]),
    "attention to all entries": _heavy(40),
    "attention to all entries in one call": _heavy(64),
    "hyper-head": (HYPER_HEAD, [_randn(ALL, 4, 80)]),
    "hash router": (_hashed, [_randn(ALL, 80), POSITIONS % 50]),
    "window record": (lambda _, x: WindowRecord(64).encode(x), [_randn(ALL, 64)]),
    "main record": (lambda _, x: MainRecord(64).encode(x), [_randn(ALL, 64)]),
    "index record": (lambda _, x: IndexRecord(64).encode(x), [_randn(ALL, 3, 64)]),
}  # fmt: skip


@pytest.fixture(autouse=True)
def narrow_products(monkeypatch):
    """So that few columns fall into parts."""
    monkeypatch.setattr(numerics, "MAX_COLUMNS", 1024)


def _in_parts():
    dense = Dense.of(_randn(9, 1500))
    assert [part.columns for part in dense.parts] == [1024, 480]
    return dense


@pytest.fixture(params=[1, 2, 3], ids=["one-thread", "two-threads", "three-threads"])
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
IN_8_BITS, WIDE_IN_8_BITS = (x.to(torch.float8_e4m3fn).float() for x in (_randn(37, 100), _randn(9, 1500)))


def _in_whole_numbers(operations):
    """As OPERATIONS, of weights that these operations have prepared."""

    def prepared(*weights):
        return [Dense.prepared(weight, operations) for weight in weights]

    model = golden_model("a", kind=operations.name, profile="fast")
    alike, wide = prepared(IN_4_BITS, IN_8_BITS, _randn(37, 100)), prepared(WIDE_IN_8_BITS)
    assert [w.format for dense in (*alike, *wide) for w in dense.parts] == [
        "mxfp4",
        "mxfp8",
        "f32",
        *2 * ["mxfp8"],
    ]
    mixed = (alike[0], *WEIGHTS, *alike[1:])
    engram, experts = model._engram.layers[1], model._blocks[4]._experts
    return {
        "linear": (lambda ops, x: torch.cat(numerics.linear(ops, x, mixed), 1), [_randn(ALL, 100)]),
        "linear in parts": (
            lambda ops, x: numerics.linear(ops, x, wide)[0], [_randn(ALL, 1500)]),
        "experts": (experts, [_randn(ALL, 48), POSITIONS % 9 == 0]),
        "Engram": (engram, [_randn(ALL, 4, 48), _randn(ALL, 192), POSITIONS % 9 == 0]),
    }  # fmt: skip


@pytest.mark.parametrize("name", ["linear", "linear in parts", "experts", "Engram"])
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
    assert numerics.top_k(scores, 0, ops).shape == (3, 0)
    with pytest.raises(ValueError, match="k is -1, expected 0 or more"):
        numerics.top_k(scores, -1, ops)
    composed = numerics.top_k(scores, 0)
    assert (composed.shape, composed.dtype) == ((3, 0), torch.int64)


def test_matrices_that_folders_store_in_16_and_32_bits_stay_so_in_fast(cpu_library):
    fast, exact = select_operations(1, "c", "fast"), select_operations(1, "c")
    x = _randn(5, 100)
    for matrix, kept in ((_randn(64, 100), "f32"), (_randn(64, 100).bfloat16().float(), "bf16")):
        dense = Dense.prepared(matrix, fast)
        assert [part.format for part in dense.parts] == [kept]
        found, expected = (numerics.linear(o, x, (Dense.prepared(matrix, o),))[0] for o in (fast, exact))
        assert torch.equal(found, expected)


def test_sinkhorn_leaves_its_input_alone_and_ends_doubly_stochastic():
    for rows in (1, 5):
        mix = _randn(rows, 4, 4).exp()
        before = mix.clone()
        balanced = sinkhorn(mix, 40, 1e-9)
        assert torch.equal(mix, before)
        assert torch.allclose(balanced.sum(1), torch.ones(rows, 4), atol=1e-5)
        assert torch.allclose(balanced.sum(2), torch.ones(rows, 4), atol=1e-3)
