"""Names of weights and of what computes with them: equal where hand-offs and cached blocks of one worker fit
another.

Every byte of every tensor takes part: KV of weights that differ anywhere is wrong, and nothing would tell.
The files have just been read to be loaded, and are read once more for it.
"""

import hashlib
from collections.abc import Mapping
from pathlib import Path

from engine.gguf_file import GgufFile, GgufTensor
from engine.model.content_digest import ContentDigest, Stored, stored_in
from kernels.operations import Operations, numerics_name


def of_gguf(config: object, operations: Operations, file: GgufFile) -> str:
    """A hash of the shape, of the numerics, and of each tensor's name, shape, format and bytes.

    Neither the file's name nor what it says of itself takes part.
    """
    return _of(config, operations, {name: _stored(file.path, t) for name, t in file.tensors.items()})


def of_folder(config: object, operations: Operations, shards: Mapping[str, Path]) -> str:
    """A hash of shape, numerics, and each tensor's name, shape, type and bytes, in whatever file.

    `shards`: the file of each stored tensor.
    """
    tensors = {shard: stored_in(shard) for shard in set(shards.values())}
    return _of(config, operations, {name: tensors[shard][name] for name, shard in shards.items()})


def _stored(path: Path, tensor: GgufTensor) -> Stored:
    stop = tensor.first + tensor.data.nbytes
    return Stored(f"{tensor.format} {tensor.shape}", path, tensor.first, stop)


def _of(config: object, operations: Operations, tensors: Mapping[str, Stored]) -> str:
    content = ContentDigest()
    content.add_stored(tensors)
    about = f"{numerics_name(operations)} {config!r} {content.hex()}"
    return hashlib.blake2b(about.encode(), digest_size=12).hexdigest()
