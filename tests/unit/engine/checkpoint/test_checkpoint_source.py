"""Folders as a model reads them: right values in every naming, and each fault by name."""

import json
import shutil
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tiny_deepseek import TINY, TINY_TEXT, random_weights, write_folder
from torch import Tensor

from engine import load_model
from engine.checkpoint.parts import Part
from engine.checkpoint.source import CheckpointSource, MappedRows, open_checkpoint
from engine.errors import BrokenModelFile
from engine.model.tensor_source import RowsInMemory, RowSource, TensorSource

GOLDEN = Path(__file__).parents[3] / "data" / "v41_golden"


def take_all(source: CheckpointSource) -> dict[str, Tensor]:
    return {e.name: source.take(e.name, e.shape) for e in source.family.entries if e.name in source}


def test_a_folder_in_shards_gives_what_was_written(tiny: Path) -> None:
    source: TensorSource = open_checkpoint(tiny)
    assert isinstance(source, RowSource)
    taken = take_all(source)
    assert taken.keys() == random_weights(TINY).keys()
    assert all(torch.equal(taken[name], tensor) for name, tensor in random_weights(TINY).items())
    source.check_all_taken()


def test_one_file_is_open_at_a_time(tiny: Path) -> None:
    source = open_checkpoint(tiny)
    taken = take_all(source)
    maps = Path("/proc/self/maps").read_text()
    assert sum(f"shard-{shard}.safetensors" in maps for shard in range(3)) <= 1
    assert len(taken) > 100


@pytest.mark.parametrize("golden", ["a", "b"])
def test_golden_folders_are_read_by_their_list_of_names(golden: str) -> None:
    source = open_checkpoint(GOLDEN / golden)
    taken = take_all(source)
    source.check_all_taken()
    assert all(tensor.dtype == torch.float32 for tensor in taken.values())
    assert "layers.0.attn.wq_a.weight" in taken
    assert not np.array_equal(taken["layers.0.attn_norm.weight"], taken["layers.1.attn_norm.weight"])


def test_what_is_left_is_named(tiny: Path) -> None:
    source = open_checkpoint(tiny)
    with pytest.raises(BrokenModelFile, match="tensors have no use in this model: 'aligner"):
        source.check_all_taken()


def test_a_shape_that_the_model_does_not_expect_is_named(tiny: Path) -> None:
    source = open_checkpoint(tiny)
    with pytest.raises(BrokenModelFile, match=r"has shape \[64, 64\], expected \[64, 32\]"):
        source.take("embed.weight", (64, 32))
    with pytest.raises(BrokenModelFile, match="no tensor 'embed"):
        source.take("embed.bias", (64,))


def test_a_part_takes_its_experts_only(tiny: Path) -> None:
    source = open_checkpoint(tiny, Part(frozenset({1}), frozenset({0}), encoder_only=True))
    taken = take_all(source)
    source.check_all_taken()
    assert "layers.0.ffn.experts.1.w1.weight" in taken
    assert "layers.0.ffn.experts.0.w1.weight" not in taken
    assert "layers.0.ffn.shared_experts.w1.weight" in taken
    assert "layers.3.attn.compressor.wkv.weight" in taken
    assert "layers.3.attn.wq_a.weight" not in taken
    with pytest.raises(BrokenModelFile, match="not of this worker's part"):
        source.take("layers.0.ffn.experts.0.w1.weight", (32, 64))


def test_a_part_does_not_miss_what_it_leaves_out(tmp_path: Path) -> None:
    part = Part(frozenset({1}), frozenset({0}))
    weights = {name: tensor for name, tensor in random_weights(TINY).items() if part.holds(name, 3)}
    folder = write_folder(tmp_path / "part", TINY, weights)
    open_checkpoint(folder, part)
    with pytest.raises(BrokenModelFile, match=r"'layers.0.ffn.experts.0.w1.weight' is missing.*and \d+ more"):
        open_checkpoint(folder)


def test_a_table_is_read_row_by_row_from_its_file(tiny: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    name, shape = "layers.1.engram.embed.weight", (120, 64)
    assert isinstance(open_checkpoint(tiny).take_rows(name, shape), RowsInMemory)
    monkeypatch.setattr("engine.checkpoint.source._TABLE_IN_MEMORY_BYTES", 0)
    table = open_checkpoint(tiny).take_rows(name, shape)
    assert isinstance(table, MappedRows)
    ids = torch.tensor([7, 0, 99, 7])
    assert torch.equal(table.rows(ids), random_weights(TINY)[name][ids])


Change = Callable[[dict[str, Tensor]], None]
Tampered = Callable[[Change], Path]


def replace(name: str, tensor: Tensor | None) -> Change:
    def change(weights: dict[str, Tensor]) -> None:
        weights.pop(name, None)
        if tensor is not None:
            weights[name] = tensor

    return change


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (replace("norm.weight", None), r"'norm.weight' is missing, expected shape \[64\]"),
        (replace("norm.weight", torch.ones(63)), r"'norm.weight' has shape \[63\], expected \[64\]"),
        (replace("norm.bias", torch.ones(64)), "1 tensors have no use in this model: 'norm.bias'"),
        (
            replace("norm.weight", torch.ones(64).double()),
            "'norm.weight' is F64, expected F32 or BF16 or F16",
        ),
        (replace("head.weight", torch.ones(64, 64).to(torch.float8_e4m3fn)), "'head.weight' is F8_E4M3"),
        (
            replace("layers.0.attn.wq_a.weight", torch.ones(32, 64).to(torch.float8_e4m3fn)),
            r"'layers.0.attn.wq_a.scale' is missing, expected shape \[1, 2\]",
        ),
        (
            replace("layers.0.ffn.experts.0.w1.weight", torch.ones(32, 64, dtype=torch.int8)),
            r"has shape \[32, 64\], expected \[32, 32\]",
        ),
    ],
)
def test_each_fault_is_named(tampered: Tampered, change: Change, message: str) -> None:
    with pytest.raises(BrokenModelFile, match=message):
        open_checkpoint(tampered(change))


