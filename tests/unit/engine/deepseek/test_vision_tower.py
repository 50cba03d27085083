"""The tower against a slow reference, and images in the model: chunks give the bits of the full pass."""

import json
import math

import numpy as np
import pytest
import torch
from dspark_models import COMPRESSED_IDS, IMAGE, config_of, raw_config, text, whole_tensors
from golden_sets import RandomTensors, Recorder
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import save_file

from engine.checkpoint.conversion import convert
from engine.checkpoint.source import open_checkpoint
from engine.errors import BrokenModelFile, InvalidRequest
from engine.model.deepseek import vision_block
from engine.model.deepseek.config import DeepseekConfig, Quantisation
from engine.model.deepseek.dspark import DraftModel
from engine.model.deepseek.dspark_context import Anchor
from engine.model.deepseek.image_span import ImageSpan, image_rows, place_images
from engine.model.deepseek.model import DeepseekModel
from engine.model.deepseek.rows import SequenceRows
from engine.model.deepseek.vision import VisionTower
from engine.model.tensor_source import TensorsInMemory
from kernels.operations import select_operations


def picture(height, width, seed=0):
    return np.random.default_rng(seed).integers(0, 256, (height, width, 3), dtype=np.uint8)


@pytest.fixture(scope="module")
def tower(cpu_library):
    return VisionTower(config_of(), RandomTensors(), select_operations(1))


