"""What an owner does for other processes of its user, by name, and the values that go there and back as JSON.

Arguments are looked at before they are used: whoever asks may be of another version, and what is wrong is an
error there, not a fault here.
"""

from base64 import b64decode, b64encode
from collections.abc import Callable, Mapping
from dataclasses import asdict
from functools import partial
from typing import Any, Protocol

from sandbox.commands import Commands
from sandbox.entries import Entry
from sandbox.errors import InvalidArgument, RequestTimeout
from sandbox.feed import BytesWatcher
from sandbox.files import Files
from sandbox.results import CommandResult, Denial
from sandbox.status import IdleWish, SandboxStatus

MAX_FILE_BYTES = 16 << 20  # of one call
_LOOK_S = 0.25  # whether whoever asked is still there
Words = Mapping[str, Any]
HasLeft = Callable[[], bool]  # whoever asked
Tell = Callable[[object], None]  # something before the answer


class Asked(Protocol):
    """A sandbox of this process."""

    commands: Commands
    files: Files

    @property
    def is_paused(self) -> bool: ...
    def get_info(self) -> SandboxStatus: ...
    def set_timeout(self, lifetime_s: float | None = None, *, idle_s: IdleWish = "keep") -> SandboxStatus: ...
    def pause(self) -> None: ...
    def resume(self) -> None: ...
    def kill(self) -> None: ...


def answer(box: Asked, do: str, words: Words, has_left: HasLeft, tell: Tell = lambda piece: None) -> Any:
    """The answer, in values of JSON. Blocks for it; what a command prints is told before, where that is asked
    for. Raises SandboxError, KeyError or TypeError for what is no
    request."""
    if do == "commands.run":
        return _run(box, words, has_left, tell)
    return _DEEDS[do](box, words)


def _run(box: Asked, words: Words, has_left: HasLeft, tell: Tell) -> dict[str, Any]:
    watchers: list[BytesWatcher | None] = [None, None]
    if words.get("tell_output") is True:
        watchers = [BytesWatcher(partial(_tell_output, tell, stream)) for stream in range(2)]
    cmd, env = words["cmd"], {str(name): str(value) for name, value in words["env"].items()}
    command = box.commands.start(
        cmd if isinstance(cmd, str) else [str(each) for each in cmd],
        timeout_s=box.commands.timeout_of_run(_seconds(words["timeout_s"])), cwd=str(words["cwd"]), env=env,
        output_bytes=_number(words["output_bytes"]), stdin=b64decode(words["stdin"]),
        on_stdout=watchers[0], on_stderr=watchers[1],
    )  # fmt: skip
    while True:
        try:
            return _record(command.wait(_LOOK_S))
        except RequestTimeout:
            if has_left() and not box.is_paused:  # it ends when its sandbox goes on, and not for this
                command.kill()


def _tell_output(tell: Tell, stream: int, data: bytes) -> None:
    tell([stream, b64encode(data).decode()])


def _kill(box: Asked, words: Words) -> dict[str, Any]:
    del words
    before = box.get_info()
    box.kill()
    return before.record()


def _set_timeout(box: Asked, words: Words) -> dict[str, Any]:
    idle_s = words["idle_s"]
    wish: IdleWish = "keep" if idle_s == "keep" else _seconds(idle_s)
    return box.set_timeout(_seconds(words["lifetime_s"]), idle_s=wish).record()


def _read(box: Asked, words: Words) -> str:
    limit = min(_number(words["max_bytes"]) or 0, MAX_FILE_BYTES)
    return b64encode(box.files.read(str(words["path"]), max_bytes=limit)).decode()


_DEEDS: dict[str, Callable[[Asked, Words], Any]] = {
    "info": lambda box, _: box.get_info().record(),
    "kill": _kill,
    "set_timeout": _set_timeout,
    "pause": lambda box, _: box.pause(),
    "resume": lambda box, _: box.resume(),
    "files.read": _read,
    "files.write": lambda box, words: box.files.write(
        str(words["path"]), b64decode(words["data"]), mode=_number(words["mode"]) or 0
    ),
    "files.list": lambda box, words: [asdict(each) for each in box.files.list(str(words["path"]))],
    "files.exists": lambda box, words: box.files.exists(str(words["path"])),
    "files.make_dir": lambda box, words: box.files.make_dir(str(words["path"])),
    "files.remove": lambda box, words: box.files.remove(str(words["path"])),
    "files.rename": lambda box, words: box.files.rename(str(words["path"]), str(words["to"])),
}


def _record(result: CommandResult) -> dict[str, Any]:
    streams = {name: b64encode(getattr(result, name)).decode() for name in ("stdout_bytes", "stderr_bytes")}
    return {**asdict(result), **streams}


def result_of(record: Words) -> CommandResult:
    """A command's result that has come as JSON."""
    fields: dict[str, Any] = dict(record)
    fields |= {name: b64decode(record[name]) for name in ("stdout_bytes", "stderr_bytes")}
    fields["denials"] = tuple(Denial(**each) for each in record["denials"])
    return CommandResult(**fields)


def entry_of(record: Words) -> Entry:
    """One name of a directory that has come as JSON."""
    return Entry(**record)


def _seconds(value: object) -> float | None:
    if value is None or (isinstance(value, int | float) and not isinstance(value, bool)):
        return value
    raise InvalidArgument(f"{value!r} is no number of seconds")


def _number(value: object) -> int | None:
    if value is None or (isinstance(value, int) and not isinstance(value, bool)):
        return value
    raise InvalidArgument(f"{value!r} is no whole number")
