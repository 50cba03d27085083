"""What a sandbox's command prints, passed on to this one's own stdout and stderr as it comes."""

import os
import select
import sys
from functools import partial
from typing import IO, TypedDict

from cli.console import STREAMS, writing_to
from sandbox.feed import BytesWatcher


class Watching(TypedDict):
    """Two options of `commands.run`."""

    on_stdout: BytesWatcher | None
    on_stderr: BytesWatcher | None


def passing_on(*, is_wanted: bool) -> Watching:
    """Each byte as it was, written before the next is taken. A watcher waits for a reader that is slow, and
    raises BrokenPipeError for one that has gone, which ends the command."""
    out, err = (sys.stdout, sys.stderr) if is_wanted else (None, None)
    return {"on_stdout": _watcher(out, STREAMS[0]), "on_stderr": _watcher(err, STREAMS[1])}


def _watcher(stream: IO[str] | None, name: str) -> BytesWatcher | None:
    """None where it was closed before this process began: its number may be another file's by now."""
    return None if stream is None else BytesWatcher(partial(_write, stream.fileno(), name))


def _write(fd: int, name: str, data: bytes) -> None:
    rest = memoryview(data)
    while rest:
        try:
            with writing_to(name):
                rest = rest[os.write(fd, rest) :]
        except BlockingIOError:  # whoever shares the pipe has made it so
            select.select((), (fd,), ())
