"""Frames between a sandbox's owner and its init (the other end: native/dockyard.h). Pure."""

import struct
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import IntEnum
from typing import Literal

from sandbox.errors import InvalidArgument

WIRE_VERSION = 2
MAX_CHUNK_BYTES = 1 << 20  # of file content in one frame
MAX_INPUT_BYTES = 1 << 16  # of standard input in one frame
MAX_PAYLOAD_BYTES = MAX_CHUNK_BYTES + 8192

_HEADER = struct.Struct("=III")
_PAIR = struct.Struct("=II")
_ENTRY = struct.Struct("=IIQq")
_MAX_ERRNO = 4095  # of the kernel; a Trouble is less


class Kind(IntEnum):
    """Frame kinds, the same numbers as in dockyard.h."""

    EXEC = 1
    STDIN = 2
    KILL = 3
    READ = 4
    WRITE = 5
    LIST = 6
    STAT = 7
    MKDIR = 8
    REMOVE = 9
    RESIZE = 10
    HELLO = 64
    STDOUT = 65
    STDERR = 66
    STDIN_WANT = 67
    EXIT = 68
    DATA = 69
    ENTRY = 70
    DONE = 71


class Ending(IntEnum):
    """First word of an EXIT frame; the second is an exit code, a signal or an errno."""

    EXIT = 0
    SIGNAL = 1
    FAILED_CHDIR = 2
    FAILED_EXEC = 3
    FAILED_START = 4
    MINDER_DIED = 5


class Trouble(IntEnum):
    """What a DONE frame says beyond errno."""

    NOT_REGULAR = 1001
    TOO_DEEP = 1002
    BAD_FRAME = 1003


@dataclass(frozen=True, slots=True)
class Frame:
    """One message. `kind` stays a plain number: an unknown one is the receiver's to refuse."""

    id: int
    kind: int
    payload: bytes


@dataclass(frozen=True, slots=True)
class Entry:
    """One name in a directory of a sandbox. `target` is set for links only."""

    name: str
    type: Literal["file", "dir", "link", "other"]
    size: int
    mode: int
    modified_ns: int
    target: str = ""


def encode(id: int, kind: Kind, payload: bytes = b"") -> bytes:
    """One frame as bytes."""
    return _HEADER.pack(len(payload), id, kind) + payload


class FrameReader:
    """Cuts a byte stream into frames. Not thread-safe."""

    def __init__(self) -> None:
        self._pending = bytearray()

    def feed(self, data: bytes | memoryview) -> Iterator[Frame]:
        """Frames that are complete with `data`. Raises ValueError on a length no honest init sends."""
        self._pending += data
        start = 0
        while len(self._pending) - start >= _HEADER.size:
            length, id, kind = _HEADER.unpack_from(self._pending, start)
            if length > MAX_PAYLOAD_BYTES:
                raise ValueError(f"frame of {length} bytes from a sandbox")
            end = start + _HEADER.size + length
            if len(self._pending) < end:
                break
            yield Frame(id, kind, bytes(memoryview(self._pending)[start + _HEADER.size : end]))
            start = end
        del self._pending[:start]


@dataclass(frozen=True, slots=True)
class TerminalSize:
    """In characters, each up to 65,535."""

    rows: int = 24
    columns: int = 80


def exec_payload(
    argv: Sequence[str],
    cwd: str,
    env: Mapping[str, str],
    *,
    with_input: bool,
    terminal: TerminalSize | None = None,
) -> bytes:
    """Payload of EXEC. Strings hold no NUL (the caller checks)."""
    strings = [cwd, *argv, *(f"{name}={value}" for name, value in env.items())]
    text = b"".join(_path(string) for string in strings)
    flags = int(with_input) | (2 if terminal is not None else 0)
    return struct.pack("=III", flags, len(argv), len(env)) + resize_payload(terminal or _NO_SIZE) + text


_NO_SIZE = TerminalSize(0, 0)


def resize_payload(size: TerminalSize) -> bytes:
    """Payload of RESIZE, and the last word of an EXEC header."""
    return struct.pack("=HH", size.rows, size.columns)


def read_payload(path: str, offset: int, count: int) -> bytes:
    """Payload of READ."""
    return struct.pack("=QI", offset, count) + _path(path)


def write_payload(path: str, data: bytes, *, truncate: bool, parents: bool, mode: int) -> bytes:
    """Payload of WRITE; `data` is at most MAX_CHUNK_BYTES."""
    return _PAIR.pack(int(truncate) | 2 * int(parents), mode) + _path(path) + data


def path_payload(path: str) -> bytes:
    """Payload of LIST, STAT, MKDIR and REMOVE."""
    return _path(path)


def decode_exit(payload: bytes) -> tuple[Ending, int]:
    """(Ending, value) of an EXIT frame. ValueError on what no honest init sends."""
    _check_size(payload, _PAIR.size, "EXIT")
    ending, value = _PAIR.unpack(payload)
    if value > _MAX_ERRNO:  # the largest of exit codes, signals and errnos
        raise ValueError(f"an EXIT frame from a sandbox says {value}")
    return Ending(ending), value


def decode_done(payload: bytes) -> int:
    """0, an errno or a Trouble. ValueError on what no honest init sends."""
    _check_size(payload, 4, "DONE")
    number = int.from_bytes(payload, sys.byteorder)
    if number > _MAX_ERRNO:
        raise ValueError(f"a DONE frame from a sandbox says {number}")
    return number


_TYPES: dict[int, Literal["file", "dir", "link"]] = {ord("f"): "file", ord("d"): "dir", ord("l"): "link"}


def decode_entry(payload: bytes) -> Entry:
    """Entry of an ENTRY frame. Names need not be UTF-8: they use surrogateescape, as in `os`. ValueError when
    it is cut short."""
    if len(payload) < _ENTRY.size:
        raise ValueError(f"an ENTRY frame of {len(payload)} bytes from a sandbox")
    letter, mode, size, modified_ns = _ENTRY.unpack_from(payload)
    name, _, target = payload[_ENTRY.size :].partition(b"\0")
    return Entry(
        name=name.decode("utf-8", "surrogateescape"),
        type=_TYPES.get(letter, "other"),
        size=size,
        mode=mode,
        modified_ns=modified_ns,
        target=target.decode("utf-8", "surrogateescape"),
    )


def _check_size(payload: bytes, size: int, kind: str) -> None:
    if len(payload) != size:
        raise ValueError(f"a {kind} frame of {len(payload)} bytes from a sandbox")


def _path(text: str) -> bytes:
    try:
        return text.encode("utf-8", "surrogateescape") + b"\0"
    except UnicodeEncodeError as error:
        raise InvalidArgument(
            f"{text!r} holds half of a surrogate pair, which no system call takes"
        ) from error
