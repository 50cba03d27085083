"""Directory trees on the host, read and written without following a link."""

import errno
import os
import secrets
import stat
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import count
from pathlib import Path, PurePosixPath

from sandbox.arguments import check_type
from sandbox.errors import CapacityError, FileTooLarge, InvalidArgument, is_shortage

_DIRECTORY = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC  # which waits for no FIFO
# What opening says of a link, of a socket, and of what has gone (or become something else) meanwhile.
_LEFT_OUT = frozenset({errno.ELOOP, errno.ENXIO, errno.ENOENT, errno.ENOTDIR})


@dataclass(frozen=True, slots=True)
class TreeItem:
    """A directory (`content` is None) or a regular file; `path` is relative, with `/`."""

    path: str
    mode: int
    content: bytes | None


def read_tree(root: Path, *, max_bytes: int) -> Iterator[TreeItem]:
    """Directories and regular files under `root`, parents first, in the order of their names.

    Each file is opened relative to its directory, without following a link and without waiting (a FIFO is
    skipped); `root` itself may be one. InvalidArgument when it is no directory or something in it cannot be
    read, CapacityError when this process is out of descriptors, FileTooLarge beyond `max_bytes` in all.
    """
    if not root.is_dir():
        raise InvalidArgument(f"host_dir={str(root)!r} is not a directory")
    try:
        yield from _items(root.resolve(), max_bytes)
    except OSError as error:
        words = f"host_dir={str(root)!r}: {error.filename or 'a file'} cannot be read: {error.strerror}"
        if is_shortage(error):
            raise CapacityError(words, hint="close something, or raise `ulimit -n`") from error
        raise InvalidArgument(words, hint="make it readable, or copy without it") from error


def _items(root: Path, max_bytes: int) -> Iterator[TreeItem]:
    left, pending = max_bytes, [Path()]
    top = os.open(root, _DIRECTORY)
    try:
        while pending:
            relative = pending.pop()
            if (fd := _open_directory(top, relative)) is None:
                continue
            try:
                if relative != Path():
                    yield TreeItem(relative.as_posix(), 0o755, None)
                with os.scandir(fd) as entries:
                    found = sorted((each.name, each.is_dir(follow_symlinks=False)) for each in entries)
                pending += [relative / name for name, is_directory in reversed(found) if is_directory]
                for name in [name for name, is_directory in found if not is_directory]:
                    item = _read_file(fd, name, relative, left)
                    if item is not None and item.content is not None:
                        left -= len(item.content)
                        yield item
            finally:
                os.close(fd)
    finally:
        os.close(top)


def _open_directory(top: int, relative: Path) -> int | None:
    """Step by step, since any of them may have become a link, or a FIFO; None for one that has."""
    fd = os.open(".", _DIRECTORY, dir_fd=top)
    for name in relative.parts:
        above = fd
        try:
            fd = os.open(name, _DIRECTORY, dir_fd=above)
        except OSError as error:
            error.filename = relative.as_posix()
            _raise_unless_gone(error)
            return None
        finally:
            os.close(above)
    return fd


def write_tree(root: Path, directories: Sequence[str], files: Mapping[str, bytes]) -> None:
    """Writes into `root`, which must be empty or absent. The names come from a sandbox and are not trusted:
    one that would leave `root` raises InvalidArgument before anything is written. So does what cannot be
    written, such as a path that is too long for the host; CapacityError when the disk is full."""
    check_type("host_dir", root, str, Path)
    root = Path(root)
    for name in (*directories, *files):
        _check_name(name)
    try:
        root.mkdir(parents=True, exist_ok=True)
        if any(root.iterdir()):
            raise InvalidArgument(f"host_dir={str(root)!r} is not empty", hint="name a new directory")
        for name in directories:
            (root / name).mkdir(parents=True, exist_ok=True)
        for name, content in files.items():
            (root / name).parent.mkdir(parents=True, exist_ok=True)
            (root / name).write_bytes(content)
    except OSError as error:
        words = f"host_dir={str(root)!r}: {error.filename!r:.200} cannot be written: {error.strerror}"
        if is_shortage(error):
            raise CapacityError(words, hint="make room, or name a directory elsewhere") from error
        raise InvalidArgument(words, hint="name one that can be written, or with a shorter path") from error


