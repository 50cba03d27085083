"""A digest of all bytes of a model's weights, whichever files or memory they come from.

A model's fingerprint has one of what it was loaded from. Weights that their owner changes in memory have
none: who changes them, on several workers alike, makes this digest once and gives it to each with the version
(`Engine.update_weights`), and workers whose digests are equal take each other's hand-offs and cached blocks.
Tensors may be told in any order and in parts of the model, so shards are read, or come, one after another.
"""

import hashlib
import json
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from engine.errors import InvalidRequest
from protocol.errors import ResourceShortage
from protocol.ready_threads import ReadyThreads
from protocol.threads import NoThread

_PIECE_BYTES = 1 << 20
_MOST_THREADS = 8  # that read at once: a disk gives more than one processor hashes (1 to 2 GiB/s)
_DTYPES = {
    torch.float32: "F32", torch.float16: "F16", torch.bfloat16: "BF16", torch.float64: "F64",
    torch.float8_e4m3fn: "F8_E4M3", torch.float8_e5m2: "F8_E5M2", torch.int8: "I8", torch.uint8: "U8",
    torch.int16: "I16", torch.int32: "I32", torch.int64: "I64", torch.bool: "BOOL",
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class Stored:
    """A tensor's bytes in a file: from `first` up to `stop`. `about`: its type and shape."""

    about: str
    path: Path
    first: int
    stop: int


class ContentDigest:
    """Owned by one thread. Equal for equal names, types, shapes and bytes, wherever they came from."""

    def __init__(self) -> None:
        self._tensors: dict[str, bytes] = {}

    def add(self, name: str, tensor: Tensor) -> None:
        """One tensor, from memory. Raises InvalidRequest for a name that was told, or a type without one."""
        if tensor.dtype not in _DTYPES:
            raise InvalidRequest(f"{name!r}: its type {tensor.dtype} has no name", parameter="weights")
        self._check_new(name)
        digest = _begun(f"{_DTYPES[tensor.dtype]} {list(tensor.shape)}")
        if tensor.numel():
            data = tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8)
            digest.update(data.numpy().data)
        self._tensors[name] = digest.digest()

    def add_shard(self, path: Path) -> None:
        """All tensors of a safetensors file. Raises InvalidRequest, OSError."""
        self.add_stored(stored_in(path))

    def add_stored(self, tensors: Mapping[str, Stored]) -> None:
        """Tensors by name, from their files, several at once. Raises InvalidRequest, OSError, and
        ResourceShortage where there are no threads for that."""
        for name in tensors:
            self._check_new(name)
        with _readers() as readers:
            self._tensors.update(zip(tensors, readers.map(_digest, tensors, tensors.values()), strict=True))

    def hex(self) -> str:
        """Of all that was told so far: 32 characters. Raises InvalidRequest where that is nothing."""
        if not self._tensors:
            raise InvalidRequest("no tensor was told", parameter="weights")
        whole = hashlib.blake2b(digest_size=16)
        for name, digest in sorted(self._tensors.items()):
            whole.update(name.encode() + b"\0" + digest)
        return whole.hexdigest()

    def _check_new(self, name: str) -> None:
        if name in self._tensors:
            raise InvalidRequest(f"{name!r} was told before", parameter="weights")


def _readers() -> ReadyThreads:
    try:
        return ReadyThreads(min(len(os.sched_getaffinity(0)), _MOST_THREADS), "digests")
    except NoThread as error:
        raise ResourceShortage(f"there are no threads that read the weights: {error}") from error


def stored_in(shard: Path) -> dict[str, Stored]:
    """What a safetensors file says it has: eight bytes of length, then JSON (the format's description)."""
    with shard.open("rb") as stream:
        length = int.from_bytes(stream.read(8), "little")
        header = json.loads(stream.read(length))
    header.pop("__metadata__", None)
    return {
        name: Stored(f"{t['dtype']} {t['shape']}", shard, *(8 + length + int(at) for at in t["data_offsets"]))
        for name, t in header.items()
    }


def _begun(about: str) -> "hashlib.blake2b":
    return hashlib.blake2b(about.encode(), digest_size=16)


def _digest(name: str, stored: Stored) -> bytes:
    """A mebibyte at a time, which no page of the model's own mapping is touched for."""
    digest, left = _begun(stored.about), stored.stop - stored.first
    with stored.path.open("rb", buffering=0) as stream:
        stream.seek(stored.first)
        while left > 0:
            piece = stream.read(min(left, _PIECE_BYTES))
            if not piece:
                raise InvalidRequest(f"{stored.path}: {name!r} is cut off", parameter="weights")
            digest.update(piece)
            left -= len(piece)
    return digest.digest()
