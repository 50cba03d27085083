"""The model itself from folders: golden logits, and released formats that change what rounding changes."""

import json
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
import torch
from tiny_deepseek import TINY, random_weights, write_folder
from tokenizers import Tokenizer

from engine import load_model
from engine.checkpoint.conversion import convert
from engine.checkpoint.source import open_checkpoint
from engine.errors import UnknownModel
from engine.model.deepseek.config import DeepseekConfig, Quantisation
from engine.model.deepseek.dspark_context import Anchor
from engine.model.deepseek.engram_hash import compress_ids
from engine.model.deepseek.model import DeepseekModel
from engine.model.registry import load_draft_model, load_vision_tower
from kernels.operations import Profile, select_operations

GOLDEN = Path(__file__).parents[3] / "data" / "v41_golden"


def load(folder: Path, quantisation: Quantisation) -> DeepseekModel:
    source = open_checkpoint(folder)
    compressed = None
    if (folder / "tokenizer.json").exists():
        compressed = compress_ids(Tokenizer.from_file(str(folder / "tokenizer.json")))
    config = DeepseekConfig.from_dict(source.folder.config, quantisation)
    model = DeepseekModel(config, source, select_operations(1), compressed)
    source.check_all_taken()
    return model


@pytest.mark.parametrize(
    ("golden", "quantisation", "tolerance"), [("a", Quantisation(), 1e-3), ("b", Quantisation.off(), 2e-4)]
)
@pytest.mark.parametrize("mapped", [False, True])
def test_golden_logits(
    golden: str, quantisation: Quantisation, tolerance: float, mapped: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With tables in memory, and read row by row from their file by the model's own thread."""
    if mapped:
        monkeypatch.setattr("engine.checkpoint.source._TABLE_IN_MEMORY_BYTES", 0)
    model = load(GOLDEN / golden, quantisation)
    ids = json.loads((GOLDEN / golden / "ids.json").read_text())
    expected = torch.from_numpy(np.load(GOLDEN / golden / "logits.npy"))
    torch.testing.assert_close(model.logits(ids), expected, rtol=0, atol=tolerance)
    model.close()


def test_a_converted_model_says_the_same_from_every_format_that_holds_its_values(
    tiny: Path, tmp_path: Path
) -> None:
    """Released formats, and the float32 and bfloat16 of the same values: equal to the bit."""
    convert(tiny, tmp_path / "released")
    for format_ in ("f32", "bf16"):
        convert(tmp_path / "released", tmp_path / format_, dense=format_, experts=format_)
    ids = list(range(10, 40))
    logits = [text_logits(tmp_path / name, ids) for name in ("released", "f32", "bf16")]
    assert torch.equal(logits[0], logits[1])
    assert torch.equal(logits[0], logits[2])
    assert not torch.equal(logits[0], text_logits(tiny, ids))


def text_logits(folder: Path, ids: list[int]) -> torch.Tensor:
    """Of the tiny model, whose Engram has a table of ids of its own."""
    source = open_checkpoint(folder)
    compressed = torch.arange(64) % TINY["text_config"]["engram_compressed_vocab_size"]
    config = DeepseekConfig.from_dict(source.folder.config)
    model = DeepseekModel(config, source, select_operations(1), compressed)
    return model.logits(ids)


@pytest.mark.parametrize("profile", ["exact", "fast"])
def test_a_loaded_model_gives_its_drafts_and_its_eyes(
    profile: Profile, cpu_library: Path, tmp_path: Path
) -> None:
    without = {"engram_layer_ids": [], "engram_num_embeddings": []}
    config = TINY | {"text_config": TINY["text_config"] | without}
    weights = random_weights(config)
    model = load_model(str(write_folder(tmp_path / "tiny", config, weights)), threads=1, profile=profile)
    drafts, tower = load_draft_model(model), load_vision_tower(model)
    cache = drafts.new_cache(1)
    assert drafts.propose(cache, [Anchor(0, 7, 0)]).logits.isfinite().all()
    image = tower.patch(np.full((16, 16, 3), 100, np.uint8))
    assert tower.embed(image).shape == (image.grid.num_tokens, TINY["text_config"]["hidden_size"])


def test_other_families_have_no_drafts_and_no_eyes(tiny_model: Path) -> None:
    model = load_model(str(tiny_model), threads=1)
    for load in (load_draft_model, load_vision_tower):
        with pytest.raises(UnknownModel, match="LlamaModel"):
            load(model)


def test_mapped_tables_are_read_page_by_page(monkeypatch: pytest.MonkeyPatch) -> None:
    """The kernel says of a mapping that it is advised so: `rr`, random read."""
    monkeypatch.setattr("engine.checkpoint.source._TABLE_IN_MEMORY_BYTES", 0)
    source = open_checkpoint(GOLDEN / "a")
    config = source.family.config
    assert isinstance(config, DeepseekConfig)
    shape = (config.engram_num_embeddings[0], config.engram_head_dim)
    table = source.take_rows("layers.1.engram.embed.weight", shape)
    assert table.rows(torch.tensor([0, 3])).shape == (2, config.engram_head_dim)
    parts = Path("/proc/self/smaps").read_text().split("VmFlags:")
    flags = [
        after.split("\n")[0].split() for before, after in pairwise(parts) if "model.safetensors" in before
    ]
    assert any("rr" in each for each in flags)