def remove_tree(root: Path) -> None:
    """Removes a tree, however deep, with directories that are closed to their own user. Follows no link, in
    its place or in it, waits for no FIFO and enters no mount, whatever its user changes meanwhile. What does
    not go stays, without a word: whoever counts what is left finds it."""
    try:
        root.rmdir()  # an empty one, which takes no descriptor
    except NotADirectoryError:
        with suppress(OSError):
            root.unlink()
    except OSError as error:
        if not _is_mount(error):
            with suppress(OSError):
                _open_up(root)
                _empty(root)
                root.rmdir()


def _empty(root: Path) -> None:
    """What lies deeper is moved to the top: so no path is too long, and no descriptor is held for a level."""
    prefix, numbers = f".removed-{secrets.token_hex(4)}-", count()
    top = os.open(root, _DIRECTORY)
    try:
        pending = _clear(top)
        while pending:
            name = pending.pop()
            with suppress(OSError):
                fd = os.open(name, _DIRECTORY, dir_fd=top)
                try:
                    for below in _clear(fd):
                        moved = f"{prefix}{next(numbers)}"
                        os.rename(below, moved, src_dir_fd=fd, dst_dir_fd=top)
                        pending.append(moved)
                finally:
                    os.close(fd)
                os.rmdir(name, dir_fd=top)
    finally:
        os.close(top)


def _clear(fd: int) -> list[str]:
    """Removes what is no directory, and empty ones. The names of the others, which are opened up."""
    with os.scandir(fd) as entries:
        found = [(each.name, each.is_dir(follow_symlinks=False)) for each in entries]
    left: list[str] = []
    for name, is_directory in found:
        try:
            (os.rmdir if is_directory else os.unlink)(name, dir_fd=fd)
        except OSError as error:
            with suppress(OSError):
                if not _is_mount(error):
                    _open_up(name, fd)
                    left.append(name)
    return left


def _is_mount(error: OSError) -> bool:
    """Of removing a directory, which the kernel says before it looks whether that is empty."""
    return error.errno == errno.EBUSY


def _open_up(name: Path | str, above: int | None = None) -> None:
    """Lets this user look into a directory of his, and change it. OSError for a link, and for another's."""
    fd = os.open(name, os.O_PATH | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=above)
    try:
        if os.fstat(fd).st_mode & 0o700 != 0o700:
            Path(f"/proc/self/fd/{fd}").chmod(0o700)  # it, whatever has its name by now
    finally:
        os.close(fd)


def _read_file(fd: int, name: str, relative: Path, max_bytes: int) -> TreeItem | None:
    try:
        file = os.open(name, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC, dir_fd=fd)
    except OSError as error:
        error.filename = (relative / name).as_posix()
        _raise_unless_gone(error)
        return None
    with os.fdopen(file, "rb") as stream:
        info = os.fstat(stream.fileno())
        if not stat.S_ISREG(info.st_mode):
            return None
        content = stream.read(max_bytes + 1)
        path = (relative / name).as_posix()
        if len(content) > max_bytes:
            raise FileTooLarge(f"{path}: the tree is larger than allowed", path=path, number=27)
        return TreeItem(path, stat.S_IMODE(info.st_mode), content)


def _raise_unless_gone(error: OSError) -> None:
    """Nothing that is to be copied goes missing without a word."""
    if error.errno not in _LEFT_OUT:
        raise error


def _check_name(name: str) -> None:
    parts = PurePosixPath(name).parts
    if not parts or name.startswith("/") or ".." in parts or "\0" in name:
        raise InvalidArgument(f"a sandbox names a file {name!r}, which would lie outside the directory")
