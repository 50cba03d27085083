"""What every sandbox owns, on disk before it exists, so that a crash of the owner leaves nothing unknown.

One file a sandbox, STATE_DIR/sandboxes/ID.json, which appears as a whole and grows by a line at each change:
the last line that is whole is the record. A file put in the place of another would be written to the disk at
once (ext4), which takes longer than a create has to spare; this one is mostly gone before that. Not fsynced:
pids, mounts and cgroups do not outlive the kernel either.
"""

import json
import os
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

from sandbox.listings import list_folder
from sandbox.places import JOURNAL, make_folder
from sandbox.processes import ProcessKey, find_process
from sandbox.whole_lines import append_line


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
        return (record is None or path != self._path(record.id)) and path.exists()  # it may be gone by now

    def _path(self, sandbox_id: str) -> Path:
        return self._directory / f"{sandbox_id}.json"


def _fields(part: Record | ProcessKey) -> dict[str, Any]:
    return {each.name: getattr(part, each.name) for each in fields(part)}


def _put(path: Path, flags: int, line: bytes) -> None:
    fd = os.open(path, os.O_RDWR | os.O_CLOEXEC | flags, 0o600)
    try:
        append_line(fd, line)
    finally:
        os.close(fd)


def _is_being_written(path: Path) -> bool:
    _, pid, kind = ("..." + path.name).rsplit(".", 2)
    return kind == "draft" and pid.isdecimal() and find_process(int(pid)) is not None


def _load(path: Path) -> Record | None:
    """The last line that is a record: the one before where an owner died while it wrote. None without any."""
    try:
        lines = path.read_bytes().splitlines()
    except FileNotFoundError:
        return None
    return next((record for line in reversed(lines) if (record := _parse(line)) is not None), None)


def _parse(line: bytes) -> Record | None:
    try:
        fields: dict[str, Any] = json.loads(line)
        return Record(
            id=str(fields["id"]),
            owner=ProcessKey(**fields["owner"]),
            boot=str(fields["boot"]),
            substrate=str(fields["substrate"]),
            cgroups=tuple(fields["cgroups"]),
            processes=tuple(ProcessKey(**each) for each in fields["processes"]),
            links=tuple(fields.get("links", ())),  # of an earlier version: none
        )
    except (ValueError, KeyError, TypeError):  # no JSON, no text, or no fields of a record
        return None
