"""What can go wrong with a sandbox. Each error says who is to blame and whether trying again can help.

SandboxError
├── InvalidArgument   the caller's value is wrong                  (is an InvalidInput, exit code 2)
├── UnsupportedError  this host cannot enforce or run what was asked (a MissingCapability, exit code 3)
├── CapacityError     the host can, and is full                    (a ResourceShortage, exit code 4)
├── VersionConflict   another version of the network policy holds than was expected
├── Conflict          a key that stands for another order of a sandbox
├── StartError        the sandbox did not come up; `phase` says how far it got
├── SandboxGone       it was there: `reason` is killed, expired, idle, broken or lost
└── FileError         a file operation inside the sandbox failed; `errno` and `path`
    ├── FileMissing   no such file or directory                    (is a FileNotFoundError)
    ├── FileTooLarge  more bytes or entries than the caller allowed
    ├── UnsafePath    a FIFO, device or socket, or a tree that is too deep
    └── NoSpace       the writable layer is full

A command that ends badly is no error: `CommandResult.reason` says how it ended.
"""

import errno
from collections.abc import Generator
from contextlib import contextmanager
from typing import Literal

from protocol.errors import DockyardError, InvalidInput, MissingCapability, ResourceShortage

Blame = Literal["agent", "platform", "caller"]
GoneReason = Literal["killed", "expired", "idle", "broken", "lost"]
_SHORTAGES = frozenset(
    {errno.EMFILE, errno.ENFILE, errno.ENOMEM, errno.ENOBUFS, errno.EAGAIN, errno.ENOSPC, errno.EDQUOT}
)


class SandboxError(DockyardError):
    """Root of the tree. `sandbox_id` is empty where no sandbox exists yet."""

    blame: Blame = "platform"
    retryable: bool = False

    def __init__(self, message: str, *, hint: str = "", sandbox_id: str = "") -> None:
        super().__init__(message, hint=hint)
        self.sandbox_id = sandbox_id


class InvalidArgument(SandboxError, InvalidInput):
    """The caller's value is wrong; the message names field and value."""

    blame = "caller"


class UnsupportedError(SandboxError, MissingCapability):
    """This host lacks what was asked for. Nothing was started, nothing was weakened."""

    blame = "caller"


class CapacityError(SandboxError, ResourceShortage):
    """The host is out of something for now."""

    retryable = True


class VersionConflict(SandboxError):
    """Someone else has changed the network policy meanwhile; nothing was changed now."""

    blame = "caller"


class Conflict(SandboxError):
    """The key of a create was used with other arguments; nothing was made. The message names the first that
    differs."""

    blame = "caller"


class StartError(SandboxError):
    """The sandbox did not come up. `phase` is the step that failed."""

    retryable = True

    def __init__(self, message: str, *, phase: str, hint: str = "", sandbox_id: str = "") -> None:
        super().__init__(message, hint=hint, sandbox_id=sandbox_id)
        self.phase = phase


class SandboxGone(SandboxError):
    """The sandbox has ended. killed: by its owner; expired: lifetime; idle: idle time; broken: it would not
    end a command and was ended as a whole; lost: its first process died."""

    def __init__(self, message: str, *, reason: GoneReason, hint: str = "", sandbox_id: str = "") -> None:
        super().__init__(message, hint=hint, sandbox_id=sandbox_id)
        self.reason: GoneReason = reason


class FileError(SandboxError):
    """A file operation failed inside the sandbox."""

    blame = "caller"

    def __init__(self, message: str, *, path: str, number: int, hint: str = "", sandbox_id: str = "") -> None:
        super().__init__(message, hint=hint, sandbox_id=sandbox_id)
        self.path = path
        self.errno = number


class FileMissing(FileError, FileNotFoundError):
    """No such file or directory in the sandbox."""


class FileTooLarge(FileError):
    """More than the caller allowed; nothing is returned in part."""


class UnsafePath(FileError):
    """Not a regular file or directory, or nested too deep."""


class NoSpace(FileError):
    """The writable layer has no bytes or inodes left."""


def is_shortage(error: OSError) -> bool:
    """Whether the host is out of something for now, rather than asked for what cannot be."""
    return error.errno in _SHORTAGES


@contextmanager
def translated(doing: str, *, sandbox_id: str = "") -> Generator[None]:
    """Turns an OSError of the block into a CapacityError where the host is out of something (descriptors,
    memory, threads, disk), else into a StartError of phase `create`. `doing` begins its message."""
    try:
        yield
    except OSError as error:
        words = f"{doing}: {error.strerror or error}" + (f": {error.filename}" if error.filename else "")
        if is_shortage(error):
            hint = "close or end something, or raise the limit (`ulimit -n`, `ulimit -u`), and try again"
            raise CapacityError(words, hint=hint, sandbox_id=sandbox_id) from error
        hint = "`dockyard doctor` says what this host lacks"
        raise StartError(words, phase="create", hint=hint, sandbox_id=sandbox_id) from error
