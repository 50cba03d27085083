"""Writing a folder of weights: shards of bounded size, and the whole folder at once or not at all.

Everything goes to a hidden folder beside the target, which gets its name when it is whole. An error or
Ctrl-C removes it; a killed process leaves the hidden folder and no target.
"""

import json
import os
import shutil
import tempfile
from collections.abc import Generator, Mapping
from contextlib import contextmanager
from pathlib import Path
from types import TracebackType
from typing import Self

from safetensors import SafetensorError
from safetensors.torch import save_file  # pyright: ignore[reportUnknownVariableType]
from torch import Tensor

from engine.checkpoint.folder import CONFIG, INDEX, WEIGHTS
from protocol.errors import InvalidInput, ResourceShortage

# What a folder holds beside its weights that goes with them.
_COMPANIONS = (
    "tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "generation_config.json",
    "chat_template.jinja", "LICENSE",
)  # fmt: skip


class FolderWriter:
    """A context manager. `add` tensors, then `finish`; leaving it without that leaves nothing behind.

    Tensors wait in memory until a shard is full: `shard_bytes` at most, or one tensor that is larger.
    """

    def __init__(self, target: Path, shard_bytes: int) -> None:
        if target.exists() or target.is_symlink():
            raise InvalidInput(f"{target} exists", hint="remove it, or name another folder")
        if not target.parent.is_dir():
            raise InvalidInput(f"{target.parent} is no folder", hint="make it first")
        self._target = target
        self._shard_bytes = shard_bytes
        self._waiting: dict[str, Tensor] = {}
        self._shards: list[list[str]] = []
        self._waiting_bytes = self._num_bytes = 0

    def __enter__(self) -> Self:
        with _disk_faults(self._target):
            name = tempfile.mkdtemp(
                prefix=f".{self._target.name}.", suffix=".partial", dir=self._target.parent
            )
        self._folder = Path(name)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._waiting.clear()
        shutil.rmtree(self._folder, ignore_errors=True)  # not there any more after `finish`

    def add(self, name: str, tensor: Tensor) -> None:
        """Raises ResourceShortage where the disk is full."""
        if self._waiting and self._waiting_bytes + tensor.nbytes > self._shard_bytes:
            self._write_shard()
        self._waiting[name] = tensor
        self._waiting_bytes += tensor.nbytes
        self._num_bytes += tensor.nbytes

    def copy_companions(self, source: Path) -> None:
        """Tokenizer, chat texts and licence of another folder."""
        with _disk_faults(self._target):
            for name in _COMPANIONS:
                if (source / name).is_file():
                    shutil.copyfile(source / name, self._folder / name)
            if (source / "encoding").is_dir():
                shutil.copytree(source / "encoding", self._folder / "encoding")

    def finish(self, config: Mapping[str, object]) -> None:
        """Write what waits, index and config, and give the folder its name."""
        if self._waiting:
            self._write_shard()
        with _disk_faults(self._target):
            self._name_shards()
            self._write_json(CONFIG, config)
            self._folder.chmod(0o777 & ~_umask())
            for path in (*self._folder.iterdir(), self._folder):
                _sync(path)
            self._folder.rename(self._target)
            _sync(self._target.parent)

    def _write_shard(self) -> None:
        path = self._folder / f"part-{len(self._shards)}"
        with _disk_faults(self._target):
            save_file(self._waiting, path, metadata={"format": "pt"})
            path.chmod(0o666 & ~_umask())  # the library writes for its user alone
        self._shards.append(list(self._waiting))
        self._waiting.clear()
        self._waiting_bytes = 0

    def _name_shards(self) -> None:
        count = len(self._shards)
        if count == 1:
            (self._folder / "part-0").rename(self._folder / WEIGHTS)
            return
        weight_map: dict[str, str] = {}
        for index, names in enumerate(self._shards):
            file = f"model-{index + 1:05}-of-{count:05}.safetensors"
            (self._folder / f"part-{index}").rename(self._folder / file)
            weight_map |= dict.fromkeys(names, file)
        self._write_json(INDEX, {"metadata": {"total_size": self._num_bytes}, "weight_map": weight_map})

    def _write_json(self, name: str, value: Mapping[str, object]) -> None:
        (self._folder / name).write_text(json.dumps(value, indent=2) + "\n")


@contextmanager
def _disk_faults(target: Path) -> Generator[None]:
    """What a disk refuses, as an error that names the target."""
    try:
        yield
    except (OSError, SafetensorError) as error:
        raise ResourceShortage(f"{target}: cannot be written: {error}") from error


def _umask() -> int:
    mask = os.umask(0)
    os.umask(mask)
    return mask


def _sync(path: Path) -> None:
    """To the disk itself: a crash after the renaming must not leave empty files."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
