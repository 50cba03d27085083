"""A training's checkpoint: weights, the optimiser's state and where it stands, in one file."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from engine.training.optimiser import Optimiser
from engine.training.parameters import Parameters
from engine.training.tensor_file import read_tensors, read_words, write_tensors

_PROGRESS, _UPDATES = "progress", "num_updates"


def save(file: Path, parameters: Parameters, optimiser: Optimiser, progress: Mapping[str, Any]) -> None:
    """`load` goes on from it bit for bit; the last one stays whole until this one is."""
    tensors = {f"p:{name}": tensor.detach() for name, tensor in parameters.items()}
    tensors |= {f"s:{name}": tensor for name, tensor in optimiser.state.items()}
    file.parent.mkdir(parents=True, exist_ok=True)
    write_tensors(file, tensors, {_PROGRESS: json.dumps({**progress, _UPDATES: optimiser.num_steps})})


def progress_of(file: Path) -> dict[str, Any] | None:
    """What `load` would return, from the file's header alone."""
    if not file.exists():
        return None
    progress: dict[str, Any] = json.loads(read_words(file)[_PROGRESS])
    progress.pop(_UPDATES)
    return progress


@torch.no_grad()
def load(file: Path, parameters: Parameters, optimiser: Optimiser) -> dict[str, Any] | None:
    """Fills both in place and returns the progress; None where there is no file."""
    if not file.exists():
        return None
    tensors, words = read_tensors(file)
    homes = {"p": parameters, "s": optimiser.state}
    for name, tensor in tensors.items():
        kind, _, name_of = name.partition(":")
        homes[kind][name_of].copy_(tensor)
    progress: dict[str, Any] = json.loads(words[_PROGRESS])
    optimiser.num_steps = progress.pop(_UPDATES)
    return progress
