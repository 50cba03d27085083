"""Names of weights and of what computes with them: equal where hand-offs and cached blocks of one worker fit
another."""

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from engine.gguf_file import GgufFile
from kernels.operations import Operations, numerics_name

_SAMPLED_BYTES = 4096  # from each end of a tensor


def of_gguf(config: object, operations: Operations, file: GgufFile) -> str:
    """A hash of the shape, of the numerics, and of each tensor's name, shape, format and both ends.

    Neither the file's name nor what it says of itself takes part. A training changes every matrix, and added
    tokens the end of one; reading all of a large file would cost more than loading it.
    """
    digest = _digest(config, operations)
    for name, tensor in sorted(file.tensors.items()):
        digest.update(f"{name} {tensor.shape} {tensor.format}".encode())
        data = tensor.data.reshape(-1)
        count = _SAMPLED_BYTES // data.itemsize
        digest.update(data[:count].tobytes() + data[-count:].tobytes())
    return digest.hexdigest()


def of_folder(config: object, operations: Operations, shards: Mapping[str, Path]) -> str:
    """A hash of shape, numerics, and each tensor's name, shape, type and both ends, in whatever file.

    `shards`: the file of each stored tensor.
    """
    digest = _digest(config, operations)
    tensors = {shard: _stored(shard) for shard in set(shards.values())}
    for name, shard in sorted(shards.items()):
        stored = tensors[shard][name]
        digest.update(f"{name} {stored.about}".encode())
        with shard.open("rb") as stream:
            for at in (stored.first, max(stored.last - _SAMPLED_BYTES, stored.first)):
                stream.seek(at)
                digest.update(stream.read(min(_SAMPLED_BYTES, stored.last - at)))
    return digest.hexdigest()


def _digest(config: object, operations: Operations) -> "hashlib.blake2b":
    return hashlib.blake2b(f"{numerics_name(operations)} {config!r}".encode(), digest_size=12)


@dataclass(frozen=True, slots=True)
class _Stored:
    """A tensor's bytes in its file."""

    about: str  # shape and type
    first: int
    last: int


def _stored(shard: Path) -> dict[str, _Stored]:
    """From the file's header: eight bytes of length, then JSON (the format's description)."""
    with shard.open("rb") as stream:
        length = int.from_bytes(stream.read(8), "little")
        header: dict[str, Any] = json.loads(stream.read(length))
    header.pop("__metadata__", None)
    return {
        name: _Stored(f"{t['shape']} {t['dtype']}", *(8 + length + int(at) for at in t["data_offsets"]))
        for name, t in header.items()
    }
