"""Network namespaces: made, held by a descriptor, entered by a thread of its own."""

import ctypes
import errno
import os
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

from protocol.threads import NoThread, TimelyThread
from sandbox.errors import StartError, UnsupportedError
from sandbox.programs import run_program
from sandbox.texts import one_line

T = TypeVar("T")

CAPABILITY = "egress policy"  # as the doctor calls what sandboxes with a network need
_CLONE_NEWNET = 0x40000000
_PATIENCE_S = 20.0


def open_namespace(path: Path | None = None) -> int:
    """A descriptor of a namespace file, by default of the one that this process is in."""
    return os.open(path or "/proc/self/ns/net", os.O_RDONLY | os.O_CLOEXEC)


def new_namespace() -> int:
    """A descriptor of a fresh namespace, in which nothing is up. OSError."""
    return run_in(None, lambda: os.open("/proc/thread-self/ns/net", os.O_RDONLY | os.O_CLOEXEC))


def run_in(namespace: int | None, action: Callable[[], T]) -> T:
    """Calls `action` on a thread of its own in that network namespace, None being a new one, and returns what
    it returns. The processes that it starts are in it too. OSError when the host has no thread left."""
    results: list[T] = []
    errors: list[BaseException] = []

    def run() -> None:
        try:
            enter(namespace)
            results.append(action())
        except BaseException as error:  # handed to the caller
            errors.append(error)

    thread = TimelyThread(run, name="namespace")
    try:
        thread.start()
    except NoThread as error:
        raise OSError(errno.EAGAIN, f"{error} for a network namespace") from error
    thread.join()
    if errors:
        raise errors[0]
    return results[0]


def enter(namespace: int | None) -> None:
    """Moves the calling thread, for good, to that network namespace, None being a new one. OSError."""
    libc = ctypes.CDLL(None, use_errno=True)
    done = libc.unshare(_CLONE_NEWNET) if namespace is None else libc.setns(namespace, _CLONE_NEWNET)
    if done != 0:
        number = ctypes.get_errno()
        raise OSError(number, f"enter a network namespace: {os.strerror(number)}")


def configure(namespace: int, lines: list[str]) -> None:
    """Runs lines of `ip -batch` there: for worlds of tests, and trials. StartError when one fails."""
    done = run_in(namespace, lambda: run_ip(["-batch", "-"], "\n".join(lines)))
    if done.returncode != 0:
        raise StartError(f"making a sandbox's network: ip: {one_line(done.stderr)}", phase="network")


def check_tools() -> None:
    """UnsupportedError where there is nothing to make veths with."""
    if shutil.which("ip") is None:
        words, hint = "a sandbox with a network needs `ip`", "apt-get install iproute2"
        raise UnsupportedError(words, capability=CAPABILITY, hint=hint)


def run_ip(words: list[str], lines: str = "") -> "subprocess.CompletedProcess[str]":
    """In the calling thread's namespace."""
    return run_program(["ip", *words], given=lines, patience_s=_PATIENCE_S)
