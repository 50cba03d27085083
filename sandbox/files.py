"""Files in a sandbox. Every operation is done by init inside the sandbox's root, so no path is ever resolved
on the host, no link leads out, and FIFOs and devices are refused instead of waited for."""

import errno
import os
import posixpath
from collections.abc import Iterator
from concurrent.futures import CancelledError, Future
from dataclasses import dataclass, field, replace
from pathlib import Path

from sandbox.channel import Channel
from sandbox.errors import (
    FileError,
    FileMissing,
    FileTooLarge,
    InvalidArgument,
    NoSpace,
    SandboxError,
    SandboxGone,
    UnsafePath,
)
from sandbox.host_tree import read_tree, write_tree
from sandbox.running import Host
from sandbox.wire import (
    MAX_CHUNK_BYTES,
    Entry,
    Frame,
    Kind,
    Trouble,
    decode_done,
    decode_entry,
    path_payload,
    read_payload,
    write_payload,
)

MIB = 1 << 20
MAX_ENTRIES = 100_000  # of a directory tree that is downloaded
MAX_DEPTH = 128
WORKDIR = "/workspace"
# Of an entry that was something else when its directory was read: removed, or swapped for a directory, a
# file, a link to itself or a FIFO.
_CHANGED = frozenset({errno.ENOENT, errno.ENOTDIR, errno.EISDIR, errno.ELOOP, Trouble.NOT_REGULAR})


@dataclass(frozen=True, slots=True)
class Download:
    """A directory's content. Paths are relative to it, with `/` between their parts."""

    files: dict[str, bytes]
    links: dict[str, str]  # name to target, never followed
    directories: tuple[str, ...]
    skipped: tuple[str, ...]  # FIFOs, sockets, devices

    def write_to(self, host_dir: Path) -> None:
        """Makes `host_dir`, which must not exist yet or be empty, and writes files and directories into it.
        Links and what was skipped are left out. InvalidArgument when it holds something already."""
        write_tree(host_dir, self.directories, self.files)


@dataclass(slots=True)
class _Reply:
    """Collects the answer to one file operation. Its methods run on the channel's thread."""

    host: Host
    future: Future[int] = field(default_factory=Future[int])
    data: list[bytes] = field(default_factory=list[bytes])
    entries: list[Entry] = field(default_factory=list[Entry])

    def on_frame(self, frame: Frame) -> bool:
        if frame.kind == Kind.DATA:
            self.data.append(frame.payload)
        elif frame.kind == Kind.ENTRY:
            self.entries.append(decode_entry(frame.payload))
        elif frame.kind == Kind.DONE:
            number = decode_done(frame.payload)
            self.host.finish()
            self.future.set_result(number)
            return True
        return False

    def on_lost(self) -> None:
        self.host.finish()
        self.future.cancel()

    def deadline_ns(self) -> int | None:
        return None  # init answers file operations at once

    def on_deadline(self) -> None:
        raise AssertionError("a file operation has no deadline")


