"""Named tensors and some words in one file, written whole or not at all: the safetensors format."""

import hashlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import safetensors
from safetensors.torch import load_file, save_file  # pyright: ignore[reportUnknownVariableType]
from torch import Tensor


def write_tensors(file: Path, tensors: Mapping[str, Tensor], words: Mapping[str, str]) -> None:
    """Replaces the file in one step."""
    new = file.with_suffix(".new")
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, new, dict(words))
    new.replace(file)


def read_tensors(file: Path) -> tuple[dict[str, Tensor], dict[str, str]]:
    """All of it, in memory."""
    return load_file(file), read_words(file)


def read_words(file: Path) -> dict[str, str]:
    """The words alone."""
    opened: Any = safetensors.safe_open(file, "pt")
    with opened:
        return opened.metadata() or {}


def digest_of(*files: Path) -> str:
    """Of all their bytes and of their names."""
    digest = hashlib.blake2b(digest_size=12)
    for file in files:
        with file.open("rb") as opened:
            digest.update(file.name.encode() + hashlib.file_digest(opened, "blake2b").digest())
    return digest.hexdigest()
