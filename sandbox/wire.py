"""Messages between a sandbox's owner and its init (the other end: native/dockyard.h). Pure.

Each is one packet of a socket that keeps packets whole. What a command prints and reads does not pass here:
the owner makes its pipes and hands their ends over.
"""

import os
import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import IntEnum

from sandbox.arguments import check_type, check_whole
from sandbox.errors import InvalidArgument
from sandbox.texts import system_bytes

WIRE_VERSION = 3
MAX_CHUNK_BYTES = 1 << 20  # of file content, and of a command's words
MAX_WORD_BYTES = 32 * os.sysconf("SC_PAGESIZE")  # MAX_ARG_STRLEN of the kernel, with the NUL
FRAME_BYTES = 16

_FRAME = struct.Struct("=IIII")
_PAIR = struct.Struct("=II")
_MOST_CHARACTERS = (1 << 16) - 1  # of a terminal
_MAX_ERRNO = 4095  # of the kernel; a Trouble is less
WITH_INPUT, WITH_TERMINAL = 1, 2  # flags of EXEC


class Kind(IntEnum):
    """Kinds of messages, the same numbers as in dockyard.h."""

    EXEC = 1
    KILL = 2
    OPEN = 3
    WRITE = 4
    MKDIR = 5
    REMOVE = 6
    RENAME = 7
    HELLO = 64
    DONE = 65
    EXIT = 66
    TERMINAL = 67


class Ending(IntEnum):
    """First word of an EXIT; the second is an exit code, a signal or an errno."""

    EXIT = 0
    SIGNAL = 1
    FAILED_CHDIR = 2
    FAILED_EXEC = 3
    FAILED_START = 4
    MINDER_DIED = 5


class Trouble(IntEnum):
    """What a DONE says beyond errno."""

    NOT_REGULAR = 1001
    BAD_MESSAGE = 1003
    UNFINISHED = 1004
    SPEAKS = 2001  # of the owner's own finding: see `entries.speaks`
    TOO_DEEP = 2002  # likewise


@dataclass(frozen=True, slots=True)
class Frame:
    """One message from a sandbox. `kind` stays a plain number: an unknown one is the receiver's to refuse.
    `fds` came with it; whoever wants one takes it out of the list, and the reader closes the rest. `is_cut`:
    there were more, for which this process has none free."""

    id: int
    kind: int
    first: int = 0
    second: int = 0
    fds: list[int] = field(default_factory=list[int])
    is_cut: bool = False


@dataclass(frozen=True, slots=True)
class TerminalSize:
    """In characters, each up to 65,535."""

    rows: int = 24
    columns: int = 80


def encode(id: int, kind: Kind, first: int = 0, second: int = 0, path: str = "") -> bytes:
    """One message as bytes. InvalidArgument for half of a surrogate pair in `path`."""
    paths = (system_bytes("path", each) for each in path.split("\0"))  # two, of a rename
    return _FRAME.pack(id, kind, first, second) + b"\0".join(paths)


def decode(data: bytes, fds: list[int], is_cut: bool = False) -> Frame:
    """What a sandbox sent. Raises ValueError on what no honest init sends; `fds` stay the caller's then."""
    if len(data) != FRAME_BYTES:
        raise ValueError(f"a message of {len(data)} bytes from a sandbox")
    id, kind, first, second = _FRAME.unpack(data)
    return Frame(id, kind, first, second, fds, is_cut)


def check_size(size: object) -> None:
    """InvalidArgument for what no terminal has."""
    check_type("terminal", size, TerminalSize)
    if isinstance(size, TerminalSize):
        check_whole("terminal: rows", size.rows, 0, _MOST_CHARACTERS)
        check_whole("terminal: columns", size.columns, 0, _MOST_CHARACTERS)


def pack_size(size: TerminalSize) -> int:
    """Second word of an EXEC with a terminal."""
    return size.rows | size.columns << 16


def exec_words(argv: Sequence[str], cwd: str, env: Mapping[str, str]) -> bytes:
    """Content of the file that says what to run. InvalidArgument names the field of what cannot be said."""
    words = [system_bytes("cwd", cwd), *(system_bytes(f"cmd: word {n}", word) for n, word in enumerate(argv))]
    words += [
        system_bytes("env: a name", name) + b"=" + system_bytes(f"env: the value of {name!r}", value)
        for name, value in env.items()
    ]
    if (longest := max(map(len, words[1:]), default=0)) >= MAX_WORD_BYTES:
        raise InvalidArgument(
            f"cmd or env has a word of {longest} bytes, and the kernel takes less than {MAX_WORD_BYTES}",
            hint="write a file and run it, or use stdin",
        )
    return _PAIR.pack(len(argv), len(env)) + b"".join(word + b"\0" for word in words)


def decode_exit(frame: Frame) -> tuple[Ending, int]:
    """(Ending, value) of an EXIT. ValueError on what no honest init sends."""
    if frame.second > _MAX_ERRNO:  # the largest of exit codes, signals and errnos
        raise ValueError(f"an EXIT from a sandbox says {frame.second}")
    return Ending(frame.first), frame.second


def decode_done(frame: Frame) -> int:
    """0, an errno or a Trouble. ValueError on what no honest init sends."""
    if frame.first > _MAX_ERRNO:
        raise ValueError(f"a DONE from a sandbox says {frame.first}")
    return frame.first