def test_scales_of_another_shape_are_named(tampered: Tampered) -> None:
    def change(weights: dict[str, Tensor]) -> None:
        weights["layers.0.attn.wq_a.weight"] = torch.ones(32, 64).to(torch.float8_e4m3fn)
        weights["layers.0.attn.wq_a.scale"] = torch.ones(2, 2).to(torch.float8_e8m0fnu)

    with pytest.raises(BrokenModelFile, match=r"wq_a.scale' has shape \[2, 2\], expected \[1, 2\]"):
        open_checkpoint(tampered(change))


def test_a_truncated_file_is_named(tiny: Path) -> None:
    shard = tiny / "shard-1.safetensors"
    shard.write_bytes(shard.read_bytes()[:-1])
    with pytest.raises(BrokenModelFile, match=r"shard-1\.safetensors: not a whole safetensors file"):
        open_checkpoint(tiny)


@pytest.mark.parametrize("content", [b"", b"\0" * 7, b"\xff" * 16, b"\2\0\0\0\0\0\0\0[]"])
def test_a_file_that_is_none_is_named(tiny: Path, content: bytes) -> None:
    (tiny / "shard-0.safetensors").write_bytes(content)
    with pytest.raises(BrokenModelFile, match=r"shard-0\.safetensors"):
        open_checkpoint(tiny)


def test_a_shard_that_is_not_there_is_named(tiny: Path) -> None:
    (tiny / "shard-2.safetensors").unlink()
    with pytest.raises(BrokenModelFile, match=r"'shard-2\.safetensors' with \d+ tensors is not there"):
        open_checkpoint(tiny)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"norm.weight": None}, "is in it, and not in the index"),
        ({"more.weight": "shard-0.safetensors"}, "'more.weight' is not in it"),
        ({"norm.weight": "../other/shard-0.safetensors"}, "is not a name in this folder"),
        ({"norm.weight": 3}, "file 3 of tensor"),
    ],
)
def test_an_index_that_is_wrong_is_named(tiny: Path, change: dict[str, object], message: str) -> None:
    path = tiny / "model.safetensors.index.json"
    names = json.loads(path.read_text())["weight_map"] | change
    path.write_text(json.dumps({"weight_map": {k: v for k, v in names.items() if v is not None}}))
    with pytest.raises(BrokenModelFile, match=message):
        open_checkpoint(tiny)


@pytest.mark.parametrize(
    ("file", "content", "message"),
    [
        ("config.json", "{", r"config\.json: no JSON"),
        ("config.json", "[]", r"config\.json: list, expected an object"),
        ("model.safetensors.index.json", "{}", "'weight_map' is None"),
        ("names.json", '{"a": 3}', r"names\.json: expected an object"),
    ],
)
def test_a_broken_companion_is_named(tiny: Path, file: str, content: str, message: str) -> None:
    (tiny / file).write_text(content)
    with pytest.raises(BrokenModelFile, match=message):
        open_checkpoint(tiny)


@settings(deadline=None, max_examples=40)
@given(data=st.data())
def test_no_damage_to_a_file_gets_past(tmp_path_factory: pytest.TempPathFactory, data: st.DataObject) -> None:
    """Bytes of a shard's header, its index or its config changed: an error of ours, or tensors to read."""
    folder = tmp_path_factory.mktemp("damaged") / "tiny"
    write_folder(folder, TINY, random_weights(TINY), shards=2)
    name = data.draw(st.sampled_from(["config.json", "model.safetensors.index.json", "shard-0.safetensors"]))
    content = bytearray((folder / name).read_bytes())
    for at in data.draw(st.lists(st.integers(0, min(len(content), 3000) - 1), min_size=1, max_size=3)):
        content[at] = data.draw(st.integers(0, 255))
    (folder / name).write_bytes(content)
    with suppress(BrokenModelFile):
        take_all(open_checkpoint(folder))
    shutil.rmtree(folder)


def test_an_empty_folder_is_named(tmp_path: Path) -> None:
    with pytest.raises(BrokenModelFile, match=r"config\.json: No such file"):
        open_checkpoint(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps(TINY))
    with pytest.raises(BrokenModelFile, match=r"neither model\.safetensors nor"):
        open_checkpoint(tmp_path)


def test_a_width_that_fills_no_group_is_refused_unless_caches_are_float32(tmp_path: Path) -> None:
    without = {"engram_layer_ids": [], "engram_num_embeddings": [], "num_nextn_predict_layers": 0}
    config = TINY | {
        "text_config": TINY_TEXT | without | {"head_dim": 48, "compress_ratios": [0, 2, 2, 1, 1, 1]}
    }
    folder = write_folder(tmp_path / "model", config, random_weights(config))
    with pytest.raises(BrokenModelFile, match=r"head_dim' is 48, .* multiple of 32, .* or caches='float32'"):
        load_model(str(folder), threads=1)
    assert load_model(str(folder), threads=1, caches="float32").logits([4, 5]).isfinite().all()
