"""Each mechanism of V4 against its formula in float64, one row and one entry at a time."""

import pytest
import torch
from tiny_v4 import QUANTISED, RandomTensors, ids_of, run_chunks, tiny_config, tiny_model

from engine.errors import BrokenModelFile
from engine.model.deepseek.core_attention import Entries, attend_composed
from engine.model.deepseek.hyper_connections import Stream
from engine.model.deepseek.moe import Router
from engine.model.deepseek.records import PlainRecord
from engine.model.deepseek.rope import Angles, RotaryTables, rotate_
from engine.model.deepseek.rows import Rows, SequenceRows
from engine.model.deepseek_v4.compressor import Compressor
from engine.model.deepseek_v4.config import DeepseekV4Config
from engine.model.deepseek_v4.heavy_attention import Compressed, HeavyAttention, Visible
from engine.model.deepseek_v4.hyper_head import HyperHead
from engine.model.deepseek_v4.model import DeepseekV4Model
from engine.model.deepseek_v4.mtp import DraftBlock
from engine.model.deepseek_v4.routing import HashRouter
from engine.model.deepseek_v4.step import V4Step
from engine.model.tensor_source import TensorsInMemory
from engine.numerics import linear
from kernels.operations import select_operations

SOURCE = RandomTensors()
NO_TURN = Angles(torch.ones(43, 8), torch.zeros(43, 8))


def _take(name, *shape):
    return SOURCE.take(name, shape).double()


def _pooled(values, gates):
    """A softmax over the slots for each channel, in float64."""
    return (gates.softmax(0) * values).sum(0)


def _entry(pooled, norm, position, config):
    normed = pooled / (pooled.square().mean() + config.rms_norm_eps).sqrt() * norm
    row = normed.float()[None]
    rotate_(row, RotaryTables.of(config).compressed.angles(torch.tensor([position])))
    return row[0]


def _compress(config, layer, x_TC):
    """The cache of a layer's compressor after one step over these rows."""
    cache = DeepseekV4Model(config, SOURCE, select_operations(1)).new_cache(4, 16, 1)
    count = len(x_TC)
    step = V4Step(
        select_operations(1), cache, RotaryTables.of(config), [SequenceRows(0, range(4), 0, count)], None,
        token_ids=torch.zeros(count, dtype=torch.int64),
    )  # fmt: skip
    compressor = Compressor(config, config.layers[layer], SOURCE, f"layers.{layer}.attn")
    compressor.write(step, layer, linear(step.operations, x_TC, (compressor.weight,))[0])
    return cache.sources[layer]


@pytest.mark.parametrize("part", ["main", "index"])
def test_csa_pools_the_first_series_of_the_group_before_and_the_second_of_its_own(cpu_library, part):
    config, x_TC = tiny_config(), torch.randn(13, 64, generator=torch.Generator().manual_seed(3))
    prefix, width = {
        "main": ("layers.1.attn.compressor", config.head_dim),
        "index": ("layers.1.attn.indexer.compressor", config.index_head_dim),
    }[part]  # fmt: skip
    values = x_TC.double() @ _take(f"{prefix}.wkv.weight", 2 * width, 64).T
    gates = x_TC.double() @ _take(f"{prefix}.wgate.weight", 2 * width, 64).T
    ape = _take(f"{prefix}.ape", 4, 2 * width)
    stored = getattr(_compress(config, 1, x_TC), part)
    for group in range(3):
        slots = [(t, width) for t in range(4 * group, 4 * group + 4)]
        slots += [(t, 0) for t in range(4 * group - 4, 4 * group) if t >= 0]  # none before the first group
        u = torch.stack([values[t, at : at + width] for t, at in slots])
        s = torch.stack([gates[t, at : at + width] + ape[t % 4, at : at + width] for t, at in slots])
        expected = _entry(_pooled(u, s), _take(f"{prefix}.norm.weight", width), 4 * group, config)
        assert (stored[group] - expected).abs().max() < 5e-6
    assert not stored[3].any()  # its group is open


def test_hca_pools_its_own_group(cpu_library):
    config, x_TC = tiny_config(), torch.randn(19, 64, generator=torch.Generator().manual_seed(4))
    prefix, width = "layers.2.attn.compressor", config.head_dim
    values = x_TC.double() @ _take(f"{prefix}.wkv.weight", width, 64).T
    gates = x_TC.double() @ _take(f"{prefix}.wgate.weight", width, 64).T
    source = _compress(config, 2, x_TC)
    for group in range(2):
        own = slice(8 * group, 8 * group + 8)
        pooled = _pooled(values[own], gates[own] + _take(f"{prefix}.ape", 8, width))
        expected = _entry(pooled, _take(f"{prefix}.norm.weight", width), 8 * group, config)
        assert (source.main[group] - expected).abs().max() < 5e-6
    assert len(source.index) == 0


