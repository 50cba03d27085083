"""What has been done to sandboxes, one line of JSON each, for whoever asks later.

STATE_DIR/audit.jsonl, for its owner's eyes alone. A line is one write to a file that is only appended to, so
any number of processes and threads may write, and none holds the file open; behind one that was cut short it
is written once more. At 16 MiB it becomes audit.jsonl.1, that .2 and so on; the ninth is dropped. No line has
a command's text, environment or output.
"""

import fcntl
import hashlib
import json
import os
import threading
import time
from collections.abc import Generator, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import fields
from functools import lru_cache
from pathlib import Path
from typing import Any, BinaryIO, Literal, cast

from sandbox.limits import Limits
from sandbox.places import chosen_state_dir, make_folder
from sandbox.policy import Network, Policy
from sandbox.whole_lines import append_line

Deed = Literal[
    "create", "exec", "kill", "set_network", "set_timeout", "snapshot", "fork", "delete_snapshot", "refused",
    "end",
]  # fmt: skip
FILE_NAME = "audit.jsonl"
MAX_BYTES, NUM_KEPT = 16 << 20, 8


class SandboxLog:
    """One sandbox's lines. Thread-safe; each blocks for a file write, some ten microseconds."""

    def __init__(self, state_dir: Path, sandbox_id: str) -> None:
        self._path, self._sandbox = state_dir / FILE_NAME, sandbox_id
        self._lock = threading.Lock()  # guards what follows
        self._num_missed = 0

    def write(self, deed: Deed, **about: object) -> None:
        """Before whoever asked for the deed has it: OSError where it cannot be written, and then it is not to
        be done."""
        with self._lock:
            self._append(deed, about)

    @contextmanager
    def before(self, deed: Deed, **about: object) -> Generator[None]:
        """Writes, then lets the block do it. A second line says that it was not done, where the block raises:
        nobody can log both before a deed and only what succeeds."""
        self.write(deed, **about)
        try:
            yield
        except BaseException as error:
            self.note(deed, **about, failed=type(error).__name__)
            raise

    def note(self, deed: Deed, **about: object) -> None:
        """Of what happens in any case, such as an end: where it cannot be written, the next line that can be
        says how many are missing. Does not make the state directory, which may be gone."""
        with self._lock:
            try:
                self._append(deed, about, makes_directory=False)
            except OSError:
                self._num_missed += 1

    def _append(self, deed: Deed, about: Mapping[str, object], *, makes_directory: bool = True) -> None:
        line: dict[str, object] = {"at_s": round(time.time(), 6), "deed": deed, "sandbox": self._sandbox}
        missed = {"missed": self._num_missed} if self._num_missed else {}
        text = json.dumps({**line, **about, **missed}) + "\n"
        fd = self._open(makes_directory)
        try:
            append_line(fd, text.encode())
            if os.fstat(fd).st_size >= MAX_BYTES:
                with suppress(OSError):  # of the directory's; the line itself is there
                    _rotate(self._path, fd)
        finally:
            os.close(fd)
        self._num_missed = 0

    def _open(self, makes_directory: bool) -> int:
        flags = os.O_RDWR | os.O_APPEND | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
        try:
            return os.open(self._path, flags, 0o600)
        except FileNotFoundError:
            if not makes_directory:
                raise
            make_folder(self._path.parent)
            return os.open(self._path, flags, 0o600)


def entries(state_dir: Path | str) -> Iterator[dict[str, Any]]:
    """All lines that are kept, oldest first. One that was cut short is left out. Holds all files open, nine
    at most: a rotation meanwhile takes none away.
    AuthError for another user's state directory."""
    with ExitStack() as opened:
        for file in _open_all(chosen_state_dir(state_dir) / FILE_NAME, opened):
            for line in file:
                with suppress(ValueError):  # no JSON, or no text: what a crash of the machine has left
                    entry = json.loads(line)
                    if isinstance(entry, dict):
                        yield cast(dict[str, Any], entry)


def of_argv(argv: Sequence[str]) -> dict[str, object]:
    """What is said of a command: enough to compare it with one that is known."""
    text = "\0".join(argv).encode("utf-8", "surrogateescape")
    return {"argc": len(argv), "argv_bytes": len(text), "argv_sha256": hashlib.sha256(text).hexdigest()}


def of_limits(limits: Limits) -> dict[str, object]:
    """Those that hold."""
    named = ((each.name, getattr(limits, each.name)) for each in fields(limits) if each.name != "degraded")
    return {name: value for name, value in named if value is not None}


@lru_cache(maxsize=256)
def policy_digest(policy: Policy) -> str:
    """SHA-256, the same in every process."""
    return _digest(policy.model_dump(mode="json"))


def network_digest(network: Network) -> str:
    """SHA-256, the same in every process."""
    return _digest(network.model_dump(mode="json"))


def _digest(document: Mapping[str, Any]) -> str:
    return hashlib.sha256(json.dumps(document, sort_keys=True).encode()).hexdigest()


def _open_all(path: Path, opened: ExitStack) -> list[BinaryIO]:
    """Oldest first. They are looked for from the newest on, the way in which a rotation moves them: none is
    passed by, and one that moves along is found again, further on, where its place is now."""
    files: dict[tuple[int, int], BinaryIO] = {}
    for place in (path, *(_older(path, number) for number in range(1, NUM_KEPT + 1))):
        with suppress(FileNotFoundError):
            file = opened.enter_context(place.open("rb"))
            info = os.fstat(file.fileno())
            key = info.st_dev, info.st_ino
            files[key] = files.pop(key, file)
    return list(reversed(files.values()))


def _rotate(path: Path, fd: int) -> None:
    fcntl.flock(fd, fcntl.LOCK_EX)  # upon which the others that saw it full find another file in its place
    if not os.path.samestat(path.stat(), os.fstat(fd)):
        return
    for number in range(NUM_KEPT - 1, 0, -1):
        with suppress(FileNotFoundError):
            _older(path, number).replace(_older(path, number + 1))
    path.replace(_older(path, 1))


def _older(path: Path, number: int) -> Path:
    return path.with_name(f"{path.name}.{number}")
