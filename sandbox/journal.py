"""What every sandbox owns, on disk before it exists, so that a crash of the owner leaves nothing unknown.

One file a sandbox, STATE_DIR/sandboxes/ID.json, which appears as a whole and grows by a line at each change:
the last line that is whole is the record. A file put in the place of another would be written to the disk at
once (ext4), which takes longer than a create has to spare; this one is mostly gone before that. Not fsynced:
pids, mounts and cgroups do not outlive the kernel either.
"""

import json
import os
import stat
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any, cast

from sandbox.errors import is_shortage
from sandbox.listings import list_folder
from sandbox.places import JOURNAL, make_folder
from sandbox.processes import ProcessKey, find_process
from sandbox.whole_lines import append_line

_MOST_BYTES = 1 << 20  # from a file's end; a record has some hundreds, and few changes
_MOST_PID, _MOST_TICKS = (1 << 31) - 1, (1 << 63) - 1


@dataclass(frozen=True, slots=True)
class Record:
    """One sandbox's possessions. Mounts are not among them: they live in the sandbox's own mount namespace
    and end with its last process."""

    id: str
    owner: ProcessKey
    boot: str  # of the kernel; pids and cgroups of an earlier one mean nothing
    substrate: str
    cgroups: tuple[str, ...]
    processes: tuple[ProcessKey, ...] = ()  # launcher and init, known once they run
    links: tuple[str, ...] = ()  # host ends of its network
    # Whose file it is, by which others know how far to believe it. Not in the file.
    user: int = field(default_factory=os.geteuid, compare=False)

    def with_processes(self, processes: tuple[ProcessKey, ...]) -> "Record":
        """The same record once its processes are known."""
        return replace(self, processes=processes)


class Journal:
    """Records of one state directory. Any number of processes may use it: each writes its own files only."""

    def __init__(self, state_dir: Path) -> None:
        self._directory = state_dir / JOURNAL

    def write(self, record: Record) -> None:
        """Stores or replaces a record. Blocks for a file write."""
        line = (json.dumps(record, default=_fields) + "\n").encode()
        path = self._path(record.id)
        try:
            _put(path, os.O_APPEND, line)
        except FileNotFoundError:
            self._make(path, line)

    def _make(self, path: Path, line: bytes) -> None:
        draft = path.with_suffix(f".{os.getpid()}.draft")
        try:
            try:
                _put(draft, os.O_CREAT | os.O_TRUNC, line)
            except FileNotFoundError:
                make_folder(self._directory, 0o700)
                _put(draft, os.O_CREAT | os.O_TRUNC, line)
            draft.rename(path)
        except BaseException:  # as long as this process lives nobody else removes it
            draft.unlink(missing_ok=True)
            raise

    def remove(self, sandbox_id: str) -> None:
        """Forgets a sandbox of which nothing is left. Idempotent."""
        self._path(sandbox_id).unlink(missing_ok=True)

    def find(self, sandbox_id: str) -> Record | None:
        """The record of one sandbox; None where there is none. PermissionError where it is another user's."""
        return _load(self._path(sandbox_id))

    def records(self) -> list[Record]:
        """All records, by id. A file that is no record (a draft cut short) is not one of them.
        PermissionError where they are another user's."""
        found = [_load(path) for path in list_folder(self._directory, "*.json")]
        return [record for record in found if record is not None]

    def strays(self) -> list[Path]:
        """Files here that are no records: drafts of an owner that died while writing."""
        return [path for path in list_folder(self._directory) if self._is_stray(path)]

    def remove_stray(self, path: Path) -> None:
        """One of `strays`, unless it has gone or become a record since. Idempotent."""
        if self._is_stray(path):
            path.unlink(missing_ok=True)

    def _is_stray(self, path: Path) -> bool:
        """By what it holds now: others write records at any moment, and a list of them is of before."""
        if _is_being_written(path) or not path.is_file():
            return False
        record = _load(path)
        return record is None and path.exists()  # it may be gone by now

    def _path(self, sandbox_id: str) -> Path:
        return self._directory / f"{sandbox_id}.json"


def _fields(part: Record | ProcessKey) -> dict[str, Any]:
    return {each.name: getattr(part, each.name) for each in fields(part) if each.compare}


def _put(path: Path, flags: int, line: bytes) -> None:
    fd = os.open(path, os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC | flags, 0o600)
    try:
        append_line(fd, line)
    finally:
        os.close(fd)


def _is_being_written(path: Path) -> bool:
    _, pid, kind = ("..." + path.name).rsplit(".", 2)
    return kind == "draft" and pid.isdecimal() and find_process(int(pid)) is not None


def _load(path: Path) -> Record | None:
    """The last line that is a record of the file's name: the one before where an owner died while it wrote.
    None without any, and for what is no file: whose state directory it is may have put anything there."""
    try:
        fd = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError as error:
        if isinstance(error, PermissionError) or is_shortage(error):
            raise
        return None
    try:
        info = os.fstat(fd)
        if not stat.S_ISREG(info.st_mode):
            return None
        lines = os.pread(fd, _MOST_BYTES, max(0, info.st_size - _MOST_BYTES)).splitlines()
    finally:
        os.close(fd)
    for line in reversed(lines):
        record = _parse(line, info.st_uid)
        if record is not None and path.name == f"{record.id}.json":
            return record
    return None


def _parse(line: bytes, user: int) -> Record | None:
    try:
        values: dict[str, Any] = json.loads(line)
        return Record(
            id=_word(values["id"]),
            owner=_key(values["owner"]),
            boot=_word(values["boot"]),
            substrate=_word(values["substrate"]),
            cgroups=tuple(map(_word, _list(values["cgroups"]))),
            processes=tuple(map(_key, _list(values["processes"]))),
            links=tuple(map(_word, _list(values.get("links", [])))),  # of an earlier version: none
            user=user,
        )
    # No JSON, no text, or no fields of a record.
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
        return None


def _key(value: Any) -> ProcessKey:
    pid, start_ticks = value["pid"], value["start_ticks"]
    if type(pid) is not int or type(start_ticks) is not int:
        raise TypeError
    if not (0 <= pid <= _MOST_PID and 0 <= start_ticks <= _MOST_TICKS):
        raise ValueError
    return ProcessKey(pid, start_ticks)


def _list(value: Any) -> list[Any]:
    if not isinstance(value, list):
        raise TypeError
    return cast(list[Any], value)


def _word(value: Any) -> str:
    if not isinstance(value, str):
        raise TypeError
    if "\0" in value:
        raise ValueError
    return value
