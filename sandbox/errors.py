"""What can go wrong with a sandbox. Each error says who is to blame and whether trying again can help.

SandboxError
├── InvalidArgument   the caller's value is wrong                  (is an InvalidInput, exit code 2)
├── UnsupportedError  this host cannot enforce or run what was asked (a MissingCapability, exit code 3)
├── CapacityError     the host can, and is full                    (a ResourceShortage, exit code 4)
├── AuthError         the sandbox is another user's                (is a PermissionError)
├── QuotaError        a limit of the sandbox's own is reached; `limit` names it
├── VersionConflict   another version of the network policy holds than was expected
├── Conflict          a key that stands for another order of a sandbox
├── StartError        the sandbox did not come up; `phase` says how far it got
├── SandboxNotFound   there never was one of that id, as far as is known here (is a LookupError)
├── SandboxGone       it was there: `reason` is killed, expired, idle, broken, lost or forked
├── RequestTimeout    the caller's patience was over; what was asked goes on (is a TimeoutError)
├── CommandError      a command of `run(check=True)` did not end well; `result` is all of it
│   ├── CommandTimeout    its time was over                        (is a TimeoutError)
│   └── OutputLimit       it printed more than it may
├── PolicyDenied      the sandbox's policy does not have it; `field` names the one that decides
│   └── PathDenied    of a file or directory                       (is a FileError too)
└── FileError         a file operation inside the sandbox failed; `errno` and `path`
    ├── FileMissing   no such file or directory                    (is a FileNotFoundError)
    ├── FileTooLarge  more bytes or entries than the caller allowed
    ├── UnsafePath    a FIFO, device or socket, or a tree that is too deep
    └── NoSpace       the writable layer is full

Without `check=True` a command that ends badly is no error: `CommandResult.reason` says how it ended.
docs/sandbox-errors.md has the table: code, who is to blame, whether and when to try again.
"""

import errno
import os
from collections.abc import Generator, Mapping
from contextlib import contextmanager
from typing import Any, ClassVar, Literal, get_args

from protocol.errors import DockyardError, InvalidInput, MissingCapability, ResourceShortage
from sandbox.results import CommandResult, Reason

Blame = Literal["agent", "platform", "caller"]
GoneReason = Literal["killed", "expired", "idle", "broken", "lost", "forked"]
RETRY_AFTER_S = 1.0  # nobody knows when others end
_SHORTAGES = frozenset(
    {errno.EMFILE, errno.ENFILE, errno.ENOMEM, errno.ENOBUFS, errno.EAGAIN, errno.ENOSPC, errno.EDQUOT}
    | {errno.ETOOMANYREFS}  # descriptors that this user has under way in sockets
)
_ENDED_BY: dict[GoneReason, Blame] = {
    **{"killed": "caller", "expired": "caller", "idle": "caller"},
    **{"broken": "agent", "lost": "platform", "forked": "caller"},
}
# What a record has where the error has it; each is an attribute of the same name.
_DETAILS = ("capability", "limit", "field", "path", "errno", "exit_code")


class SandboxError(DockyardError):
    """Root of the tree.

    `code` is stable, for programs to decide by; `reason` and `phase` are empty where there is nothing to
    tell apart. `retry_after_s` is when to try again, None where that cannot help. `sandbox_id` is empty where
    no sandbox exists yet. `node` is the name of the machine that it is about.
    """

    code: ClassVar[str] = "sandbox_error"
    blame: Blame = "platform"
    retry_after_s: float | None = None
    reason: Any = ""  # text; those that have one say which
    phase: str = ""

    def __init__(self, message: str, *, hint: str = "", sandbox_id: str = "") -> None:
        super().__init__(_printable(message), hint=hint)
        self.sandbox_id = sandbox_id
        self.node = os.uname().nodename

    @property
    def retryable(self) -> bool:
        """Whether the same call may succeed later."""
        return self.retry_after_s is not None

    def record(self) -> dict[str, Any]:
        """All of it for machines, as `dockyard --json` prints it; `error_of` makes an error of it again."""
        common = {
            **super().record(),
            "reason": self.reason,
            "phase": self.phase,
            "blame": self.blame,
            "retryable": self.retryable,
            "retry_after_s": self.retry_after_s,
            "sandbox_id": self.sandbox_id,
            "node": self.node,
        }
        details = {name: getattr(self, name, None) for name in _DETAILS}
        return {**common, **{name: value for name, value in details.items() if value is not None}}


class InvalidArgument(SandboxError, InvalidInput):
    """The caller's value is wrong; the message names field and value."""

    code = "invalid_argument"
    blame = "caller"


