"""`dockyard doctor model`: sound models pass, a broken one ends in 1 and names the check."""

import json
from pathlib import Path

import pytest

from cli.main import run
from engine.model.deepseek.attention import LayerKeys
from engine.model.deepseek.step import Step

GOLDEN = Path(__file__).parents[2] / "data" / "v41_golden"


def test_a_sound_model_passes(capsys: pytest.CaptureFixture[str], cpu_library: Path) -> None:
    assert run(["doctor", "model", str(GOLDEN / "a"), "--json"]) == 0
    found = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert found["passed"]
    assert [finding["check"] for finding in found["findings"]] == [
        "encoder output", "bridge written", "bridge placed", "bridge carried", "bridge used",
    ]  # fmt: skip
    assert {stage["stage"] for stage in found["first_token"]["stages"]} == {"encoder", "bridge", "decoder"}
    assert run(["doctor", "model", str(GOLDEN / "a")]) == 0
    assert "likely cause" in capsys.readouterr().out


def test_a_broken_bridge_ends_in_1(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, cpu_library: Path
) -> None:
    def nothing(_: LayerKeys, step: Step, __: object) -> None:
        step.shared.index_keys = {}

    monkeypatch.setattr(LayerKeys, "_write_entries", nothing)
    assert run(["doctor", "model", str(GOLDEN / "a")]) == 1
    said = capsys.readouterr().out
    assert "bridge written" in said
    assert "failed" in said


def test_a_model_that_has_no_bridge_is_refused(capsys: pytest.CaptureFixture[str], cpu_library: Path) -> None:
    assert run(["doctor", "model", "smollm2", "--json"]) == 2
    assert json.loads(capsys.readouterr().out)["error"]["type"] == "InvalidInput"