def reference(patches, grid):
    """Section 9 with a loop over heads, patches and places; float64."""
    v = raw_config()["vision_config"]
    c, heads, patch, r = v["hidden_size"], v["num_attention_heads"], v["patch_size"], v["downsample_ratio"]
    x_size, d = 48, v["hidden_size"] // v["num_attention_heads"]

    def take(name, *shape):
        return RandomTensors().take(name, shape).double()

    def norm(x, name):
        return x / torch.sqrt((x * x).mean(-1, keepdim=True) + 1e-6) * take(f"vision.{name}.weight", c)

    def turned(head_ND):
        out = head_ND.clone()
        for n in range(len(head_ND)):
            place = divmod(n, grid.patch_columns)
            for pair in range(d // 2):
                axis, i = divmod(pair, d // 4)
                angle = place[axis] * 10000 ** (-2 * i / (d // 2))
                a, b = head_ND[n, pair], head_ND[n, pair + d // 2]
                out[n, pair] = a * math.cos(angle) - b * math.sin(angle)
                out[n, pair + d // 2] = b * math.cos(angle) + a * math.sin(angle)
        return out

    x = patches.double() @ take("vision.patch_embed.proj.weight", c, 3 * patch * patch).T
    x = x + take("vision.patch_embed.proj.bias", c)
    for block in range(v["num_hidden_layers"]):
        at = f"blocks.{block}"
        h = norm(x, f"{at}.norm1") @ take(f"vision.{at}.attn.wqkv.weight", 3 * c, c).T
        q, k, value = (h + take(f"vision.{at}.attn.wqkv.bias", 3 * c)).split(c, 1)
        mixed = []
        for head in range(heads):
            part = slice(head * d, head * d + d)
            scores = turned(q[:, part]) @ turned(k[:, part]).T / math.sqrt(d)
            mixed.append(torch.softmax(scores, -1) @ value[:, part])
        out = torch.cat(mixed, 1) @ take(f"vision.{at}.attn.wo.weight", c, c).T
        x = x + out + take(f"vision.{at}.attn.wo.bias", c)
        inner = v["intermediate_size"]
        h = norm(x, f"{at}.norm2") @ take(f"vision.{at}.mlp.w1.weight", 2 * inner, c).T
        h = torch.nn.functional.silu(h[:, :inner]) * h[:, inner:]
        x = x + h @ take(f"vision.{at}.mlp.w2.weight", c, inner).T
    x = norm(x, "norm").view(grid.patch_rows, grid.patch_columns, c)
    span = [take("image_start", x_size)]
    for row in range(grid.rows):
        for column in range(grid.columns):
            joined = torch.zeros(c, r, r, dtype=torch.float64)
            for dy in range(r):
                for dx in range(r):
                    y, z = row * r + dy, column * r + dx
                    if y < grid.patch_rows and z < grid.patch_columns:
                        joined[:, dy, dx] = x[y, z]
            h = joined.flatten() @ take("aligner.w1.weight", x_size, c * r * r).T
            h = torch.nn.functional.gelu(h + take("aligner.w1.bias", x_size))
            span.append(h @ take("aligner.w2.weight", x_size, x_size).T + take("aligner.w2.bias", x_size))
        span.append(take("image_newline", x_size))
    return torch.stack([*span, take("image_end", x_size)])


@pytest.mark.parametrize(("height", "width"), [(25, 31), (12, 48), (400, 3), (60, 17), (3, 400)])
def test_the_tower_is_what_section_9_says(tower, height, width):
    """Sizes that fill the last places in part, and one row and one column of places."""
    image = tower.patch(picture(height, width))
    found = tower.embed(image)
    expected = reference(image.patches, image.grid)
    assert found.shape == expected.shape == (image.grid.num_tokens, 48)
    torch.testing.assert_close(found.double(), expected, rtol=1e-4, atol=1e-4)


def test_chunks_of_queries_change_little_and_threads_nothing(tower, monkeypatch):
    image = tower.patch(picture(60, 50))
    whole, before = tower.embed(image), torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        assert torch.equal(tower.embed(image), whole)
    finally:
        torch.set_num_threads(before)
    monkeypatch.setattr(vision_block, "_SCORES", 4 * 7 * len(image.patches))
    torch.testing.assert_close(tower.embed(image), whole, rtol=1e-4, atol=1e-4)


def test_a_whole_checkpoint_is_taken(cpu_library):
    raw = raw_config()
    source = TensorsInMemory(whole_tensors(raw), "whole")
    config, operations = DeepseekConfig.from_dict(raw), select_operations(1)
    model = DeepseekModel(config, source, operations, COMPRESSED_IDS)
    DraftModel(model, source)
    with pytest.raises(BrokenModelFile, match="have no use"):
        source.check_all_taken()
    VisionTower(config, source, operations)
    source.check_all_taken()


def test_a_whole_checkpoint_in_the_released_formats_drafts_and_sees(tmp_path, cpu_library):
    """From a folder, with FP8 and FP4 weights: every tensor has a use, and the parts run together."""
    raw = raw_config(hidden_size=64, moe_intermediate_size=32, q_lora_rank=32, o_lora_rank=32)
    plain = tmp_path / "plain"
    plain.mkdir()
    (plain / "config.json").write_text(json.dumps(raw))
    save_file(whole_tensors(raw), plain / "model.safetensors")
    convert(plain, tmp_path / "released")
    source, operations = open_checkpoint(tmp_path / "released"), select_operations(1)
    config = DeepseekConfig.from_dict(source.folder.config)
    model = DeepseekModel(config, source, operations, COMPRESSED_IDS)
    drafts, tower = DraftModel(model, source), VisionTower(config, source, operations)
    source.check_all_taken()
    image = tower.patch(picture(30, 40))
    ids, starts = place_images([7, IMAGE, 8, 9], IMAGE, [image.grid.num_tokens])
    rows, tap, context = [SequenceRows(0, range(4), 0, len(ids))], drafts.tap(), drafts.new_cache(1)
    images = image_rows(rows, [[ImageSpan(starts[0], tower.embed(image))]])
    hidden = model.forward(torch.tensor(ids), rows, model.new_cache(4, 16, 1), tap, images)
    drafts.write(context, tap)
    newest = int(model.head(hidden[-1:]).argmax())
    proposal = drafts.propose(context, [Anchor(0, newest, len(ids))])
    assert proposal.token_ids.shape == (1, 5)
    assert proposal.logits.isfinite().all()
    model.close()


@pytest.fixture(scope="module", params=[Quantisation(), Quantisation.off()], ids=["released", "float32"])
def model(request, cpu_library):
    return DeepseekModel(config_of(request.param), RandomTensors(), select_operations(1), COMPRESSED_IDS)


def prompt_with_images(tower, before=9, between=4, after=15):
    """Ids and spans of a text with two images."""
    images = [tower.patch(picture(30, 40, 1)), tower.patch(picture(50, 14, 2))]
    ids = [*text(before, 1), IMAGE, *text(between, 2), IMAGE, *text(after, 3)]
    placed, starts = place_images(ids, IMAGE, [i.grid.num_tokens for i in images])
    return placed, [ImageSpan(s, tower.embed(i)) for s, i in zip(starts, images, strict=True)]


def run(model, ids, spans, chunk, observer=None):
    cache, parts = model.new_cache(-(-len(ids) // 16), 16, 1), []
    for start in range(0, len(ids), chunk):
        part = ids[start : start + chunk]
        rows = [SequenceRows(0, range(cache.num_blocks), start, len(part))]
        images = image_rows(rows, [spans])
        parts.append(model.forward(torch.tensor(part), rows, cache, observer, images))
    return torch.cat(parts)


@pytest.mark.parametrize("chunk", [1, 7, 32])
def test_text_and_images_in_chunks_give_the_bits_of_the_full_pass(model, tower, chunk):
    ids, spans = prompt_with_images(tower)
    full = run(model, ids, spans, len(ids))
    assert torch.equal(run(model, ids, spans, chunk), full)
    assert not torch.equal(run(model, ids, [], len(ids)), full)


def test_images_of_several_sequences_in_one_step(model, tower):
    first, second = prompt_with_images(tower), prompt_with_images(tower, 3, 1, 2)
    cache = model.new_cache(16, 16, 2)
    parts = {0: [], 1: []}
    for start in range(0, 90, 30):
        rows, step_ids, spans = [], [], []
        for slot, (ids, of_sequence) in enumerate((first, second)):
            count = min(30, len(ids) - start)
            if count > 0:
                rows.append(SequenceRows(slot, range(8 * slot, 8 * slot + 8), start, count))
                step_ids += ids[start : start + count]
                spans.append(of_sequence)
        if rows:
            hidden = model.forward(torch.tensor(step_ids), rows, cache, None, image_rows(rows, spans))
            for row, piece in zip(rows, hidden.split([r.count for r in rows]), strict=True):
                parts[row.slot].append(piece)
    for slot, (ids, spans) in enumerate((first, second)):
        assert torch.equal(torch.cat(parts[slot])[: len(ids)], run(model, ids, spans, len(ids))[:90])


def test_embeddings_take_the_place_of_the_placeholders_before_the_streams_are_copied(model, tower):
    """Images whose values are the placeholder's own embedding change no bit."""
    ids, spans = prompt_with_images(tower)
    same = model.embed(torch.tensor([IMAGE]))
    spans = [ImageSpan(s.start, same.expand(len(s.values), -1)) for s in spans]
    assert torch.equal(run(model, ids, spans, len(ids)), run(model, ids, [], len(ids)))


def test_image_rows_are_routed_by_their_own_bias(tower, cpu_library):
    """With both biases equal the rows say something else; text before the image says the same."""
    ids, spans = prompt_with_images(tower)
    source = RandomTensors()

    class OneBias(RandomTensors):
        def take(self, name, shape):
            return super().take(name.replace("bias_vl", "bias"), shape)

    hidden = [
        run(DeepseekModel(config_of(), s, select_operations(1), COMPRESSED_IDS), ids, spans, len(ids))
        for s in (source, OneBias())
    ]
    assert torch.equal(hidden[0][:9], hidden[1][:9])
    assert not torch.equal(hidden[0][9 : spans[0].stop], hidden[1][9 : spans[0].stop])


def test_an_image_shuts_engram_and_breaks_its_look_backs(model, tower):
    """The streams behind the first Engram layer: the text before an image does not matter behind it.

    Layer 0 has a window of 8 positions and the span is longer, so nothing else carries it that far.
    """
    ids, spans = prompt_with_images(tower)
    changed = [*text(9, 7), *ids[9:]]
    streams = []
    for one in (ids, changed):
        seen = Recorder()
        run(model, one, spans, len(one), seen)
        streams.append(seen.streams[1][0].x)
    behind = spans[0].stop
    assert behind - 9 > 2 * 8
    assert torch.equal(streams[0][behind - 1 :], streams[1][behind - 1 :])
    assert not torch.equal(streams[0][:9], streams[1][:9])


def test_placeholders_and_images_must_agree():
    assert place_images([7, IMAGE, 8], IMAGE, [3]) == ([7, IMAGE, IMAGE, IMAGE, 8], [1])
    for ids, lengths in (([7, IMAGE, IMAGE], [4]), ([7], [4])):
        with pytest.raises(InvalidRequest, match=r"image placeholders, expected 1, one an image"):
            place_images(ids, IMAGE, lengths)


@given(
    st.lists(st.tuples(st.integers(0, 5), st.integers(1, 9)), max_size=4),
    st.integers(1, 20),
    st.integers(0, 5),
)
@settings(max_examples=60, deadline=None)
def test_every_position_of_a_span_is_filled_once_whatever_the_chunks(spans, chunk, after):
    ids, made = [], []
    for gap, count in spans:
        ids += [9] * gap
        made.append(ImageSpan(len(ids), len(ids) + torch.arange(count)[:, None].float()))
        ids += [IMAGE] * count
    ids += [9] * after
    filled = {}
    for start in range(0, len(ids), chunk):
        rows = [SequenceRows(0, (), start, min(chunk, len(ids) - start)), SequenceRows(1, (), 0, 3)]
        found = image_rows(rows, [made, [ImageSpan(1, torch.full((1, 1), -1.0))]])
        assert found.values[-1] == -1
        assert found.rows[-1] == rows[0].count + 1
        for row, value in zip(found.rows[:-1].tolist(), found.values[:-1, 0].tolist(), strict=True):
            filled[start + row] = value
    assert filled == {i: float(i) for i, token in enumerate(ids) if token == IMAGE}
