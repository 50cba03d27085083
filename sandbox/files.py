"""Files in a sandbox. Init opens, makes, writes and removes inside the sandbox's root, so no path is ever
resolved on the host, no link leads out, and FIFOs and devices are refused instead of waited for. What is read
comes through a descriptor that init hands over."""

import errno
import os
import posixpath
import stat
import time
from collections.abc import Generator, Iterator
from concurrent.futures import CancelledError, Future
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from threading import Lock

from sandbox.arguments import check_type, check_whole
from sandbox.channel import Channel
from sandbox.download import Download
from sandbox.entries import (
    MAX_LISTED,
    MAX_LISTED_BYTES,
    Entry,
    TooMuch,
    describe,
    is_regular,
    list_directory,
    read_regular,
    speaks,
)
from sandbox.errors import (
    CapacityError,
    FileError,
    FileMissing,
    InvalidArgument,
    NoSpace,
    SandboxError,
    SandboxGone,
    is_shortage,
    translated,
)
from sandbox.file_errors import FileErrors
from sandbox.host import Host
from sandbox.host_tree import read_tree
from sandbox.memory_files import memory_file
from sandbox.paths import MAX_DIRECTORY_BYTES, WORKDIR, absolute
from sandbox.policy import Policy
from sandbox.texts import utf8
from sandbox.undisturbed import undisturbed_call
from sandbox.wire import MAX_CHUNK_BYTES, Frame, Kind, Trouble, decode_done

MIB = 1 << 20
MAX_DEPTH = 128
MOST_BYTES = 1 << 40  # that anybody asks for
ENTRY_BYTES = 1 << 14  # of memory that a new name takes, in the kernel too
PATIENCE_S = 60.0  # with what undoes as fast as it is done
# Of an entry that was something else when its directory was read: removed, or swapped for a directory, a
# file, a link to itself or a FIFO.
_CHANGED = frozenset(
    {errno.ENOENT, errno.ENOTDIR, errno.EISDIR, errno.ELOOP, Trouble.NOT_REGULAR, Trouble.SPEAKS}
)


@dataclass(slots=True)
class _Reply:
    """The answer to one file operation: its number, and a descriptor or -1. Its methods run on the channel's
    thread; `on_lost` on any, for one that could not be asked."""

    host: Host
    future: Future[tuple[int, int]] = field(default_factory=Future[tuple[int, int]])
    _open: Lock = field(default_factory=Lock)  # taken by the first answer, which counts

    def on_frame(self, frame: Frame) -> bool:
        if frame.kind != Kind.DONE:
            return False
        number = decode_done(frame)
        if self._open.acquire(blocking=False):
            self.host.finish()
            if frame.is_cut:
                self.future.set_exception(OSError(errno.EMFILE, os.strerror(errno.EMFILE)))
            else:
                self.future.set_result((number, frame.fds.pop() if frame.fds else -1))
        return True

    def on_lost(self) -> None:
        if self._open.acquire(blocking=False):
            self.host.drop()
            self.future.cancel()

    def deadline_ns(self) -> int | None:
        return None  # init answers file operations at once

    def on_deadline(self) -> None:
        raise AssertionError("a file operation has no deadline")