class Files:
    """`sandbox.files`. Thread-safe; each call blocks for its round trips. Relative paths start at /workspace.

    Every method raises SandboxGone, and of FileError: FileMissing, FileTooLarge, UnsafePath, NoSpace, or
    itself with `errno` (permission denied and the like).
    """

    def __init__(self, channel: Channel, host: Host) -> None:
        self._channel = channel
        self._host = host

    def read(self, path: str, *, max_bytes: int = 64 * MIB) -> bytes:
        """The content of a regular file, links followed inside the sandbox. FileTooLarge beyond
        `max_bytes`."""
        place, content = _absolute(path), bytearray()
        while True:
            count = min(MAX_CHUNK_BYTES, max_bytes + 1 - len(content))
            reply = self._ask(Kind.READ, read_payload(place, len(content), count), place)
            chunk = b"".join(reply.data)
            content += chunk
            if len(content) > max_bytes:
                raise _file_error(errno.EFBIG, place)
            if len(chunk) < count:
                return bytes(content)

    def write(self, path: str, data: bytes | str, *, mode: int = 0o644) -> None:
        """Replaces a file's content, making its parents. `str` is written as UTF-8. Not atomic: a reader in
        the sandbox may see a part of a file larger than a mebibyte."""
        place, content = _absolute(path), data.encode() if isinstance(data, str) else data
        for start in range(0, len(content) or 1, MAX_CHUNK_BYTES):
            chunk = content[start : start + MAX_CHUNK_BYTES]
            first = start == 0
            payload = write_payload(place, chunk, truncate=first, parents=first, mode=mode)
            self._ask(Kind.WRITE, payload, place)

    def list(self, path: str = WORKDIR) -> tuple[Entry, ...]:
        """What is in a directory, by name."""
        place = _absolute(path)
        entries = self._ask(Kind.LIST, path_payload(place), place).entries
        return tuple(sorted(entries, key=lambda entry: entry.name))

    def stat(self, path: str) -> Entry:
        """One entry; a link is described, not followed."""
        place = _absolute(path)
        entries = self._ask(Kind.STAT, path_payload(place), place).entries
        if len(entries) != 1:
            raise SandboxError(f"{place}: the sandbox answered with {len(entries)} entries, not with one")
        return replace(entries[0], name=posixpath.basename(place))

    def exists(self, path: str) -> bool:
        """True when there is something, a dangling link too."""
        try:
            self.stat(path)
        except FileMissing:
            return False
        return True

    def make_dir(self, path: str) -> None:
        """Makes a directory and its parents. Nothing happens when it is there."""
        self._ask(Kind.MKDIR, path_payload(_absolute(path)), path)

    def remove(self, path: str) -> None:
        """Removes a file, a link, or a directory with all that is in it. FileMissing when there is none."""
        place = _absolute(path)
        if place == "/":
            raise InvalidArgument("path='/' cannot be removed", hint="name what is in it")
        self._ask(Kind.REMOVE, path_payload(place), place)

    def upload_dir(self, host_dir: Path | str, path: str, *, max_bytes: int = 256 * MIB) -> int:
        """Copies regular files and directories of `host_dir` into `path`; the number of files. Links and
        other things on the host are left out, so nothing outside `host_dir` is ever read. InvalidArgument
        names what this process may not read, CapacityError what no descriptor is left for."""
        place, num_files = _absolute(path), 0
        self.make_dir(place)
        for item in read_tree(Path(host_dir), max_bytes=max_bytes):
            target = posixpath.join(place, item.path)
            if item.content is None:
                self.make_dir(target)
            else:
                self.write(target, item.content, mode=item.mode)
                num_files += 1
        return num_files

    def download_dir(self, path: str, *, max_bytes: int = 64 * MIB) -> Download:
        """A directory with all that is in it. FileTooLarge beyond `max_bytes` or 100,000 entries, UnsafePath
        beyond 128 levels. No link is followed; what goes away or becomes something else meanwhile is left
        out."""
        place = _absolute(path)
        files, links = dict[str, bytes](), dict[str, str]()
        directories, skipped = list[str](), list[str]()
        left = max_bytes
        for name, entry in self._walk(place):
            if entry.type == "link":
                links[name] = entry.target
            elif entry.type == "dir":
                directories.append(name)
            elif entry.type == "other":
                skipped.append(name)
            else:
                content = self._read_if_there(posixpath.join(place, name), left)
                if content is not None:
                    files[name] = content
                    left -= len(content)
        return Download(files, links, tuple(directories), tuple(skipped))

    def _read_if_there(self, path: str, max_bytes: int) -> bytes | None:
        try:
            return self.read(path, max_bytes=max_bytes)
        except FileError as error:
            if error.errno in _CHANGED:
                return None
            raise

    def _walk(self, root: str) -> Iterator[tuple[str, Entry]]:
        """Relative names, parents before children."""
        pending, num_entries = [""], 0
        while pending:
            directory = pending.pop()
            if directory.count("/") >= MAX_DEPTH:
                raise _file_error(Trouble.TOO_DEEP, posixpath.join(root, directory))
            try:
                entries = self.list(posixpath.join(root, directory))
            except FileError as error:
                if not directory or error.errno not in _CHANGED:
                    raise
                continue
            for entry in entries:
                num_entries += 1
                if num_entries > MAX_ENTRIES:
                    raise _file_error(errno.EFBIG, root)
                name = posixpath.join(directory, entry.name)
                yield name, entry
                if entry.type == "dir":
                    pending.append(name)

    def _ask(self, kind: Kind, payload: bytes, path: str) -> _Reply:
        self._host.begin()
        reply = _Reply(self._host)
        if self._channel.open(reply, kind, payload) is None:
            reply.on_lost()
        if not _settled(reply.future):
            raise self._host.gone() or SandboxGone("the sandbox is gone", reason="lost")
        number = reply.future.result()
        if number:
            raise _file_error(number, path)
        return reply


def _settled(future: Future[int]) -> bool:
    """Blocks until the reply is complete; False when the sandbox went away instead."""
    try:
        future.result()
    except CancelledError:
        return False
    return True


def _absolute(path: str) -> str:
    if path == "" or "\0" in path:
        raise InvalidArgument(f"path={path!r} is not usable")
    try:
        os.fsencode(path)
    except UnicodeEncodeError as error:
        raise InvalidArgument(f"path={path!r} holds half of a surrogate pair") from error
    place = posixpath.join(WORKDIR, path)
    if len(os.fsencode(place)) >= 4096:
        raise InvalidArgument(f"path of {len(place)} characters is too long", hint="at most 4095 bytes")
    return place


def _file_error(number: int, path: str) -> FileError:
    text = {
        Trouble.NOT_REGULAR: "is not a regular file",
        Trouble.TOO_DEEP: "is nested too deep",
        errno.EFBIG: "is larger than allowed",
    }.get(number) or os.strerror(number)
    kinds: dict[int, type[FileError]] = {
        errno.ENOENT: FileMissing,
        errno.ENOTDIR: FileMissing,
        errno.EFBIG: FileTooLarge,
        errno.ENOSPC: NoSpace,
        errno.EDQUOT: NoSpace,
        Trouble.NOT_REGULAR: UnsafePath,
        Trouble.TOO_DEEP: UnsafePath,
    }
    return kinds.get(number, FileError)(f"{path}: {text}", path=path, number=number)