class UnsupportedError(SandboxError, MissingCapability):
    """This host lacks what was asked for. Nothing was started, nothing was weakened. `capability` is what the
    doctor calls it, where it has a name for it."""

    code = "unsupported"
    blame = "caller"

    def __init__(self, message: str, *, capability: str = "", hint: str = "", sandbox_id: str = "") -> None:
        super().__init__(message, hint=hint, sandbox_id=sandbox_id)
        self.capability = capability


class CapacityError(SandboxError, ResourceShortage):
    """The host is out of something for now."""

    code = "capacity"
    retry_after_s = RETRY_AFTER_S


class AuthError(SandboxError, PermissionError):
    """The sandbox, or the directory that knows of it, is another user's."""

    code = "not_yours"
    blame = "caller"


class QuotaError(SandboxError):
    """A limit of the sandbox's own is reached: not the host's, so other sandboxes do not feel it. `limit` is
    what it is called in `Sandbox.create`, or `commands` for those that run at a time."""

    code = "quota"
    blame = "agent"
    retry_after_s = RETRY_AFTER_S  # when what holds it has ended

    def __init__(self, message: str, *, limit: str, hint: str = "", sandbox_id: str = "") -> None:
        super().__init__(message, hint=hint, sandbox_id=sandbox_id)
        self.limit = limit


class VersionConflict(SandboxError):
    """Someone else has changed the network policy meanwhile; nothing was changed now."""

    code = "version_conflict"
    blame = "caller"


class Conflict(SandboxError):
    """The key of a create was used with other arguments; nothing was made. The message names the first that
    differs."""

    code = "conflict"
    blame = "caller"


class StartError(SandboxError):
    """The sandbox did not come up. `phase` is the step that failed."""

    code = "start_failed"
    retry_after_s = RETRY_AFTER_S

    def __init__(self, message: str, *, phase: str, hint: str = "", sandbox_id: str = "") -> None:
        super().__init__(message, hint=hint, sandbox_id=sandbox_id)
        self.phase = phase


class SandboxNotFound(SandboxError, LookupError):
    """Neither a sandbox that lives nor the record of one that has: another machine, another state directory,
    or no id of ours."""

    code = "not_found"
    blame = "caller"


class SandboxGone(SandboxError):
    """The sandbox has ended. killed: by its owner; expired: lifetime; idle: idle time; broken: it would not
    end a command and was ended as a whole; lost: its first process or its owner died; forked: it lives, and
    is the process's that this one was forked from."""

    code = "gone"

    def __init__(self, message: str, *, reason: GoneReason, hint: str = "", sandbox_id: str = "") -> None:
        super().__init__(message, hint=hint, sandbox_id=sandbox_id)
        self.reason: GoneReason = reason
        self.blame = _ENDED_BY[reason]


class RequestTimeout(SandboxError, TimeoutError):
    """The caller did not want to wait any longer. What was asked for goes on, and can be waited for again."""

    code = "request_timeout"
    blame = "caller"
    retry_after_s = 0.0


class CommandError(SandboxError):
    """A command did not end with exit code 0. It has ended, and `result` is its result."""

    code = "command_failed"
    blame = "agent"

    def __init__(self, message: str, *, result: CommandResult, hint: str = "", sandbox_id: str = "") -> None:
        super().__init__(message, hint=hint, sandbox_id=sandbox_id)
        self.result = result
        self.reason: Reason = result.reason
        self.exit_code = 1 if result.exit_code is None else result.exit_code  # of a process that ends by it

    @property
    def stdout(self) -> str:
        """What it printed."""
        return self.result.stdout

    @property
    def stderr(self) -> str:
        """What it printed as errors."""
        return self.result.stderr


class CommandTimeout(CommandError, TimeoutError):
    """Its time was over, and all its processes are gone."""

    code = "command_timeout"


class OutputLimit(CommandError):
    """It printed more than it may, and was ended for that."""

    code = "output_limit"


class PolicyDenied(SandboxError):
    """The sandbox's policy does not have what was asked for. `field` is the policy's."""

    code = "policy_denied"
    blame = "caller"

    def __init__(self, message: str, *, field: str, hint: str = "", sandbox_id: str = "") -> None:
        super().__init__(message, hint=hint, sandbox_id=sandbox_id)
        self.field = field


