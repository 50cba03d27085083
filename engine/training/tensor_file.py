"""Named tensors and some words in one file, written whole or not at all: the safetensors format."""

import hashlib
import os
from collections.abc import Generator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import safetensors
from safetensors.torch import load_file, save_file  # pyright: ignore[reportUnknownVariableType]
from torch import Tensor

from engine.errors import BrokenModelFile


def write_tensors(file: Path, tensors: Mapping[str, Tensor], words: Mapping[str, str]) -> None:
    """Replaces the file in one step, once the new one is on the disk itself."""
    new = file.with_suffix(".new")
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, new, dict(words))
    _sync(new)
    new.replace(file)
    _sync(file.parent)


def read_tensors(file: Path) -> tuple[dict[str, Tensor], dict[str, str]]:
    """All of it, in memory. Raises BrokenModelFile where it is not whole."""
    with _whole(file):
        return load_file(file), read_words(file)


def read_words(file: Path) -> dict[str, str]:
    """The words alone. Raises BrokenModelFile where the file is not whole."""
    with _whole(file):
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


@contextmanager
def _whole(file: Path) -> Generator[None]:
    try:
        yield
    except safetensors.SafetensorError as error:
        raise BrokenModelFile(f"{file}: not a whole safetensors file ({error})") from error


def _sync(path: Path) -> None:
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
