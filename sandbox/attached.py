"""A sandbox of another process: what is asked of it goes to its owner, which does it and answers.

The owner stays the only reader of the control socket, so both may work at the same time. Terminals, input
while a command runs, sessions and whole directories are for the owner's process.
"""

import json
from base64 import b64decode, b64encode
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from sandbox.answers import MAX_FILE_BYTES, entry_of, result_of
from sandbox.arguments import check_seconds, check_type, check_whole
from sandbox.checking import checked
from sandbox.door import Call, ask, understood
from sandbox.entries import Entry
from sandbox.errors import InvalidArgument, UnsupportedError
from sandbox.feed import OnOutput, Stream, Watchers
from sandbox.files import PATIENCE_S
from sandbox.named import Named
from sandbox.orders import checked_env
from sandbox.processes import ProcessKey
from sandbox.results import CommandResult
from sandbox.running import LONGEST_S
from sandbox.status import IdleWish, SandboxStatus, status_of
from sandbox.texts import utf8
from sandbox.undisturbed import undisturbed, undisturbed_call

T = TypeVar("T")
_SOON_S = 30.0
_AT_LAST_S = PATIENCE_S + _SOON_S  # of what its owner may try for so long without a word
_PLAIN = (str, int, float, type(None))


class Line:
    """To the owner of one sandbox; a connection a call. Thread-safe."""

    def __init__(self, sandbox_id: str, state_dir: Path, owner: ProcessKey) -> None:
        self.id = sandbox_id
        self._state_dir, self._owner = state_dir, owner

    @undisturbed_call
    def ask(self, do: str, patience_s: float = _SOON_S, /, **words: object) -> Any:
        """Blocks for the answer. Raises what the owner raises, and as `door.ask`."""
        return ask(self._owner, self._request(do, words), patience_s)

    def ask_for(self, read: Callable[[Any], T], do: str, /, **words: object) -> T:
        """As `ask`, and what `read` makes of the answer."""
        return self.understood(read, self.ask(do, **words))

    def understood(self, read: Callable[[Any], T], answer: Any) -> T:
        """As `door.understood`."""
        return understood(self._owner, read, answer)

    def ask_and_stay(self, do: str, take: Callable[[Any], None], /, **words: object) -> Any:
        """The same for what the owner breaks off when whoever asks has left: so does an interrupt, which goes
        on at once, and a second one beside it. `take` gets what it tells before its answer."""
        call = Call(self._owner, self._request(do, words), _SOON_S, take)
        return undisturbed(call.ask, stop=call.break_off, patience_s=0)

    def _request(self, do: str, words: Mapping[str, object]) -> dict[str, object]:
        for name, value in words.items():
            if not isinstance(value, _PLAIN):
                try:
                    json.dumps(value)
                except (TypeError, ValueError) as error:
                    raise InvalidArgument(f"{name} has what is no text: {error}") from None
        return {"do": do, "id": self.id, "state_dir": str(self._state_dir), **words}


class _OwnersOnly(UnsupportedError, AttributeError):
    """For `hasattr`, too, it is not there."""


class _Attached(Named):
    if not TYPE_CHECKING:  # a type checker is to see what there is

        def __getattr__(self, name: str) -> None:
            raise _OwnersOnly(
                f"{type(self).__name__} has no {name!r}",
                hint=f"it has what help({type(self).__name__}) says; the rest is for the owner's process",
            )


class AttachedSandbox(_Attached):
    """Made by `sandboxes.attach`. Thread-safe. Calls raise what the owner's raise; SandboxGone where
    it has ended, UnsupportedError where it does not answer."""

    def __init__(self, line: Line) -> None:
        self.id = line.id
        self._line = line
        self.commands = AttachedCommands(line)
        self.files = AttachedFiles(line)

    def get_info(self) -> SandboxStatus:
        """See `Sandbox.get_info`."""
        return self._line.ask_for(status_of, "info")

    def set_timeout(self, lifetime_s: float | None = None, *, idle_s: IdleWish = "keep") -> SandboxStatus:
        """See `Sandbox.set_timeout`."""
        return self._line.ask_for(status_of, "set_timeout", lifetime_s=lifetime_s, idle_s=idle_s)

    def pause(self) -> None:
        """See `Sandbox.pause`."""
        self._line.ask("pause")

    def resume(self) -> None:
        """See `Sandbox.resume`."""
        self._line.ask("resume")

    def kill(self) -> None:
        """Ends it. SandboxGone where it has ended already."""
        self._line.ask("kill")


