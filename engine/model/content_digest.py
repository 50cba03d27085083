"""A digest of all bytes of a model's weights, for weights that their owner changes in place.

A model's fingerprint samples its files, and weights that were changed in memory have none. Who changes them,
on several workers alike, makes this digest once and gives it to each with the version
(`Engine.update_weights`): workers whose digests are equal take each other's hand-offs and cached blocks.
Tensors may be told in any order and in parts of the model, so shards are read, or come, one after another.
"""

import hashlib
import json
from pathlib import Path

import torch
from torch import Tensor

from engine.errors import InvalidRequest

_PIECE_BYTES = 1 << 20
_DTYPES = {
    torch.float32: "F32", torch.float16: "F16", torch.bfloat16: "BF16", torch.float64: "F64",
    torch.float8_e4m3fn: "F8_E4M3", torch.float8_e5m2: "F8_E5M2", torch.int8: "I8", torch.uint8: "U8",
    torch.int16: "I16", torch.int32: "I32", torch.int64: "I64", torch.bool: "BOOL",
}  # fmt: skip


class ContentDigest:
    """Owned by one thread. Equal for equal names, types, shapes and bytes, wherever they came from."""

    def __init__(self) -> None:
        self._tensors: dict[str, bytes] = {}

    def add(self, name: str, tensor: Tensor) -> None:
        """One tensor, from memory. Raises InvalidRequest for a name that was told, or a type without one."""
        if tensor.dtype not in _DTYPES:
            raise InvalidRequest(f"{name!r}: its type {tensor.dtype} has no name", parameter="weights")
        digest = self._begun(name, _DTYPES[tensor.dtype], list(tensor.shape))
        if tensor.numel():
            data = tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8)
            digest.update(data.numpy().data)
        self._tensors[name] = digest.digest()

    def add_shard(self, path: Path) -> None:
        """All tensors of a safetensors file, a mebibyte at a time. Raises InvalidRequest, OSError."""
        with path.open("rb") as stream:
            length = int.from_bytes(stream.read(8), "little")
            header = json.loads(stream.read(length))
            header.pop("__metadata__", None)
            for name, told in header.items():
                first, last = told["data_offsets"]
                digest = self._begun(name, told["dtype"], told["shape"])
                stream.seek(8 + length + first)
                left = last - first
                while left > 0:
                    piece = stream.read(min(left, _PIECE_BYTES))
                    if not piece:
                        raise InvalidRequest(f"{path}: {name!r} is cut off", parameter="weights")
                    digest.update(piece)
                    left -= len(piece)
                self._tensors[name] = digest.digest()

    def hex(self) -> str:
        """Of all that was told so far: 32 characters. Raises InvalidRequest where that is nothing."""
        if not self._tensors:
            raise InvalidRequest("no tensor was told", parameter="weights")
        whole = hashlib.blake2b(digest_size=16)
        for name, digest in sorted(self._tensors.items()):
            whole.update(name.encode() + b"\0" + digest)
        return whole.hexdigest()

    def _begun(self, name: str, dtype: str, shape: list[int]) -> "hashlib.blake2b":
        if name in self._tensors:
            raise InvalidRequest(f"{name!r} was told before", parameter="weights")
        return hashlib.blake2b(f"{dtype} {shape}".encode(), digest_size=16)