class FileError(SandboxError):
    """A file operation failed inside the sandbox."""

    code = "file_error"
    blame = "caller"

    def __init__(self, message: str, *, path: str, number: int, hint: str = "", sandbox_id: str = "") -> None:
        super().__init__(message, hint=hint, sandbox_id=sandbox_id)
        self.path = path
        self.errno = number

    def __reduce__(self) -> tuple[Any, ...]:
        """Those that are an OSError keep the number elsewhere than in `__dict__`."""
        make, arguments, state = super().__reduce__()
        return make, arguments, {**state, "errno": self.errno}


class FileMissing(FileError, FileNotFoundError):
    """No such file or directory in the sandbox."""

    code = "file_missing"


class FileTooLarge(FileError):
    """More than the caller allowed; nothing is returned in part."""

    code = "file_too_large"


class UnsafePath(FileError):
    """Not a regular file or directory, or nested too deep."""

    code = "unsafe_path"


class NoSpace(FileError):
    """The writable layer has no bytes or inodes left, or the sandbox's memory has none (ENOMEM)."""

    code = "no_space"
    blame = "agent"


class PathDenied(PolicyDenied, FileError):
    """The policy names the place, as one that may not be read or not be written."""

    code = "path_denied"

    def __init__(
        self, message: str, *, field: str, path: str, number: int, hint: str = "", sandbox_id: str = ""
    ) -> None:
        SandboxError.__init__(self, message, hint=hint, sandbox_id=sandbox_id)
        self.field, self.path, self.errno = field, path, number


def classes() -> tuple[type[SandboxError], ...]:
    """The whole tree, roots before branches."""

    def below(kind: type[SandboxError]) -> list[type[SandboxError]]:
        return [kind, *(each for child in kind.__subclasses__() for each in below(child))]

    return tuple(dict.fromkeys(each for each in below(SandboxError) if each.__module__ == __name__))


def error_of(record: Mapping[str, Any]) -> SandboxError:
    """An error of a `record`, such as another process has sent: of its class, with what it says. One of an
    unknown code is a SandboxError. A record has no command's result, so it makes no CommandError."""
    kinds = {each.code: each for each in classes() if not issubclass(each, CommandError)}
    kind = kinds.get(str(record.get("code")), SandboxError)
    message = str(record.get("message", ""))
    error = kind.__new__(kind, message)
    SandboxError.__init__(
        error, message, hint=str(record.get("hint", "")), sandbox_id=str(record.get("sandbox_id", ""))
    )
    error.node = str(record.get("node", ""))
    for name in (*_DETAILS, "phase", "blame", "retry_after_s"):
        if name in record:
            setattr(error, name, record[name])
    if kind is SandboxGone:
        known = record.get("reason") in get_args(GoneReason)
        error.reason = str(record["reason"]) if known else "lost"
    return error


def _printable(message: str) -> str:
    """Names in it may be a sandbox's: none begins a line, moves a terminal's cursor or is no Unicode."""
    return "".join(each if each.isprintable() else ascii(each)[1:-1] for each in message)


def is_shortage(error: OSError) -> bool:
    """Whether the host is out of something for now, rather than asked for what cannot be."""
    return error.errno in _SHORTAGES


@contextmanager
def telling_shortage(doing: str, *, sandbox_id: str = "") -> Generator[None]:
    """Turns an OSError of the block into a CapacityError where the host is out of something (descriptors,
    memory, threads, disk). `doing` begins its message. Whatever else is raised stays as it is, also what is a
    SandboxError already, some of which are OSErrors too."""
    try:
        yield
    except OSError as error:
        if isinstance(error, SandboxError) or not is_shortage(error):
            raise
        hint = "close or end something, or raise the limit (`ulimit -n`, `ulimit -u`), and try again"
        raise CapacityError(_words(doing, error), hint=hint, sandbox_id=sandbox_id) from error


@contextmanager
def translated(doing: str, *, sandbox_id: str = "") -> Generator[None]:
    """As `telling_shortage`, and any other OSError into a StartError of phase `create`; of a sandbox that is
    there, into a plain SandboxError. One of ours goes on as it is, and says of which sandbox."""
    try:
        with telling_shortage(doing, sandbox_id=sandbox_id):
            yield
    except SandboxError as error:
        error.sandbox_id = error.sandbox_id or sandbox_id
        raise
    except OSError as error:
        words, hint = _words(doing, error), "`dockyard doctor` says what this host lacks"
        if sandbox_id:
            raise SandboxError(words, hint=hint, sandbox_id=sandbox_id) from error
        raise StartError(words, phase="create", hint=hint, sandbox_id=sandbox_id) from error


def _words(doing: str, error: OSError) -> str:
    return f"{doing}: {error.strerror or error}" + (f": {error.filename}" if error.filename else "")