class AttachedCommands(_Attached):
    """`commands` of a sandbox of another process."""

    def __init__(self, line: Line) -> None:
        self._line = line

    def run(
        self,
        cmd: str | Sequence[str],
        *,
        timeout_s: float | None = None,
        cwd: str = "/workspace",
        env: Mapping[str, str] | None = None,
        output_bytes: int | None = None,
        stdin: bytes | str = b"",
        on_stdout: OnOutput | None = None,
        on_stderr: OnOutput | None = None,
        check: bool = False,
    ) -> CommandResult:
        """See `Commands.run`. Ends with the process that asks, if that is first: so does an interrupt. The
        watchers are called by whoever waits for the result, or on a thread beside it."""
        check_seconds("timeout_s", timeout_s, LONGEST_S)
        check_type("cmd", cmd, str, Sequence)
        words = cmd if isinstance(cmd, str) else list(cmd)
        told = _Told(Watchers(on_stdout, on_stderr), self._line)
        answer = self._line.ask_and_stay(
            "commands.run", told.take, cmd=words, timeout_s=timeout_s,
            cwd=cwd, env=dict(checked_env(env or {})), output_bytes=output_bytes,
            stdin=_encoded(utf8("stdin", stdin)), tell_output=told.is_wanted,
        )  # fmt: skip
        result = self._line.understood(result_of, answer)
        told.finish(result)
        return checked(result, self._line.id) if check else result


class _Told:
    """What a command prints, told by the owner before its result."""

    def __init__(self, watchers: Watchers, line: Line) -> None:
        self._line = line
        self.is_wanted = watchers.any()
        self._streams = (Stream(watchers.on_stdout), Stream(watchers.on_stderr))
        self._has_come = False

    def take(self, piece: Any) -> None:
        number, data = self._line.understood(_piece_of, piece)
        self._has_come = True
        self._streams[number].give(data)

    def finish(self, result: CommandResult) -> None:
        """An owner of an earlier version has told nothing, and what it kept is all there is."""
        for stream, kept in zip(self._streams, (result.stdout_bytes, result.stderr_bytes), strict=True):
            if not self._has_come:
                stream.give(kept)
            stream.give(None)


class AttachedFiles(_Attached):
    """`files` of a sandbox of another process; at most 16 MiB in one call."""

    def __init__(self, line: Line) -> None:
        self._line = line

    def read(self, path: str, *, max_bytes: int = MAX_FILE_BYTES) -> bytes:
        """See `Files.read`."""
        check_whole("max_bytes", max_bytes, 0, 1 << 62)
        most = min(max_bytes, MAX_FILE_BYTES)
        return self._line.ask_for(b64decode, "files.read", path=path, max_bytes=most)

    def write(self, path: str, data: bytes | str, *, mode: int = 0o644) -> None:
        """See `Files.write`."""
        content = utf8("data", data)
        if len(content) > MAX_FILE_BYTES:
            raise InvalidArgument(
                f"data of {len(content)} bytes, at most {MAX_FILE_BYTES} go to another process at a time",
                hint="write it in the owner's process",
            )
        self._line.ask("files.write", _AT_LAST_S, path=path, data=_encoded(content), mode=mode)

    def list(self, path: str = "/workspace") -> tuple[Entry, ...]:
        """See `Files.list`."""
        return self._line.ask_for(_entries_of, "files.list", path=path)

    def exists(self, path: str) -> bool:
        """See `Files.exists`."""
        return bool(self._line.ask("files.exists", path=path))

    def make_dir(self, path: str) -> None:
        """See `Files.make_dir`."""
        self._line.ask("files.make_dir", _AT_LAST_S, path=path)

    def remove(self, path: str) -> None:
        """See `Files.remove`."""
        self._line.ask("files.remove", _AT_LAST_S, path=path)

    def rename(self, path: str, to: str) -> None:
        """See `Files.rename`."""
        self._line.ask("files.rename", _AT_LAST_S, path=path, to=to)


def _encoded(data: bytes) -> str:
    return b64encode(data).decode()


def _piece_of(piece: list[Any]) -> tuple[int, bytes]:
    """Of which stream, and what."""
    number, data = piece
    if number not in (0, 1):
        raise ValueError("of no stream")
    return int(number), b64decode(data)


def _entries_of(answer: Any) -> tuple[Entry, ...]:
    return tuple(entry_of(each) for each in answer)
