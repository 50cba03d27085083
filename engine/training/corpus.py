"""The text that nano learns from and is judged on: the Python source of this interpreter's standard library.

A file is held out by the hash of its path, so the split does not depend on what else is installed or on any
order. Files of one package stand together, in order of their names: what compressed entries can carry beyond
the window, such as the names of a package, is there to be used.
"""

import hashlib
import sysconfig
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

HELD_OUT_OF = 25  # one file in so many
_SKIPPED = frozenset({"site-packages", "__pycache__"})


@dataclass(frozen=True, slots=True)
class SourceFile:
    """`path` is relative to the library, with `/`."""

    path: str
    text: str

    @property
    def is_held_out(self) -> bool:
        digest = hashlib.blake2b(self.path.encode(), digest_size=8).digest()
        return int.from_bytes(digest, "big") % HELD_OUT_OF == 0


@dataclass(frozen=True, slots=True)
class Corpus:
    """Files in order of their paths; those of one package are neighbours."""

    training: tuple[SourceFile, ...]
    held_out: tuple[SourceFile, ...]

    @property
    def digest(self) -> str:
        """Names the text: another Python has another library, and figures of two cannot be compared."""
        digest = hashlib.blake2b(digest_size=12)
        for file in (*self.training, *self.held_out):
            digest.update(f"{file.path}\0{len(file.text)}\0".encode() + file.text.encode())
        return digest.hexdigest()


def standard_library(folder: Path | None = None) -> Corpus:
    """Reads all of it, some 30 MB. Files that are no UTF-8, which test decoders, are left out."""
    folder = folder or Path(sysconfig.get_path("stdlib"))
    files = [file for path in sorted(_paths(folder)) if (file := _read(folder, path)) is not None]
    return Corpus(
        tuple(file for file in files if not file.is_held_out),
        tuple(file for file in files if file.is_held_out),
    )


def num_bytes(files: Sequence[SourceFile]) -> int:
    """Length of the text as UTF-8, which bits per byte count."""
    return sum(len(file.text.encode()) for file in files)


def _paths(folder: Path) -> list[Path]:
    return [
        path for path in folder.rglob("*.py") if not _SKIPPED.intersection(path.relative_to(folder).parts)
    ]


def _read(folder: Path, path: Path) -> SourceFile | None:
    try:
        text = path.read_text(encoding="utf-8")
    except UnicodeDecodeError:
        return None
    return SourceFile(path.relative_to(folder).as_posix(), text) if text else None
