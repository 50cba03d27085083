"""Hands a command's output to its caller's functions while it runs, on a thread of their own.

The sandbox's thread keeps all deadlines, so it must not wait for a caller: a slow function delays its own
next piece and the command's result, and nothing else. What waits for it is bounded by the output limit.
"""

import codecs
import inspect
from collections.abc import Callable
from dataclasses import dataclass
from queue import SimpleQueue

from protocol.threads import NoThread, TimelyThread
from sandbox.errors import CapacityError, InvalidArgument

OnOutput = Callable[[str], None]


@dataclass(frozen=True, slots=True)
class BytesWatcher:
    """A watcher that takes what is printed byte by byte as it was, wherever a piece ends."""

    take: Callable[[bytes], None]

    def __call__(self, text: str) -> None:
        """Of asyncio's, which have text alone."""
        self.take(text.encode())


@dataclass(frozen=True, slots=True)
class Watchers:
    """Functions that take text as it is printed: pieces never end inside of a UTF-8 sequence."""

    on_stdout: OnOutput | None = None
    on_stderr: OnOutput | None = None

    def __post_init__(self) -> None:
        check_watcher("on_stdout", self.on_stdout)
        check_watcher("on_stderr", self.on_stderr)

    def any(self) -> bool:
        """False where nobody watches."""
        return self.on_stdout is not None or self.on_stderr is not None


class Feed:
    """One command's. Pieces go in from the channel's thread; `finish` follows the last, once.

    Raises CapacityError where the host has no more threads. A function that raises gets no more pieces;
    `failed` is called for it, and what it raised is handed to `finish`'s function.
    """

    def __init__(self, watchers: Watchers, failed: Callable[[], None]) -> None:
        self._queue: SimpleQueue[tuple[int, bytes] | Callable[[BaseException | None], None]] = SimpleQueue()
        self._streams = (Stream(watchers.on_stdout), Stream(watchers.on_stderr))
        self._failed = failed
        try:
            TimelyThread(self._run, name="dockyard-output").start()
        except NoThread as error:
            raise CapacityError(f"sandbox: {error}", hint="raise `ulimit -u`, or end something") from error

    def add(self, stream: int, data: bytes) -> None:
        """0 is the output, 1 the error output."""
        self._queue.put((stream, data))

    def finish(self, done: Callable[[BaseException | None], None]) -> None:
        """Calls `done` when all pieces have been taken, with what a function raised."""
        self._queue.put(done)

    def _run(self) -> None:
        error: BaseException | None = None
        while not callable(item := self._queue.get()):
            error = error or self._give(*item)
        for number in range(len(self._streams)):
            error = error or self._give(number, None)
        self._failed = _nothing  # or the command is kept by what it keeps
        item(error)

    def _give(self, stream: int, data: bytes | None) -> BaseException | None:
        try:
            self._streams[stream].give(data)
        except BaseException as error:  # the caller's own, who gets it back
            self._failed()
            return error
        return None


def check_watcher(field: str, watcher: OnOutput | None) -> None:
    """InvalidArgument for what is no function, or one that would have to be awaited."""
    if watcher is None:
        return
    if not callable(watcher):
        raise InvalidArgument(f"{field} is of type {type(watcher).__name__}", hint="give a function")
    call = getattr(watcher, "__call__", None)  # noqa: B004 - of an object, which may be asynchronous
    if inspect.iscoroutinefunction(watcher) or inspect.iscoroutinefunction(call):
        raise _asynchronous(field)


def give_text(watcher: OnOutput, text: str) -> None:
    """Calls it. InvalidArgument where it has only made a coroutine of it, which nobody would run, and
    RuntimeError for StopIteration: asyncio's futures take none, so whoever waits for it would not end."""
    try:
        answer: object = watcher(text)
    except StopIteration as error:
        raise RuntimeError("a watcher raised StopIteration") from error
    if inspect.iscoroutine(answer):
        answer.close()
        raise _asynchronous("a watcher")


def _asynchronous(name: str) -> InvalidArgument:
    return InvalidArgument(
        f"{name} is asynchronous, and nothing awaits it",
        hint="give a plain function; one such is `put_nowait` of an asyncio.Queue that a task reads",
    )


def _nothing() -> None:
    """What is to be done once all is over."""


class Stream:
    """Bytes as they come, for a watcher. For one thread."""

    def __init__(self, watcher: OnOutput | None) -> None:
        self._watcher = watcher
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")

    def give(self, data: bytes | None) -> None:
        """None ends the stream. Raises what the watcher raises."""
        if isinstance(self._watcher, BytesWatcher):
            if data:
                self._watcher.take(data)
            return
        text = self._decoder.decode(data or b"", data is None)
        if text and self._watcher is not None:
            give_text(self._watcher, text)
