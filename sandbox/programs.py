"""Runs a program of the host's to its end, and knows how that was.

`subprocess` takes a program for one that has succeeded when somebody else has learnt how it ended: the
kernel, in a process that ignores SIGCHLD, or a thread that waits for any child.
"""

import errno
import os
import select
import subprocess
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path

from sandbox.errors import UnsupportedError
from sandbox.memory_files import memory_file


def run_program(
    words: Sequence[str], *, given: str = "", fds: Sequence[int] = (), patience_s: float | None = None
) -> "subprocess.CompletedProcess[str]":
    """`given` is its input; `fds` go along. Blocks until it has ended, and kills it when interrupted. OSError
    where it cannot be started, TimeoutError where that takes longer, and UnsupportedError where nobody learns
    here how it ended."""
    with ExitStack() as on_end:
        streams: list[int] = []
        for content in (given.encode(), b"", b""):
            streams.append(memory_file(content))
            on_end.callback(os.close, streams[-1])
        source, output, errors = streams
        process = subprocess.Popen(words, stdin=source, stdout=output, stderr=errors, pass_fds=tuple(fds))
        try:
            _await_end(process.pid, words, patience_s)
        except BaseException:
            process.kill()
            raise
        finally:
            code = process.wait()
        return subprocess.CompletedProcess(words, code, _text(output), _text(errors))


def _await_end(pid: int, words: Sequence[str], patience_s: float | None) -> None:
    """It is there to be waited for afterwards: only then does anybody know how it ended."""
    try:
        with ExitStack() as on_end:
            handle = os.pidfd_open(pid)
            on_end.callback(os.close, handle)
            os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT | os.WNOHANG)  # ours, no stranger of its pid
            ended = select.poll()
            ended.register(handle, select.POLLIN)
            if not ended.poll(None if patience_s is None else patience_s * 1e3):
                raise OSError(errno.ETIMEDOUT, f"{Path(words[0]).name} has not ended in {patience_s:g} s")
            os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT)
    except (ChildProcessError, ProcessLookupError) as error:
        raise UnsupportedError(
            f"nobody learns here how {Path(words[0]).name} ended: this process ignores SIGCHLD, or something "
            "in it waits for children that are not its own",
            hint="signal.signal(signal.SIGCHLD, signal.SIG_DFL), and wait for children by their pids",
        ) from error


def _text(fd: int) -> str:
    """All of a file in memory."""
    os.lseek(fd, 0, os.SEEK_SET)
    with open(fd, encoding="utf-8", errors="replace", closefd=False) as file:
        return file.read()