@pytest.mark.parametrize("width", [64, 72], ids=["in one call", "composed"])
@pytest.mark.parametrize("kind", ["c", "torch"])
def test_hca_attends_to_all_that_a_row_sees_in_one_softmax(kind, width, cpu_library):
    """As attend() does where all visible entries are selected: the same numbers, summed in tiles."""
    torch.manual_seed(0)
    sequences = [SequenceRows(0, [0, 1], 5, 40), SequenceRows(1, [2, 3, 4, 5], 200, 3)]
    rows = Rows(sequences, 64)
    q_THD, stored, sink_H = torch.randn(43, 4, width), torch.randn(6 * 32, width), torch.randn(4)
    pool = torch.cat((torch.zeros(1, width), torch.randn(50, width)))
    near = Entries(pool, torch.randint(0, 51, (43, 16)))
    far = Compressed(stored, PlainRecord(width), Visible.of(rows, 2))
    found = HeavyAttention(sink_H, 0.1)(select_operations(1, kind), q_THD, near, far, NO_TURN)
    index = torch.zeros(43, 101, dtype=torch.int64)
    for seen in far.visible:
        for row in range(seen.rows.start, seen.rows.stop):
            count = (int(rows.positions_T[row]) + 1) // 2
            index[row, :count] = seen.entries[:count] + 1
    all_entries = Entries(torch.cat((torch.zeros(1, width), stored)), index)
    expected = attend_composed(q_THD, [near, all_entries], sink_H, 0.1)
    assert (found - expected).abs().max() < 2e-6


def test_the_hyper_head_mixes_the_streams(cpu_library):
    config, x_TNC = tiny_config(), torch.randn(3, 4, 64)
    found = HyperHead(config, SOURCE, "")(select_operations(1), x_TNC)
    fn, base = _take("hc_head_fn", 4, 256), _take("hc_head_base", 4)
    flat = x_TNC.double().flatten(1)
    m = flat @ fn.T / (flat.square().mean(1, keepdim=True) + config.rms_norm_eps).sqrt()
    mix = torch.sigmoid(m * _take("hc_head_scale", 1) + base) + config.hc_eps
    assert (found - (mix[:, :, None] * x_TNC).sum(1)).abs().max() < 1e-5


def test_hash_layers_route_by_the_token_alone_and_weigh_by_the_scores(cpu_library):
    config, x_TC = tiny_config(), torch.randn(6, 64)
    ids = torch.tensor([5, 9, 5, 0, 127, 9])
    routes = HashRouter(config, SOURCE, "g")(select_operations(1), x_TC, ids)
    assert torch.equal(routes.experts, SOURCE.take("g.tid2eid", (128, 2)).long()[ids])
    scores = torch.log1p((x_TC.double() @ _take("g.weight", 8, 64).T).exp()).sqrt().gather(1, routes.experts)
    assert (routes.weights - 1.5 * scores / scores.sum(1, keepdim=True)).abs().max() < 1e-6


def test_score_layers_select_with_the_bias_and_weigh_without(cpu_library):
    config, x_TC = tiny_config(), torch.randn(6, 64)
    routes = Router(config, SOURCE, "g", 8, 2, sees_images=False)(select_operations(1), x_TC, None)
    scores = torch.log1p((x_TC.double() @ _take("g.weight", 8, 64).T).exp()).sqrt()
    best = (scores + _take("g.bias", 8)).topk(2).indices.sort(1).values
    assert torch.equal(routes.experts, best)
    chosen = scores.gather(1, best)
    assert (routes.weights - 1.5 * chosen / chosen.sum(1, keepdim=True)).abs().max() < 1e-6


def test_query_heads_have_a_norm_of_their_own(cpu_library):
    """So the scale of wq_b does not matter; in V4.1 it does."""

    class Scaled(RandomTensors):
        def take(self, name, shape):
            scale = 16.0 if name.endswith("attn.wq_b.weight") else 1.0
            return super().take(name, shape) * scale

    config, ids = tiny_config(rms_norm_eps=1e-12), ids_of(30)
    scaled = DeepseekV4Model(config, Scaled(), select_operations(1))
    assert (scaled.logits(ids) - tiny_model(config).logits(ids)).abs().max() < 1e-4


