"""The training's command: two processes that signals stop on the way end where a run without a stop ends."""

import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
from tiny_place import fresh_place, tiny_corpus

from engine.model.registry import load_model
from engine.training.draft_trainer import CHECKPOINT as DRAFTS
from engine.training.effects import main as effects
from engine.training.nano import BEFORE_LAST_PART, Watch, main
from engine.training.ranks import Ranks
from engine.training.saved import progress_of, weights_of
from engine.training.tensor_file import read_tensors
from engine.training.trainer import CHECKPOINT

ROOT = Path(__file__).parents[4]
TOKENS, STEPS, DRAFT_STEPS = 10_240, 5, 4  # of which the last step is the last part


def command(work: Path, **changed: int) -> list[str]:
    options = {"tokens": TOKENS, "batch-tokens": 1_024, "ranks": 2, "draft-steps": DRAFT_STEPS} | changed
    told = [word for name, value in options.items() for word in (f"--{name}", str(value))]
    return [sys.executable, "-m", "engine.training.nano", "--work", str(work), "--plain", *told]


def run(work: Path, stop_at: str | None = None, **changed: int) -> tuple[int, str]:
    """Its exit status and output. It is asked to stop as soon as it has said `stop_at`."""
    said: list[str] = []
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    with subprocess.Popen(
        command(work, **changed), cwd=ROOT, env=environment, text=True,
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
    ) as process:  # fmt: skip
        assert process.stdout is not None
        for line in process.stdout:
            said.append(line)
            if stop_at is not None and line.startswith(stop_at):
                process.send_signal(signal.SIGTERM)
                stop_at = None
    return process.returncode, "".join(said)


@pytest.fixture(scope="module")
def begun(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("command")
    fresh_place(folder / "begun", tiny_corpus(folder / "library"))
    return folder / "begun"


def copies(begun: Path, names: Sequence[str]) -> list[Path]:
    return [Path(shutil.copytree(begun, begun.parent / name)) for name in names]


def test_a_stopped_command_ends_in_the_bits_of_a_straight_one(
    begun: Path, capsys: pytest.CaptureFixture[str]
):
    """Stopped in the backbone's training, then in the drafts', each time with a checkpoint."""
    straight, stopped = copies(begun, ["straight", "stopped"])
    status, said = run(straight)
    assert status == 0, said
    assert "released" in said

    status, said = run(stopped, stop_at="seen ")
    assert status == 0, said
    assert said.count("stopping behind this step") == 1
    progress = progress_of(stopped / CHECKPOINT)
    assert progress is not None
    assert 0 < progress["steps"] < STEPS
    assert not (stopped / DRAFTS).exists()

    status, said = run(stopped, stop_at="saved")  # which it says behind the backbone's last step
    assert status == 0, said
    assert f"going on after {progress['seen']:,} tokens" in said
    drafts = progress_of(stopped / DRAFTS)
    assert drafts is not None
    assert 0 < drafts["steps"] < DRAFT_STEPS
    assert not (stopped / "released").exists()

    status, said = run(stopped)
    assert status == 0, said
    assert f"going on after {drafts['steps']} steps of the drafts" in said
    for name in (CHECKPOINT, DRAFTS, f"{BEFORE_LAST_PART}/{CHECKPOINT}"):
        (expected, _), (found, _) = read_tensors(straight / name), read_tensors(stopped / name)
        assert expected.keys() == found.keys()
        assert all(torch.equal(tensor, found[name]) for name, tensor in expected.items()), name
    released = [(work / "released" / "model.safetensors").read_bytes() for work in (straight, stopped)]
    assert released[0] == released[1]
    learnt, first = weights_of(straight / CHECKPOINT), weights_of(straight / BEFORE_LAST_PART / CHECKPOINT)
    assert learnt is not None
    assert first is not None
    assert first.progress["steps"] == STEPS - 1
    model = load_model(str(straight / "released"), threads=1)
    assert model.logits([0, 5, 6], last_only=True).isfinite().all()
    model.close()

    for name, before, now in (
        ("tokens", TOKENS, 2 * TOKENS),
        ("draft-steps", DRAFT_STEPS, 9),
        ("ranks", 2, 1),
    ):
        assert main([*command(straight, **{name: now})[3:]]) == 2
        field = "steps" if name == "draft-steps" else name
        assert f"begun with {field} {before}, not {now}" in capsys.readouterr().err


def test_whoever_asks_for_a_stop_waits_for_no_judgement(tmp_path: Path):
    kept = signal.getsignal(signal.SIGTERM)
    try:
        watch = Watch(tmp_path, Ranks(), minutes=60.0)
        signal.raise_signal(signal.SIGTERM)
    finally:
        signal.signal(signal.SIGTERM, kept)
    assert watch.is_over()
    watch.judge(lambda: pytest.fail("judged"))


@pytest.mark.parametrize(
    ("option", "value"),
    [
        ("--tokens", "0"),
        ("--tokens", "-5"),
        ("--batch-tokens", "0"),
        ("--draft-steps", "x"),
        ("--ranks", "0"),
        ("--minutes", "nan"),
        ("--minutes", "-1"),
    ],
)
def test_an_option_that_cannot_be_is_refused_by_its_name(
    option: str, value: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    with pytest.raises(SystemExit, match="2"):
        main(["--work", str(tmp_path / "new"), f"{option}={value}"])
    assert f"argument {option}: {value!r}, expected" in capsys.readouterr().err
    assert not (tmp_path / "new").exists()


def test_a_folder_that_cannot_be_made_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    (tmp_path / "file").touch()
    for place in (tmp_path / "file", tmp_path / "file" / "below"):
        assert main(["--work", str(place)]) == 2
        assert f"work folder {place}: " in capsys.readouterr().err


def test_effects_make_no_folder(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    assert effects(["--work", str(tmp_path / "new")]) == 2
    assert "no checkpoint; train first" in capsys.readouterr().err
    assert not (tmp_path / "new").exists()
