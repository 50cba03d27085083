"""A training's checkpoint: what is not whole, or has another form, is refused and changes nothing."""

from pathlib import Path

import pytest
import torch

from engine.errors import BrokenModelFile
from engine.training.optimiser import Optimiser
from engine.training.parameters import Parameters
from engine.training.saved import load, progress_of, save, weights_of
from engine.training.tensor_file import read_tensors, write_tensors

PLAN = {"steps": 3}


def fresh(value: float) -> tuple[Parameters, Optimiser]:
    parameters = {"embed.weight": torch.full((4, 6), value), "norm.weight": torch.full((6,), value)}
    return parameters, Optimiser(parameters, weight_decay=0.1)


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    save(tmp_path / "training.safetensors", *fresh(1.0), {"step": 2}, PLAN)
    return tmp_path / "training.safetensors"


def test_it_is_read_back(saved: Path):
    parameters, optimiser = fresh(0.0)
    assert load(saved, parameters, optimiser, PLAN) == {"step": 2}
    assert all(bool((tensor == 1).all()) for tensor in parameters.values())
    assert [file.name for file in saved.parent.iterdir()] == [saved.name]


@pytest.mark.parametrize("other", [torch.ones(1), torch.ones(1, 6), torch.ones(4, 6).double()])
def test_another_form_is_refused_and_nothing_is_loaded(saved: Path, other: torch.Tensor):
    tensors, words = read_tensors(saved)
    write_tensors(saved, tensors | {"p:embed.weight": other}, words)
    parameters, optimiser = fresh(0.0)
    with pytest.raises(BrokenModelFile, match=r"'p:embed\.weight' is .* expected torch\.float32 \[4, 6\]"):
        load(saved, parameters, optimiser, PLAN)
    assert not any(bool(tensor.any()) for tensor in parameters.values())


@pytest.mark.parametrize("read", [weights_of, progress_of, lambda file: load(file, *fresh(0.0), PLAN)])
@pytest.mark.parametrize("keep", [0, 5, 200, -1])
def test_a_truncated_file_is_named(saved: Path, keep: int, read):
    saved.write_bytes(saved.read_bytes()[:keep])
    with pytest.raises(BrokenModelFile, match=r"training\.safetensors: not a whole safetensors file"):
        read(saved)