@pytest.mark.parametrize("name", QUANTISED)
def test_quantised_caches_stay_near_float32(cpu_library, name):
    """Where every entry is selected: a random model's selection turns on the last bit of a score."""
    ids = ids_of(60)
    exact = tiny_model(tiny_config(index_topk=64)).logits(ids).log_softmax(1)
    found = tiny_model(tiny_config(QUANTISED[name], index_topk=64)).logits(ids).log_softmax(1)
    divergence = float((exact.exp() * (exact - found)).sum(1).mean())
    assert divergence == 0 if name == "off" else 0 < divergence < 0.05


class _Streams:
    """An observer that keeps what leaves the last layer."""

    def __init__(self):
        self.last: list[Stream] = []

    def left(self, layer, stream, rows):
        if layer == 4:
            self.last.append(stream)

    def selected(self, layer, groups_TK, blocks, rows): ...


def _draft(model, ids, chunk):
    """Logits of the draft block for every row but the last, which has no next token."""
    draft, seen, cache = DraftBlock(model, SOURCE), _Streams(), model.new_cache(4, 16, 1)
    for start in range(0, len(ids) - 1, chunk):
        part = ids[start : min(start + chunk, len(ids) - 1)]
        rows = [SequenceRows(0, range(4), start, len(part))]
        model.forward(torch.tensor(part), rows, cache, seen)
        following = torch.tensor(ids[start + 1 : start + 1 + len(part)])
        yield draft.forward(following, seen.last[-1].x, rows, cache)[0]


def test_the_draft_block_gives_the_same_bits_in_any_chunks(cpu_library):
    model, ids = tiny_model(), ids_of(50)
    full = torch.cat(list(_draft(model, ids, 64)))
    assert full.shape == (49, 128)
    for chunk in (1, 9):
        assert torch.equal(torch.cat(list(_draft(model, ids, chunk))), full)


def test_the_draft_block_leaves_the_model_alone(cpu_library):
    model, ids = tiny_model(), ids_of(50)
    cache, seen = model.new_cache(4, 16, 1), _Streams()
    draft, parts = DraftBlock(model, SOURCE), []
    for start in range(0, 48, 8):
        rows = [SequenceRows(0, range(4), start, 8)]
        parts.append(model.forward(torch.tensor(ids[start : start + 8]), rows, cache, seen))
        draft.forward(torch.tensor(ids[start + 1 : start + 9]), seen.last[-1].x, rows, cache)
    assert torch.equal(torch.cat(parts), run_chunks(model, ids[:48], 48))


def test_a_missing_or_misshapen_tensor_is_named():
    with pytest.raises(BrokenModelFile, match=r"mine: no tensor 'embed.weight', expected with shape"):
        DeepseekV4Model(tiny_config(), TensorsInMemory({}, "mine"), select_operations(1, "torch"))
    tensors = {"embed.weight": torch.zeros(128, 64), "head.weight": torch.zeros(3, 64)}
    with pytest.raises(BrokenModelFile, match=r"'head.weight' has shape \[3, 64\], expected \[128, 64\]"):
        DeepseekV4Model(tiny_config(), TensorsInMemory(tensors, "mine"), select_operations(1, "torch"))


def test_every_tensor_of_the_inventory_is_taken(cpu_library):
    """The model and its draft block ask for what engine.checkpoint says that the config implies."""
    from engine.checkpoint.inventory_v4 import v4_entries

    class Counting(RandomTensors):
        def __init__(self):
            self.taken = set()

        def take(self, name, shape):
            self.taken.add((name, shape))
            return super().take(name, shape)

    config: DeepseekV4Config = tiny_config()
    source = Counting()
    DraftBlock(DeepseekV4Model(config, source, select_operations(1)), source)
    assert source.taken == {(entry.name, entry.shape) for entry in v4_entries(config)}


@pytest.mark.parametrize("row", [[0, 8], [-1, 2]], ids=["beyond", "below"])
def test_a_table_that_is_no_choice_of_experts_is_refused(row: list[int]) -> None:
    config = tiny_config()
    table = SOURCE.take("x.tid2eid", (config.vocab_size, 2))
    table[5] = torch.tensor(row)
    source = TensorsInMemory(
        {"g.weight": torch.zeros(config.n_routed_experts, config.hidden_size), "g.tid2eid": table}, "values"
    )
    with pytest.raises(BrokenModelFile, match=rf"tid2eid: token 5 has the experts \[{row[0]}, {row[1]}\]"):
        HashRouter(config, source, "g")
