"""The SHA-256 of a folder's files, in the form that `sha256sum -c` reads, and what a load makes of it.

A fingerprint tells weights apart and knows not which are the right ones: bytes that a disk or a download has
spoilt make a model of their own.
"""

import hashlib
import re
from pathlib import Path

from engine.errors import BrokenModelFile

SUMS = "SHA256SUMS.txt"
_READ_AT_LOAD = 1 << 30  # bytes of a file; to read a larger one would cost more than loading it
_LINE = re.compile(r"([0-9a-f]{64}) [ *]([^/]+)")


def write_sums(folder: Path) -> None:
    """Of the files that decide what its model computes: configs, weights, tokenizer."""
    files = sorted(file for file in folder.iterdir() if file.suffix in {".json", ".safetensors"})
    (folder / SUMS).write_text("".join(f"{_sha256(file)}  {file.name}\n" for file in files))


def check_sums(folder: Path) -> None:
    """Nothing where the folder has no sums. Files above 1 GiB are left out, and so are what is not there.

    Raises BrokenModelFile: a file is another than its sum is of, or a line is none.
    """
    sums = folder / SUMS
    if not sums.is_file():
        return
    for number, line in enumerate(sums.read_text("utf-8", "replace").splitlines(), start=1):
        found = _LINE.fullmatch(line)
        if found is None:
            raise BrokenModelFile(
                f"{sums}: line {number} is {line!r:.80}, expected a SHA-256 and a file's name"
            )
        file = folder / found[2]
        if file.is_file() and file.stat().st_size <= _READ_AT_LOAD and _sha256(file) != found[1]:
            raise BrokenModelFile(
                f"{file}: its bytes are not those that {SUMS} names",
                hint=f"get the file again, or remove {SUMS} from a folder that you have changed yourself",
            )


def _sha256(file: Path) -> str:
    with file.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()
