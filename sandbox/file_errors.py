"""What the error of a file operation is: by its number, and by what the policy says of the place."""

import errno
import os
import posixpath
from collections.abc import Iterator

from sandbox.errors import FileError, FileMissing, FileTooLarge, NoSpace, PathDenied, UnsafePath
from sandbox.policy import Policy
from sandbox.wire import Trouble

_WORDS: dict[int, str] = {
    Trouble.NOT_REGULAR: "is not a regular file",
    Trouble.TOO_DEEP: "is nested too deep",
    Trouble.BAD_MESSAGE: "the sandbox's init is older than this; run `python -m sandbox.native.build`",
    Trouble.SPEAKS: "is a file of the kernel's, which answers to who reads it: let a command read it",
    errno.EFBIG: "is larger than allowed",
    errno.ENOMEM: "the sandbox's memory is full, and what is written counts unless its layer is a disk",
    errno.ETOOMANYREFS: "commands hold as many descriptors under way in sockets as a user may have",
}
_KINDS: dict[int, type[FileError]] = {
    errno.ENOENT: FileMissing,
    errno.ENOTDIR: FileMissing,
    errno.EFBIG: FileTooLarge,
    errno.ENOSPC: NoSpace,
    errno.EDQUOT: NoSpace,
    errno.ENOMEM: NoSpace,
    Trouble.NOT_REGULAR: UnsafePath,
    Trouble.TOO_DEEP: UnsafePath,
    Trouble.SPEAKS: UnsafePath,
}
_OF_COMMANDS = frozenset({errno.ETOOMANYREFS})  # what only they bring about
_REFUSALS = frozenset({errno.EACCES, errno.EPERM, errno.EROFS})
# Of what a masked place shows nothing of: an empty directory, or the null device in a file's place.
_NOTHING = frozenset({errno.ENOENT, errno.ENOTDIR, Trouble.NOT_REGULAR})


class FileErrors:
    """One sandbox's."""

    def __init__(self, sandbox_id: str = "", policy: Policy | None = None) -> None:
        self._sandbox_id, self._policy = sandbox_id, policy or Policy()

    def of(self, number: int, path: str, to: str = "") -> FileError:
        """`number` is an errno or a Trouble; `to` is a second path, of a move."""
        where = f"{path} -> {to}" if to else path
        text = _WORDS.get(number) or os.strerror(number)
        field = next(self._fields(path, to), None)
        if field is not None and (number in _REFUSALS or (field == "masked" and number in _NOTHING)):
            return PathDenied(
                f"{where}: {text}: the policy has it in `{field}`",
                field=field, path=where, number=number, sandbox_id=self._sandbox_id,
            )  # fmt: skip
        kind = _KINDS.get(number, FileError)
        error = kind(f"{where}: {text}", path=where, number=number, sandbox_id=self._sandbox_id)
        if number in _OF_COMMANDS:
            error.blame = "agent"
        return error

    def _fields(self, *paths: str) -> Iterator[str]:
        """Those of the policy that name one of the paths, or what it lies in. Links are not followed, so a
        place that is reached by one is not found, and the error is then a plain one."""
        named = [posixpath.normpath(path) for path in paths if path]
        for field in ("hidden", "masked", "protected", "read_only"):
            places = [place.rstrip("/") for place in getattr(self._policy, field)]
            if any(path == place or path.startswith(f"{place}/") for path in named for place in places):
                yield field
