"""A training's checkpoint: weights, the optimiser's state, the plan and where it stands, in one file."""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from engine.errors import BrokenModelFile
from engine.training.optimiser import Optimiser
from engine.training.parameters import Parameters
from engine.training.tensor_file import read_tensors, read_words, write_tensors
from protocol.errors import InvalidInput

_PROGRESS, _PLAN = "progress", "plan"
Fields = Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Weights:
    """What a checkpoint has learnt, for whoever does not go on from it."""

    parameters: Parameters
    progress: dict[str, Any]


def save(file: Path, parameters: Parameters, optimiser: Optimiser, progress: Fields, plan: Fields) -> None:
    """`load` goes on from it bit for bit; the last one stays whole until this one is."""
    tensors = {f"p:{name}": tensor.detach() for name, tensor in parameters.items()}
    tensors |= {f"s:{name}": tensor for name, tensor in optimiser.state.items()}
    file.parent.mkdir(parents=True, exist_ok=True)
    words = {_PROGRESS: json.dumps(dict(progress)), _PLAN: json.dumps(dict(plan))}
    write_tensors(file, tensors, words)


def progress_of(file: Path) -> dict[str, Any] | None:
    """What `load` would return, from the file's header alone."""
    return json.loads(read_words(file)[_PROGRESS]) if file.exists() else None


def weights_of(file: Path) -> Weights | None:
    """None where there is no file."""
    if not file.exists():
        return None
    tensors, words = read_tensors(file)
    parameters = {name[2:]: tensor for name, tensor in tensors.items() if name.startswith("p:")}
    return Weights(parameters, json.loads(words[_PROGRESS]))


@torch.no_grad()
def load(file: Path, parameters: Parameters, optimiser: Optimiser, plan: Fields) -> dict[str, Any] | None:
    """Fills both in place and returns the progress; None where there is no file.

    Raises InvalidInput for a plan that differs, which would change schedule and order of the data unseen,
    and BrokenModelFile where the file is not whole, or its names, shapes and types are not those of this
    model and its optimiser; then both are as they were.
    """
    if not file.exists():
        return None
    check_plan(file, plan)
    tensors, words = read_tensors(file)
    homes = {f"p:{name}": home for name, home in parameters.items()}
    homes |= {f"s:{name}": home for name, home in optimiser.state.items()}
    _check_names(file, homes.keys() - tensors.keys(), tensors.keys() - homes.keys())
    for name, home in homes.items():
        _check_form(file, name, tensors[name], home)
    for name, home in homes.items():
        home.copy_(tensors[name])
    return json.loads(words[_PROGRESS])


def check_plan(file: Path, plan: Fields) -> None:
    """Raises InvalidInput where there is a checkpoint of another plan, by the field that differs."""
    if not file.exists():
        return
    begun: dict[str, Any] = json.loads(read_words(file).get(_PLAN, "{}"))
    for name, value in json.loads(json.dumps(dict(plan))).items():
        if begun.get(name) != value:
            raise InvalidInput(
                f"{file}: its training was begun with {name} {begun.get(name, 'unknown')}, not {value}",
                hint="go on with the same plan, or train in another folder",
            )


def _check_names(file: Path, missing: set[str], surplus: set[str]) -> None:
    for names, what in ((missing, "lacks"), (surplus, "has no use for")):
        if names:
            raise BrokenModelFile(
                f"{file}: {what} {len(names)} tensors of this model and optimiser: {min(names)!r}, …",
                hint="it was written by another version: train in another folder",
            )


def _check_form(file: Path, name: str, found: torch.Tensor, home: torch.Tensor) -> None:
    """To copy would spread a tensor of another shape over its home."""
    if (found.shape, found.dtype) != (home.shape, home.dtype):
        raise BrokenModelFile(
            f"{file}: tensor {name!r} is {found.dtype} {list(found.shape)}, "
            f"expected {home.dtype} {list(home.shape)}",
            hint="train in another folder, or with the plan that it was begun with",
        )
