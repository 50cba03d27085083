"""The root of every error that Dockyard raises on purpose.

DockyardError
├── InvalidInput      a field of a request, a file or a flag is wrong      (exit code 2)
├── MissingCapability this host lacks a tool or a kernel feature           (exit code 3)
├── ResourceShortage  a port, memory or disk is not to be had              (exit code 4)
└── one subtree a package (`sandbox.errors`, `engine.errors`, …)           (exit code 1)
"""

from typing import Any, ClassVar


class DockyardError(Exception):
    """Says what is wrong and the way out.

    `message` names the thing and its value; `hint` is the next step that a person can take.
    """

    exit_code = 1
    code: ClassVar[str] = "failed"  # stable, for programs; a class without its own has its parent's

    def __init__(self, message: str, *, hint: str = "") -> None:
        super().__init__(message)
        self.message = message
        self.hint = hint

    def __str__(self) -> str:
        return f"{self.message} ({self.hint})" if self.hint else self.message

    def record(self) -> dict[str, Any]:
        """The error for machines, in values of JSON; a package may add fields of its own."""
        return {"type": type(self).__name__, "code": self.code, "message": self.message, "hint": self.hint}

    def __reduce__(self) -> tuple[Any, ...]:
        """Errors cross processes whole; `args`, with which pickle calls the class, hold the message alone."""
        return _rebuilt, (type(self), self.args), self.__dict__


class InvalidInput(DockyardError):
    """A value that the caller gave cannot be used."""

    exit_code, code = 2, "invalid_input"


class MissingCapability(DockyardError):
    """This host has no such tool, package or kernel feature. Nothing is downgraded silently."""

    exit_code, code = 3, "missing_capability"


class ResourceShortage(DockyardError):
    """The host has the feature, and not enough of it: memory, a port, disk."""

    exit_code, code = 4, "shortage"


def _rebuilt(kind: type[DockyardError], args: tuple[Any, ...]) -> DockyardError:
    """An error without a call of its constructor; pickle fills in the attributes afterwards."""
    error = kind.__new__(kind, *args)
    error.args = args
    return error
