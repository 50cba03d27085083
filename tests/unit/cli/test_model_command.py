"""`dockyard model`: published figures without weights, folders converted, and each refusal by name."""

import json
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from cli.main import run

GOLDEN = Path(__file__).parents[2] / "data" / "v41_golden"


def answer(capsys: pytest.CaptureFixture[str], *arguments: str) -> dict[str, Any]:
    assert run(["model", *arguments, "--json"]) == 0
    return json.loads(capsys.readouterr().out.splitlines()[-1])


def said(capsys: pytest.CaptureFixture[str]) -> str:
    return " ".join(capsys.readouterr().err.split())


def test_v41_flash_has_its_published_figures(capsys: pytest.CaptureFixture[str]) -> None:
    found = answer(capsys, "info", "deepseek-v4.1-flash")
    assert found["tensors"] == 96_085
    assert found["cache_bytes_per_token"] == 890.0
    billions = {name: round(value / 1e9, 1) for name, value in found["parameters"].items()}
    assert billions == {"backbone": 551.4, "engram": 196.6, "draft": 14.2, "vision": 0.5, "other": 0.5}
    assert sum(found["parameters"].values()) / 1e9 == pytest.approx(763, abs=0.5)
    assert found["active"]["prefill"] / 1e9 == pytest.approx(8, abs=0.2)
    assert found["active"]["decode"] / 1e9 == pytest.approx(16, abs=0.2)
    assert found["max_positions"] == 1_048_576
    roles = [layer["role"] for layer in found["layers"]]
    assert {role: roles.count(role) for role in roles} == {"window": 2, "full": 4, "reuse": 30, "reindex": 4}
    assert found["layers"][27] == {
        "layer": 27, "role": "reuse", "ratio": 1, "kv_source": 20, "index_source": 24,
    }  # fmt: skip
    assert found["window_bytes"] / 1e6 == pytest.approx(2.70, abs=0.01)
    assert found["draft_window_bytes"] / 1e6 == pytest.approx(0.20, abs=0.01)
    assert found["handoff"]["window_bytes"] / 1e6 == pytest.approx(1.49, abs=0.01)
    assert found["handoff"]["stream_bytes"] / 1e6 == pytest.approx(5.24, abs=0.01)


def test_v4_flash_has_its_published_figures(capsys: pytest.CaptureFixture[str]) -> None:
    found = answer(capsys, "info", "deepseek-v4-flash")
    assert found["cache_bytes_per_token"] == 3514.25
    roles = [layer["role"] for layer in found["layers"]]
    assert {role: roles.count(role) for role in roles} == {"window": 2, "csa": 21, "hca": 20}
    assert found["active"]["decode"] / 1e9 == pytest.approx(13, abs=0.5)


def test_smollm2_is_described_by_its_file(capsys: pytest.CaptureFixture[str]) -> None:
    found = answer(capsys, "info", "smollm2")
    assert found["tensors"] == 272
    assert found["parameters"]["backbone"] == 134_515_008
    assert found["cache_bytes_per_token"] == 2 * 30 * 3 * 64 * 4
    assert found["max_positions"] == 8192


def test_a_folder_is_described_and_its_weights_are_checked(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    found = answer(capsys, "info", str(GOLDEN / "a"))
    assert found["files"] == 1
    assert len(found["layers"]) == 12
    shutil.copy(GOLDEN / "a" / "config.json", tmp_path)
    assert answer(capsys, "info", str(tmp_path)) == found | {"model": str(tmp_path), "files": 0}
    shutil.copy(GOLDEN / "b" / "model.safetensors", tmp_path)
    assert run(["model", "info", str(tmp_path)]) == 2
    assert "BrokenModelFile" in said(capsys)


def test_a_name_without_a_config_says_so(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("engine.checkpoint.description.CONFIGS", ("deepseek-v4-flash", "later"))
    assert run(["model", "info", "later"]) == 2
    assert "'later': this installation has no config of it (known: deepseek-v4-flash, nano, smollm2)" in said(
        capsys
    )


def test_people_read_sizes_and_layers(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["model", "info", "deepseek-v4.1-flash"]) == 0
    text = capsys.readouterr().out
    assert "551.4 billion" in text
    assert "890.00 bytes a token" in text
    rows = [line.split() for line in text.splitlines()]
    assert ["0", "to", "1", "window", "-", "-", "-"] in rows
    assert ["20", "full", "1", "itself", "itself"] in rows
    assert ["37", "to", "39", "reuse", "1", "20", "36"] in rows


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["info", "no-such-model"], "'no-such-model' is neither a folder with a config.json nor a GGUF file"),
        (["info", "deepseek-v5"], "deepseek-v4-flash, deepseek-v4.1-flash"),
        (["convert", "/no/such/folder", "/tmp/no-such-target"], "'/no/such/folder' is neither a file nor a"),
        (["convert", "smollm2", "/tmp/no-such-target"], "is no folder"),
        (["convert", str(GOLDEN / "a"), str(GOLDEN / "b")], "v41_golden/b exists"),
        (["convert", str(GOLDEN / "a"), "/no/such/folder/out", "--experts", "bf16"], "/no/such/folder is no"),
        (["convert", str(GOLDEN / "a"), "/tmp/no-such-target", "--experts", "fp4"], "experts fp4: rows of"),
        (["convert", str(GOLDEN / "a"), "/tmp/no-such-target", "--experts", "fp3"], "fp3"),
    ],
)
def test_what_does_not_fit_is_named(
    arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(["model", *arguments]) == 2
    assert message in said(capsys)


def test_convert_takes_the_names_that_info_takes(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    target = tmp_path / "out"
    done = answer(capsys, "convert", "nano", str(target))
    assert answer(capsys, "info", str(target))["tensors"] == done["tensors"]
    assert (target / "model.safetensors").stat().st_mode & 0o777 == (
        target / "config.json"
    ).stat().st_mode & 0o777


def test_shards_without_their_index_are_said(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "config.json").write_bytes((GOLDEN / "a" / "config.json").read_bytes())
    (tmp_path / "model-00001-of-00002.safetensors").write_bytes(b"")
    assert run(["model", "info", str(tmp_path)]) == 2
    assert "neither model.safetensors nor model.safetensors.index.json" in said(capsys)


def test_convert_says_what_it_wrote(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    target = tmp_path / "out"
    done = answer(capsys, "convert", str(GOLDEN / "a"), str(target), "--experts", "bf16", "--dense", "fp8")
    assert done["experts"] == "bf16"
    assert done["dense"] == "fp8"
    assert answer(capsys, "info", str(target))["tensors"] == done["tensors"]


@pytest.mark.parametrize("command", [[], ["info"], ["convert"]])
def test_help_of_the_model_commands_has_an_example(
    command: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(["model", *command, "--help"]) == 0
    text = capsys.readouterr().out
    assert not command or ("Example: " in text and "--json" in text)


def test_info_brings_no_torch() -> None:
    program = (
        "import sys; from cli.main import run; run(['model', 'info', 'deepseek-v4.1-flash']);"
        "print([name for name in ('torch', 'ray') if name in sys.modules], file=sys.stderr)"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert "96,085" in done.stdout
    assert done.stderr.splitlines()[-1] == "[]"