class Files:
    """`sandbox.files`. Thread-safe; each call blocks for its round trips. Relative paths start at /workspace.

    Every method raises SandboxGone, and of FileError: FileMissing, FileTooLarge, UnsafePath, NoSpace, or
    itself with `errno` (permission denied and the like); CapacityError where this process is out of
    descriptors.
    """

    def __init__(self, channel: Channel, host: Host, policy: Policy | None = None) -> None:
        self._channel = channel
        self._host = host
        self._errors = FileErrors(channel.name, policy)

    @undisturbed_call
    def read(self, path: str, *, max_bytes: int = 64 * MIB) -> bytes:
        """The content of a regular file, links followed inside the sandbox. FileTooLarge beyond `max_bytes`,
        UnsafePath for what is no file, or one of the kernel's (/proc), which a command can read."""
        place = absolute(path)
        check_whole("max_bytes", max_bytes, 0, MOST_BYTES)
        with self._opened(place, os.O_RDONLY) as fd:
            if not is_regular(fd):
                is_directory = stat.S_ISDIR(os.fstat(fd).st_mode)
                raise self._errors.of(errno.EISDIR if is_directory else Trouble.NOT_REGULAR, place)
            if speaks(fd):
                raise self._errors.of(Trouble.SPEAKS, place)
            content = read_regular(fd, max_bytes)
        if content is None:
            raise self._errors.of(errno.EFBIG, place)
        return content

    def write(self, path: str, data: bytes | str, *, mode: int = 0o644) -> None:
        """Replaces a file's content, making its parents. `str` is written as UTF-8. Not atomic: a reader in
        the sandbox may see a part of it."""
        place, content = absolute(path), utf8("data", data)
        check_whole("mode", mode, 0, MOST_BYTES)
        first = memoryview(content)[:MAX_CHUNK_BYTES]
        try:
            self._replace(place, first, mode)
        except FileMissing as error:
            if error.errno != errno.ENOENT:
                raise
            self.make_dir(posixpath.dirname(place))
            self._replace(place, first, mode)
        for start in range(MAX_CHUNK_BYTES, len(content), MAX_CHUNK_BYTES):
            self._write(place, memoryview(content)[start : start + MAX_CHUNK_BYTES], True, mode)

    @undisturbed_call
    def list(self, path: str = WORKDIR) -> tuple[Entry, ...]:
        """What is in a directory, by name. FileTooLarge beyond 100,000 entries, or 32 MiB of names."""
        place = absolute(path)
        with self._opened(place, os.O_RDONLY | os.O_DIRECTORY) as fd:
            try:
                return tuple(sorted(list_directory(fd), key=lambda entry: entry.name))
            except TooMuch:
                raise self._errors.of(errno.EFBIG, place) from None

    @undisturbed_call
    def stat(self, path: str) -> Entry:
        """One entry; a link is described, not followed."""
        place = absolute(path)
        with self._opened(place, os.O_PATH | os.O_NOFOLLOW) as fd:
            return describe(fd, posixpath.basename(place))

    def exists(self, path: str) -> bool:
        """True when there is something, a dangling link too. In a masked place there is nothing."""
        try:
            self.stat(path)
        except FileError as error:
            if error.errno not in (errno.ENOENT, errno.ENOTDIR):
                raise
            return False
        return True

    def make_dir(self, path: str) -> None:
        """Makes a directory and its parents. Nothing happens when it is there. FileMissing after a minute, in
        which what runs has removed its parents as fast as they were made."""
        place, give_up_s = absolute(path), time.monotonic() + PATIENCE_S
        missing = [place]
        while missing:
            try:
                self._make_one(missing[-1])
            except FileError as error:
                parent = posixpath.dirname(missing[-1].rstrip("/"))
                may_help = parent not in ("", "/") and time.monotonic() < give_up_s
                if error.errno == errno.ENOENT and may_help:
                    missing.append(parent)
                    continue
                if error.errno != errno.EEXIST or not self._is_directory(missing[-1]):
                    raise
            missing.pop()

    def remove(self, path: str) -> None:
        """Removes a file, a link, or a directory with all that is in it. FileMissing when there is none.
        FileError EBUSY after a minute: it is very large, or what runs fills it as fast as it is emptied.
        InvalidArgument for the root, and for what ends in `.` or `..`."""
        place = absolute(path)
        if posixpath.basename(place.rstrip("/")) in ("", ".", ".."):
            raise InvalidArgument(f"path={path!r} cannot be removed", hint="name it, or what is in it")
        give_up_s = time.monotonic() + PATIENCE_S
        while not self._is_removed(place):
            if time.monotonic() > give_up_s:
                raise self._errors.of(errno.EBUSY, place)

    def rename(self, path: str, to: str) -> None:
        """Moves a file, a link or a directory, in one step, making the parents of `to`. A file or link that
        is at `to` is replaced, and so is an empty directory by a directory; no link is followed. FileMissing
        when there is nothing at `path`; FileError with `errno` EXDEV between file systems (/dev/shm),
        ENOTEMPTY where `to` is a directory with something in it, EINVAL where it lies in `path`."""
        place, target = absolute(path), absolute(to)
        try:
            self._move(place, target)
        except FileMissing as error:
            if error.errno != errno.ENOENT or not self.exists(place):
                raise
            self.make_dir(posixpath.dirname(target.rstrip("/")))
            self._move(place, target)

    def upload_dir(self, host_dir: Path | str, path: str, *, max_bytes: int = 256 * MIB) -> int:
        """Copies regular files and directories of `host_dir` into `path`; the number of files. Links and
        other things on the host are left out, so nothing outside `host_dir` is ever read. InvalidArgument
        names what this process may not read, CapacityError what no descriptor is left for. `host_dir` itself
        may be a link to a directory."""
        place, num_files = absolute(path), 0
        check_type("host_dir", host_dir, str, Path)
        check_whole("max_bytes", max_bytes, 0, MOST_BYTES)
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
        """A directory with all that is in it. FileTooLarge beyond `max_bytes`, 100,000 entries or 32 MiB of
        names and links, UnsafePath beyond 128 levels. No link is followed; what goes away or becomes
        something else meanwhile is left out, as are files of the kernel's."""
        place = absolute(path)
        files, links = dict[str, bytes](), dict[str, str]()
        directories, skipped = list[str](), list[str]()
        check_whole("max_bytes", left := max_bytes, 0, MOST_BYTES)
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
        pending, num_entries, name_bytes = [""], 0, 0
        while pending:
            directory = pending.pop()
            place = posixpath.join(root, directory)
            if directory.count("/") >= MAX_DEPTH or len(os.fsencode(place)) > MAX_DIRECTORY_BYTES:
                raise self._errors.of(Trouble.TOO_DEEP, place)
            try:
                entries = self.list(place)
            except FileError as error:
                if not directory or error.errno not in _CHANGED:
                    raise
                continue
            for entry in entries:
                name = posixpath.join(directory, entry.name)
                num_entries, name_bytes = num_entries + 1, name_bytes + len(name) + len(entry.target)
                if num_entries > MAX_LISTED or name_bytes > MAX_LISTED_BYTES:
                    raise self._errors.of(errno.EFBIG, root)
                yield name, entry
                if entry.type == "dir":
                    pending.append(name)

    @undisturbed_call
    def _move(self, place: str, target: str) -> None:
        self._ask(Kind.RENAME, place, to=target)

    @undisturbed_call
    def _make_one(self, place: str) -> None:
        with self._host.room(ENTRY_BYTES) as is_free:
            if not is_free:
                raise self._errors.of(errno.ENOMEM, place)
            self._ask(Kind.MKDIR, place)

    @undisturbed_call
    def _is_removed(self, place: str) -> bool:
        """Init does some of it at a time, or it would serve nobody else meanwhile."""
        try:
            self._ask(Kind.REMOVE, place)
        except FileError as error:
            if error.errno == Trouble.UNFINISHED:
                return False
            raise
        return True

    @undisturbed_call
    def _is_there(self, place: str) -> bool:
        """Links followed."""
        try:
            with self._opened(place, os.O_PATH):
                return True
        except FileMissing:
            return False

    @undisturbed_call
    def _is_directory(self, place: str) -> bool:
        """Links followed."""
        with self._opened(place, os.O_PATH) as fd:
            return stat.S_ISDIR(os.fstat(fd).st_mode)

    def _replace(self, place: str, chunk: memoryview, mode: int) -> None:
        """What was in the file goes first where there is no room for both."""
        try:
            self._write(place, chunk, False, mode)
        except NoSpace as error:
            if error.errno != errno.ENOMEM or not self._is_there(place):
                raise
            self._send(place, chunk[:0], False, mode)
            self._write(place, chunk, True, mode)

    @undisturbed_call
    def _write(self, place: str, chunk: memoryview, append: bool, mode: int) -> None:
        with self._host.room(len(chunk) + ENTRY_BYTES) as is_free:
            if not is_free:
                raise self._errors.of(errno.ENOMEM, place)
            self._send(place, chunk, append, mode)

    @undisturbed_call
    def _send(self, place: str, chunk: memoryview, append: bool, mode: int) -> None:
        with translated("writing a file", sandbox_id=self._channel.name):
            content = memory_file(chunk)
        self._ask(Kind.WRITE, place, int(append), mode & 0o7777, fds=(content,))

    @contextmanager
    def _opened(self, place: str, flags: int) -> Generator[int]:
        fd = self._ask(Kind.OPEN, place, flags)
        if fd < 0:
            raise SandboxError(f"{place}: the sandbox said that it had opened it, and handed nothing over")
        try:
            yield fd
        except SandboxError:
            raise
        except OSError as error:
            if is_shortage(error):
                raise CapacityError(f"{place}: {error.strerror}", hint="raise `ulimit -n`") from error
            raise self._errors.of(error.errno or errno.EIO, place) from error
        finally:
            os.close(fd)

    def _ask(
        self,
        kind: Kind,
        place: str,
        first: int = 0,
        second: int = 0,
        *,
        to: str = "",
        fds: tuple[int, ...] = (),
    ) -> int:
        """The descriptor that came with the answer, -1 for none."""
        self._host.begin()
        reply = _Reply(self._host)
        paths = f"{place}\0{to}" if to else place
        try:
            with translated("asking for a file", sandbox_id=self._channel.name):
                sent = self._channel.open(
                    self._channel.new_id(), reply, kind, first=first, second=second, path=paths, fds=fds
                )
        except BaseException:
            reply.on_lost()
            raise
        if not sent:
            reply.on_lost()
        with translated(f"{place}: taking what the sandbox has opened", sandbox_id=self._channel.name):
            answer = _awaited(reply.future)
        if answer is None:
            raise self._host.gone() or SandboxGone(
                "the sandbox is gone", reason="lost", sandbox_id=self._channel.name
            )
        number, fd = answer
        if number:
            _close(fd)
            raise self._errors.of(Trouble.NOT_REGULAR if number == errno.ENXIO else number, place, to)
        if kind != Kind.OPEN:
            _close(fd)  # which no honest init sends
        return fd


def _awaited(future: Future[tuple[int, int]]) -> tuple[int, int] | None:
    """Blocks until the answer is there; None when the sandbox went away instead."""
    try:
        return future.result()
    except CancelledError:
        return None


def _close(fd: int) -> None:
    if fd >= 0:
        os.close(fd)
