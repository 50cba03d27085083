"""Whether somebody else than root could change what root runs: files, links on the way, folders above."""

import os
import stat
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path

PROGRAMS = "/usr/sbin:/usr/bin:/sbin:/bin"
_NOT_IMPORTED = frozenset({"site-packages", "dist-packages"})  # below the standard library, with -S
_MOST_LINKS = 40  # on the way to one file, as the kernel has it


def first_foreign(paths: Iterable[Path]) -> Path | None:
    """The first of these files and folders, of the links to them and of the folders above, that another than
    root could replace, change or, where it is not there, make."""
    return next((each for path in paths for each in _way(path) if _is_foreign(each)), None)


def first_foreign_below(folder: Path) -> Path | None:
    """The same of a folder and of all that can be imported from it."""
    found = first_foreign([folder])
    for place, folders, files in os.walk(folder):
        folders[:] = [name for name in folders if name not in _NOT_IMPORTED]
        for each in (Path(place, name) for name in (*folders, *files)):
            if found is None and _is_foreign(each):
                found = each
            if found is None and each.is_symlink():
                found = first_foreign([each])
    return found


def running() -> Iterator[Path]:
    """The interpreter as it was called, what it reads and where it looks, the mapped files that it runs."""
    program = Path(sys.executable)
    yield from (program, program.with_name("pyvenv.cfg"), program.parent.with_name("pyvenv.cfg"))
    yield from (Path(each or ".").absolute() for each in sys.path if not each.startswith("__editable__"))
    for line in Path("/proc/self/maps").read_text().splitlines():
        if len(words := line.split(maxsplit=5)) == 6 and words[5][0] == "/" and "x" in words[1]:
            yield Path(words[5].removesuffix(" (deleted)"))


def _way(path: Path) -> Iterator[Path]:
    """What the kernel goes by, from the root on: folders, links, and what these lead to."""
    here, rest, num_links = Path("/"), list(path.parts[1:]), 0
    yield here
    while rest:
        if (name := rest.pop(0)) == "..":
            here = here.parent
            continue
        yield here / name
        if not (here / name).is_symlink():
            here = here / name
        elif (num_links := num_links + 1) <= _MOST_LINKS:
            target = (here / name).readlink()
            here = Path("/") if target.is_absolute() else here
            rest = [*target.parts[target.is_absolute() :], *rest]


def _is_foreign(path: Path) -> bool:
    try:
        info = path.lstat()
    except (FileNotFoundError, NotADirectoryError):
        above = path.parent
        return above.is_dir() and bool(above.stat().st_mode & 0o022)  # whoever may write there can make it
    if info.st_uid != 0:
        return True
    is_open = info.st_mode & 0o022 and not stat.S_ISLNK(info.st_mode)
    is_sticky = stat.S_ISDIR(info.st_mode) and info.st_mode & stat.S_ISVTX  # nobody replaces another's there
    return bool(is_open and not is_sticky)
