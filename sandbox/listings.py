"""Folders that other processes change while this one looks: what has just gone is not there."""

import time
from fnmatch import fnmatchcase
from pathlib import Path


def list_folder(folder: Path, pattern: str = "*") -> list[Path]:
    """What is in it, by name; nothing where there is no such folder, any more. OSError where it cannot be
    read."""
    try:
        return sorted(path for path in folder.iterdir() if fnmatchcase(path.name, pattern))
    except (FileNotFoundError, NotADirectoryError):
        return []


def age_s(path: Path) -> float:
    """Since it, or a link itself, was changed last; 0 where there is none, any more."""
    try:
        return time.time() - path.lstat().st_mtime
    except (FileNotFoundError, NotADirectoryError):
        return 0.0
