"""Folders in other formats: the same values there and back, whole or not at all."""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from tiny_deepseek import TINY, random_weights, write_folder
from torch import Tensor

from engine.checkpoint.conversion import Progress, convert
from engine.checkpoint.entries import Format
from engine.checkpoint.folder import open_folder
from engine.checkpoint.source import open_checkpoint
from protocol.errors import InvalidInput, ResourceShortage


def values(folder: Path) -> dict[str, Tensor]:
    source = open_checkpoint(folder)
    return {entry.name: source.take(entry.name, entry.shape) for entry in source.family.entries}


def equal(one: dict[str, Tensor], other: dict[str, Tensor]) -> bool:
    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


def names_of(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def test_a_release_goes_to_float32_and_bfloat16_and_back(tiny: Path, tmp_path: Path) -> None:
    released = tmp_path / "released"
    convert(tiny, released)
    for format_ in ("f32", "bf16"):
        convert(released, tmp_path / format_, dense=format_, experts=format_)
        assert equal(values(released), values(tmp_path / format_))
        convert(tmp_path / format_, tmp_path / f"{format_}-back")
        assert equal(values(released), values(tmp_path / f"{format_}-back"))


def test_a_release_has_the_released_formats(tiny: Path, tmp_path: Path) -> None:
    convert(tiny, tmp_path / "released")
    folder = open_folder(tmp_path / "released")
    dtypes = {name: tensor.dtype for name, tensor in folder.tensors.items()}
    assert dtypes["layers.0.attn.wq_a.weight"] == "F8_E4M3"
    assert dtypes["layers.0.attn.wq_a.scale"] == "F8_E8M0"
    assert dtypes["layers.0.ffn.experts.0.w1.weight"] == "I8"
    assert dtypes["layers.0.ffn.shared_experts.w1.weight"] == "F8_E4M3"
    assert dtypes["layers.1.engram.embed.weight"] == "F8_E4M3"
    assert dtypes["layers.1.engram.embed.scale"] == "F8_E8M0"
    assert dtypes["norm.weight"] == dtypes["embed.weight"] == "BF16"
    assert dtypes["layers.0.hc_attn_fn"] == "F32"
    assert folder.config["quantization_config"] == {
        "quant_method": "fp8", "activation_scheme": "dynamic", "weight_block_size": [32, 32],
        "scale_fmt": "ue8m0", "expert_dtype": "fp4",
    }  # fmt: skip


@pytest.mark.parametrize("dense", ["fp8", "bf16", "f32"])
@pytest.mark.parametrize("experts", ["fp4", "fp8", "bf16"])
def test_every_pair_of_formats_is_read_back(
    tiny: Path, tmp_path: Path, dense: Format, experts: Format
) -> None:
    done = convert(tiny, tmp_path / "out", dense=dense, experts=experts)
    assert len(open_folder(tmp_path / "out").tensors) == done.num_tensors
    original, now = values(tiny), values(tmp_path / "out")
    assert original.keys() == now.keys()
    error = max((now[n] - t).abs().max() / t.abs().max() for n, t in original.items() if "experts.0" in n)
    assert error < (0.2 if experts == "fp4" else 1 / 16)


def test_the_golden_tables_lose_their_scales_and_no_bit(tmp_path: Path) -> None:
    golden = Path(__file__).parents[3] / "data" / "v41_golden" / "a"
    convert(golden, tmp_path / "out", dense="f32", experts="f32")
    assert equal(values(golden), values(tmp_path / "out"))


def test_shards_are_of_the_size_asked_for_and_all_in_the_index(tiny: Path, tmp_path: Path) -> None:
    convert(tiny, tmp_path / "out", dense="f32", experts="f32", shard_bytes=400_000)
    names = names_of(tmp_path / "out")
    shards = [name for name in names if name.endswith(".safetensors")]
    assert len(shards) > 2
    assert shards[0] == f"model-00001-of-{len(shards):05}.safetensors"
    sizes = [sum(t.nbytes for t in load_file(tmp_path / "out" / name).values()) for name in shards]
    assert max(sizes) <= 400_000
    index = json.loads((tmp_path / "out" / "model.safetensors.index.json").read_text())
    assert set(index["weight_map"].values()) == set(shards)
    total = sum(tensor.nbytes for tensor in values(tmp_path / "out").values())
    assert index["metadata"]["total_size"] == total
    assert equal(values(tiny), values(tmp_path / "out"))


def test_what_goes_with_the_weights_is_copied(tiny: Path, tmp_path: Path) -> None:
    (tiny / "encoding").mkdir()
    (tiny / "encoding" / "encoding.py").write_text("TOOLS_TEMPLATE = ''")
    (tiny / "tokenizer.json").write_text("{}")
    (tiny / "notes.txt").write_text("of the source alone")
    convert(tiny, tmp_path / "out")
    assert names_of(tmp_path / "out") == ["config.json", "encoding", "model.safetensors", "tokenizer.json"]


def test_progress_counts_every_weight(tiny: Path, tmp_path: Path) -> None:
    seen: list[Progress] = []
    convert(tiny, tmp_path / "out", report=seen.append)
    assert [step.num_done for step in seen] == list(range(1, len(values(tiny)) + 1))
    assert seen[-1].num_weights == len(seen)


def test_a_target_that_exists_is_left_alone(tiny: Path, tmp_path: Path) -> None:
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "mine").write_text("")
    with pytest.raises(InvalidInput, match="out exists"):
        convert(tiny, tmp_path / "out")
    assert names_of(tmp_path) == ["out", "tiny"]
    assert names_of(tmp_path / "out") == ["mine"]


class Interruption(BaseException): ...


@pytest.mark.parametrize("fault", [Interruption, OSError])
def test_a_broken_run_leaves_nothing(tiny: Path, tmp_path: Path, fault: type[BaseException]) -> None:
    def report(progress: Progress) -> None:
        if progress.num_done == 50:
            raise fault

    with pytest.raises(fault):
        convert(tiny, tmp_path / "out", shard_bytes=10_000, report=report)
    assert names_of(tmp_path) == ["tiny"]


def test_a_disk_that_refuses_is_named(tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("engine.checkpoint.folder_writer.save_file", refuse)
    with pytest.raises(ResourceShortage, match=r"out: cannot be written: .*No space left"):
        convert(tiny, tmp_path / "out")
    assert names_of(tmp_path) == ["tiny"]


def test_experts_that_do_not_fill_groups_are_refused_at_once(tmp_path: Path) -> None:
    golden = Path(__file__).parents[3] / "data" / "v41_golden" / "a"
    with pytest.raises(
        InvalidInput, match=r"experts fp4: rows of .* have 48 values, expected a multiple of 32"
    ):
        convert(golden, tmp_path / "out")
    assert names_of(tmp_path) == []


def test_a_weight_that_is_no_number_is_named(tmp_path: Path) -> None:
    weights = random_weights(TINY)
    weights["layers.0.attn.wq_a.weight"][3, 3] = float("nan")
    folder = write_folder(tmp_path / "source", TINY, weights)
    with pytest.raises(InvalidInput, match=r"'layers\.0\.attn\.wq_a\.weight': a value is infinite or not"):
        convert(folder, tmp_path / "out")
    assert names_of(tmp_path) == ["source"]


def test_a_table_is_converted_in_stretches(
    tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    convert(tiny, tmp_path / "whole")
    monkeypatch.setattr("engine.checkpoint.conversion._ROWS_AT_ONCE", 7)
    convert(tiny, tmp_path / "stretches")
    assert equal(values(tmp_path / "whole"), values(tmp_path / "stretches"))
