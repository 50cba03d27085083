"""A folder of weights as its files describe it: config, shards, and each tensor's type and shape.

Reads headers alone. The folder is that of Hugging Face: `config.json`, and `model.safetensors` or shards
that `model.safetensors.index.json` names.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol, cast

from safetensors import SafetensorError, safe_open

from engine.checkpoint.entries import StoredTensor
from engine.errors import BrokenModelFile

CONFIG, WEIGHTS, INDEX = "config.json", "model.safetensors", "model.safetensors.index.json"


class _Slice(Protocol):
    def get_shape(self) -> list[int]: ...
    def get_dtype(self) -> str: ...


class _Header(Protocol):
    """What is used of safetensors' file, which has no types. It closes with its last reference."""

    def keys(self) -> list[str]: ...
    def get_slice(self, name: str) -> _Slice: ...


@dataclass(frozen=True, slots=True)
class CheckpointFolder:
    """`tensors` and `shards` (the file of each tensor) are by the name in the files, and so is `absent`: the
    file that is not there of each tensor which the index names.
    """

    path: Path
    config: Mapping[str, object]
    tensors: Mapping[str, StoredTensor]
    shards: Mapping[str, Path]
    absent: Mapping[str, Path]


def open_folder(path: Path, *, partial: bool = False) -> CheckpointFolder:
    """`partial`: shards may be missing, as a worker's part may not need them.

    Raises BrokenModelFile that names the file: missing, truncated, no JSON, or an index that is wrong.
    """
    config = read_config(path)
    tensors: dict[str, StoredTensor] = {}
    shards: dict[str, Path] = {}
    absent: dict[str, Path] = {}
    for shard, expected in _shards(path, partial=partial).items():
        if expected is not None and not _is_there(shard):
            absent |= dict.fromkeys(expected, shard)
            continue
        found = read_header(shard)
        if expected is not None and (difference := found.keys() ^ expected):
            name = min(difference)
            fault = "is not in it" if name in expected else "is in it, and not in the index"
            raise BrokenModelFile(f"{shard}: tensor {name!r} {fault}", hint="download the folder again")
        if twice := tensors.keys() & found.keys():
            raise BrokenModelFile(f"{shard}: tensor {min(twice)!r} is in {shards[min(twice)].name} too")
        tensors |= found
        shards |= dict.fromkeys(found, shard)
    return CheckpointFolder(path, config, tensors, shards, absent)


def read_config(path: Path) -> Mapping[str, object]:
    """The folder's config.json. Raises BrokenModelFile."""
    return _read_json(path / CONFIG)


def read_header(shard: Path) -> dict[str, StoredTensor]:
    """What a safetensors file says it holds; its length must fit. Raises BrokenModelFile."""
    _check_regular(shard)
    try:
        file = cast(_Header, safe_open(shard, framework="np"))
        slices = {name: file.get_slice(name) for name in file.keys()}  # noqa: SIM118 - not a dict
        return {
            name: StoredTensor(name, tuple(piece.get_shape()), piece.get_dtype())
            for name, piece in slices.items()
        }
    except (SafetensorError, ValueError) as error:
        raise BrokenModelFile(
            f"{shard}: not a whole safetensors file ({error})", hint="download it again"
        ) from error
    except OSError as error:
        raise BrokenModelFile(f"{shard}: {error.strerror or error}") from error


def _shards(path: Path, *, partial: bool) -> dict[Path, set[str] | None]:
    """The files and the tensors that the index expects in each; without an index, whatever the file holds."""
    index = path / INDEX
    if not index.exists():
        if not (path / WEIGHTS).exists():
            raise BrokenModelFile(
                f"{path}: neither {WEIGHTS} nor {INDEX} is in it",
                hint="shards are known by the index alone; download it too",
            )
        return {path / WEIGHTS: None}
    names = _read_json(index).get("weight_map")
    if not isinstance(names, Mapping) or not names:
        raise BrokenModelFile(f"{index}: 'weight_map' is {names!r:.40}, expected tensors to files")
    shards: dict[Path, set[str]] = {}
    for name, file in cast(Mapping[str, object], names).items():
        if not isinstance(file, str) or not file or Path(file).name != file:
            raise BrokenModelFile(
                f"{index}: file {file!r:.80} of tensor {name!r} is not a name in this folder"
            )
        shards.setdefault(path / file, set()).add(name)
    missing = [shard for shard in shards if not _is_there(shard)]
    if missing and not partial:
        raise BrokenModelFile(
            f"{index}: file {missing[0].name!r:.80} with {len(shards[missing[0]])} tensors is not there",
            hint=f"{len(missing)} of {len(shards)} files are missing; download them",
        )
    return dict(shards)


def _is_there(shard: Path) -> bool:
    try:
        return shard.exists()
    except OSError:  # a name longer than any file's
        return False


def _check_regular(path: Path) -> None:
    """To read a pipe would wait for whoever writes to it."""
    if path.exists() and not path.is_file():
        raise BrokenModelFile(f"{path}: not a regular file")


def _read_json(path: Path) -> Mapping[str, object]:
    _check_regular(path)
    try:
        value: object = json.loads(path.read_bytes())
    except OSError as error:
        raise BrokenModelFile(f"{path}: {error.strerror or error}") from error
    except (ValueError, RecursionError) as error:
        raise BrokenModelFile(f"{path}: no JSON ({error})") from error
    if not isinstance(value, dict):
        raise BrokenModelFile(f"{path}: {type(value).__name__}, expected an object")
    return cast(Mapping[str, object], value)
