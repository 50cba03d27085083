"""V4 folders as transformers saves them by default: without drafts, with widths of any kind."""

import json
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file, save_file
from test_gateway_deepseek_v4 import FIELDS

from cli.main import run
from engine.checkpoint.conversion import convert
from engine.checkpoint.description import describe
from engine.errors import BrokenModelFile
from engine.model.registry import load_model

pytest.importorskip("transformers.models.deepseek_v4.modeling_deepseek_v4")
SMALL: dict[str, Any] = {name: value for name, value in FIELDS.items() if name != "num_nextn_predict_layers"}
SMALL |= {"vocab_size": 128, "num_hash_layers": 0, "mlp_layer_types": ["moe"] * 3}


def saved(folder: Path, **fields: Any) -> Path:
    from transformers.models.deepseek_v4.configuration_deepseek_v4 import DeepseekV4Config
    from transformers.models.deepseek_v4.modeling_deepseek_v4 import DeepseekV4ForCausalLM

    DeepseekV4ForCausalLM(DeepseekV4Config(**{**SMALL, **fields})).save_pretrained(folder)
    return folder


def test_drafts_that_a_config_counts_and_nobody_saved_are_left_out_and_told(tmp_path: Path) -> None:
    folder = saved(tmp_path / "v4")
    assert json.loads((folder / "config.json").read_text())["num_nextn_predict_layers"] == 1
    with pytest.warns(UserWarning, match="no draft block"):
        model = load_model(str(folder), threads=1)
    assert model.logits([1, 2, 3]).shape == (3, 128)
    model.close()
    (note,) = describe(str(folder)).notes
    assert "no draft block" in note
    convert(folder, tmp_path / "out")
    assert json.loads((tmp_path / "out" / "config.json").read_text())["num_nextn_predict_layers"] == 0
    load_model(str(tmp_path / "out"), threads=1).close()


@pytest.mark.parametrize("name", ["model.mtp.0.e_proj.weight", "mtp.0.hnorm.weight"])
def test_a_folder_with_a_part_of_a_draft_is_not_whole(tmp_path: Path, name: str) -> None:
    folder = saved(tmp_path / "v4")
    tensors = load_file(folder / "model.safetensors")
    shape = (64, 64) if "proj" in name else (64,)
    save_file({**tensors, name: tensors["lm_head.weight" if "lm_head.weight" in tensors else "head.weight"]
               .new_zeros(shape)}, folder / "model.safetensors")  # fmt: skip
    with pytest.raises(BrokenModelFile, match=r"mtp\.0"):
        load_model(str(folder), threads=1)


def test_info_has_the_caches_that_loading_takes(tmp_path: Path) -> None:
    folder = saved(tmp_path / "v4", num_nextn_predict_layers=0)
    model = load_model(str(folder), threads=1)
    assert describe(str(folder)).caches.bytes_per_token == model.cache_bytes_per_token()
    model.close()
    convert(folder, tmp_path / "released")
    model = load_model(str(tmp_path / "released"), threads=1)
    assert describe(str(tmp_path / "released")).caches.bytes_per_token == model.cache_bytes_per_token()
    model.close()


def test_widths_without_released_caches_are_told_with_the_argument(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = saved(tmp_path / "v4", num_nextn_predict_layers=0, head_dim=64, qk_rope_head_dim=8)
    assert run(["model", "convert", str(folder), str(tmp_path / "out")]) == 0
    assert "caches='float32'" in " ".join(capsys.readouterr().err.split())
    with pytest.raises(BrokenModelFile, match="caches='float32'"):
        load_model(str(tmp_path / "out"), threads=1)
    model = load_model(str(tmp_path / "out"), threads=1, caches="float32")
    found = describe(str(tmp_path / "out"))
    assert found.caches.bytes_per_token == model.cache_bytes_per_token()
    assert "caches='float32'" in found.notes[0]
    model.close()
