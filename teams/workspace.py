"""The code that agents work on: trees of files, the difference between two, and the box that holds one.

The runtime knows sandboxes only through `AgentSandbox`: where they come from (and how strong their walls
are) is the caller's choice.
"""

import difflib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import PurePosixPath
from typing import Protocol

from protocol.errors import DockyardError, InvalidInput

MAX_FILE_BYTES = 1_000_000  # a source file of more is no source file
MAX_DIFF_BYTES = 4_000_000
_DEBRIS = frozenset({"__pycache__", ".pytest_cache", ".hypothesis", ".git"})


class WorkspaceError(DockyardError):
    """A workspace holds what a diff may not carry (a link, a device, a file of too many bytes)."""


@dataclass(frozen=True, slots=True)
class Tree:
    """Regular files by their path relative to the workspace, and the paths of everything else."""

    files: Mapping[str, bytes]
    irregular: tuple[str, ...] = ()  # links, sockets, devices: seen, never followed


@dataclass(frozen=True, slots=True)
class Diff:
    """What to write and what to remove, to get from one tree to another. Paths are workspace-relative."""

    changed: Mapping[str, bytes] = field(default_factory=dict[str, bytes])
    removed: tuple[str, ...] = ()

    @property
    def paths(self) -> tuple[str, ...]:
        """Every path that the diff touches, sorted."""
        return tuple(sorted({*self.changed, *self.removed}))

    def __bool__(self) -> bool:
        return bool(self.changed or self.removed)


@dataclass(frozen=True, slots=True)
class CommandResult:
    """What one command left: `reason` is `exit` for an ordinary end, else why it was ended."""

    exit_code: int | None
    output: str  # standard output, then standard error
    reason: str = "exit"


class AgentSandbox(Protocol):
    """One agent's box, with the workspace at `/workspace` and no network.

    Used by one task at a time. Every call may be cancelled; a cancelled `run` ends the command's processes.
    Failures of the platform raise a `DockyardError`; a command that fails is a result, not an error.
    """

    @property
    def shortfalls(self) -> Sequence[str]:
        """What the host could not give it of what boxes get elsewhere."""
        ...

    async def run(self, command: str, *, timeout_s: float) -> CommandResult:
        """Runs a shell command in `/workspace`."""
        ...

    async def read(self, path: str) -> bytes | None:
        """A file of the workspace, or None where there is none."""
        ...

    async def write(self, path: str, data: bytes) -> None:
        """Writes a file of the workspace, its folders too."""
        ...

    async def remove(self, path: str) -> None:
        """Removes a file of the workspace; one that is not there is no error."""
        ...

    async def snapshot(self) -> Tree:
        """The whole workspace as it is now."""
        ...

    async def kill(self) -> None:
        """Ends every process and frees everything. May be called again."""
        ...


class SandboxFactory(Protocol):
    """Makes sandboxes; may be called by several tasks at once."""

    async def __call__(self, name: str, tree: Tree) -> AgentSandbox:
        """A fresh box whose workspace is a copy of `tree`. Cancelled, it leaves nothing behind."""
        ...


def checked_path(path: str) -> str:
    """`path` relative to the workspace, or `InvalidInput` where it would lead out of it."""
    pure = PurePosixPath(path.removeprefix("/workspace/"))
    if pure.is_absolute() or ".." in pure.parts or not pure.parts or "\x00" in path:
        raise InvalidInput(
            f"path {path!r} is not inside the workspace", hint="give it relative to /workspace"
        )
    return str(pure)


def within(path: str, roots: Sequence[str]) -> bool:
    """Whether `path` is one of `roots` or lies under one."""
    return any(path == root or path.startswith(root.rstrip("/") + "/") for root in roots)


def take_diff(clean: Tree, now: Tree) -> Diff:
    """What an agent changed. Caches of tools are left out.

    Raises `WorkspaceError` for links and other irregular files, and for too many bytes: a diff is carried
    to machines that trust it to be plain files.
    """
    irregular = [path for path in now.irregular if not _is_debris(path) and path not in clean.irregular]
    if irregular:
        raise WorkspaceError(
            f"{irregular[0]} is not a regular file", hint="remove it or make it a plain file"
        )
    changed = {
        path: data
        for path, data in now.files.items()
        if not _is_debris(path) and clean.files.get(path) != data
    }
    for path, data in changed.items():
        if len(data) > MAX_FILE_BYTES:
            raise WorkspaceError(f"{path} has {len(data)} bytes, a diff takes {MAX_FILE_BYTES} a file")
    if (total := sum(map(len, changed.values()))) > MAX_DIFF_BYTES:
        raise WorkspaceError(f"the diff has {total} bytes, at most {MAX_DIFF_BYTES} are taken")
    removed = tuple(sorted(path for path in clean.files if path not in now.files and not _is_debris(path)))
    return Diff(dict(sorted(changed.items())), removed)


def apply_diff(tree: Tree, diff: Diff) -> Tree:
    """`tree` after `diff`."""
    kept = {path: data for path, data in tree.files.items() if path not in diff.removed}
    return Tree({**kept, **diff.changed}, tree.irregular)


def render_diff(clean: Tree, diff: Diff) -> str:
    """The diff as unified text for people; binary files are one line each."""
    return "".join(_render_file(path, clean.files.get(path), diff.changed.get(path)) for path in diff.paths)


def _render_file(path: str, before: bytes | None, after: bytes | None) -> str:
    try:
        old = (before or b"").decode().splitlines(keepends=True)
        new = (after or b"").decode().splitlines(keepends=True)
    except UnicodeDecodeError:
        return f"Binary file {path} differs\n"
    names = ("/dev/null" if before is None else f"a/{path}", "/dev/null" if after is None else f"b/{path}")
    lines = difflib.unified_diff(old, new, *names)
    return "".join(line if line.endswith("\n") else line + "\n\\ no newline at the end\n" for line in lines)


def _is_debris(path: str) -> bool:
    return path.endswith(".pyc") or not _DEBRIS.isdisjoint(path.split("/"))
