"""Folders that would wait for ever, that hold no numbers, or that hold a worker's part alone."""

import json
import os
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from tiny_deepseek import TINY, random_weights, write_folder

from engine import load_model
from engine.checkpoint.conversion import convert
from engine.checkpoint.parts import WHOLE, Part
from engine.checkpoint.source import open_checkpoint
from engine.errors import BrokenModelFile
from engine.model.deepseek.serving import DeepseekServed
from protocol.errors import InvalidInput

GOLDEN = Path(__file__).parents[3] / "data" / "v41_golden"
ENCODER = Part(encoder_only=True)
CUT = 3  # of the tiny model


@pytest.mark.parametrize("file", ["model.safetensors", "config.json"])
def test_a_pipe_is_refused_and_not_waited_for(tmp_path: Path, file: str):
    folder = write_folder(tmp_path / "piped", TINY, random_weights(TINY))
    (folder / file).unlink()
    os.mkfifo(folder / file)
    with pytest.raises(BrokenModelFile, match=rf"{file}: not a regular file"):
        open_checkpoint(folder)


@pytest.mark.parametrize("name", ["s" * 5000, "a\0b", ""])
def test_a_shard_of_an_impossible_name_is_not_there(tiny: Path, name: str):
    index = tiny / "model.safetensors.index.json"
    names = json.loads(index.read_text())["weight_map"] | {"norm.weight": name}
    index.write_text(json.dumps({"weight_map": names}))
    with pytest.raises(BrokenModelFile, match=r"is not there|is not a name") as refused:
        open_checkpoint(tiny)
    assert len(refused.value.message) < 1000


@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
@pytest.mark.parametrize(
    "name", ["norm.weight", "layers.2.ffn.experts.1.w2.weight", "layers.1.engram.embed.weight"]
)
def test_a_weight_that_is_no_number_is_refused_by_name(tmp_path: Path, name: str, value: float):
    weights = random_weights(TINY)
    weights[name].view(-1)[-1] = value
    source = open_checkpoint(write_folder(tmp_path / "broken", TINY, weights))
    take = source.take_rows if "embed" in name else source.take
    with pytest.raises(BrokenModelFile, match=f"'{name}' has a value that is infinite"):
        take(name, tuple(weights[name].shape))


@pytest.mark.parametrize("part", ["weight", "scale"])
@pytest.mark.parametrize("prefix", ["layers.0.attn.wq_a", "layers.2.ffn.experts.1.w2"])
def test_bytes_that_stand_for_no_number_are_refused_by_name(
    tiny: Path, tmp_path: Path, prefix: str, part: str
):
    """E8M0's 255, and E4M3's 127 for FP8; each byte of FP4 is two numbers."""
    convert(tiny, tmp_path / "released")
    file = tmp_path / "released" / "model.safetensors"
    tensors = load_file(file)
    tensors[f"{prefix}.{part}"].view(torch.uint8).view(-1)[-1] = 255 if part == "scale" else 127
    save_file(tensors, file)
    source = open_checkpoint(tmp_path / "released")
    shape = next(e.shape for e in source.family.entries if e.name == f"{prefix}.weight")
    if part == "weight" and "experts" in prefix:
        assert source.take(f"{prefix}.weight", shape).isfinite().all()
        return
    with pytest.raises(BrokenModelFile, match=f"'{prefix}.weight' has a value that is infinite"):
        source.take(f"{prefix}.weight", shape)


def split(folder: Path, part: Part, cut: int) -> None:
    """What a part holds in one shard, the rest in another."""
    listed = json.loads((folder / "names.json").read_text()) if (folder / "names.json").exists() else {}
    tensors = load_file(folder / "model.safetensors")
    released = {name: listed.get(name, name).replace(".scale", ".weight") for name in tensors}
    file_of = {name: "held" if part.holds(released[name], cut) else "rest" for name in tensors}
    for file in ("held", "rest"):
        save_file({n: t for n, t in tensors.items() if file_of[n] == file}, folder / file)
    (folder / "model.safetensors").unlink()
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": file_of}))


def test_a_part_needs_its_own_shards_alone(tmp_path: Path):
    folder = write_folder(tmp_path / "part", TINY, random_weights(TINY))
    split(folder, ENCODER, CUT)
    whole = open_checkpoint(folder, ENCODER)
    (folder / "rest").unlink()
    source = open_checkpoint(folder, ENCODER)
    for entry in source.family.entries:
        assert (entry.name in source) == (entry.name in whole) == ENCODER.holds(entry.name, CUT)
    with pytest.raises(BrokenModelFile, match=r"file 'rest' with \d+ tensors is not there"):
        open_checkpoint(folder, WHOLE)
    with pytest.raises(BrokenModelFile, match=r"file 'rest' with tensor '.*', and \d+ more is not there"):
        open_checkpoint(folder, Part(frozenset({0})))


def test_an_encoder_loads_from_its_shards(tmp_path: Path):
    folder = Path(shutil.copytree(GOLDEN / "b", tmp_path / "b"))
    whole = load_model(str(folder), threads=1)
    assert isinstance(whole, DeepseekServed)
    split(folder, ENCODER, open_checkpoint(folder).family.cut)
    (folder / "rest").unlink()
    with pytest.raises(BrokenModelFile, match="is not there"):
        load_model(str(folder), threads=1)
    encoder = load_model(str(folder), threads=1, part=ENCODER)
    assert isinstance(encoder, DeepseekServed)
    assert encoder.text.new_cache(1, 64, 1).num_slots == 1
    for model in (whole, encoder):
        model.close()


def test_what_runs_whole_says_so():
    with pytest.raises(InvalidInput, match=r"part: .* runs whole"):
        load_model("smollm2", threads=1, part=ENCODER)
