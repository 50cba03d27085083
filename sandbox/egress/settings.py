"""Settings of the network namespace that the calling thread is in (/proc/sys/net)."""

import ctypes
import os
from collections.abc import Generator, Iterable, Mapping
from contextlib import contextmanager

# Numbers of system calls, the same on every machine that has them: Linux 5.2.
_FSOPEN, _FSCONFIG, _FSMOUNT = 430, 431, 432
_CLOEXEC, _CREATE = 1, 6  # FSOPEN_CLOEXEC and FSMOUNT_CLOEXEC, FSCONFIG_CMD_CREATE
_HIDDEN = 2 | 4 | 8  # MOUNT_ATTR_NOSUID, NODEV, NOEXEC


def write_settings(values: Mapping[str, str]) -> None:
    """By paths below /proc/sys/net. OSError.

    In a /proc that nobody else looks into, where the kernel allows one. It keeps what was found in a /proc
    until memory is short, a folder `ipv4` for each namespace there ever was, and goes through all of these to
    find another's: ten thousand sandboxes later, that takes milliseconds.
    """
    with _proc() as proc:
        for name, value in values.items():
            write_setting(proc, f"sys/net/{name}", value)


def read_settings(names: Iterable[str]) -> dict[str, str]:
    """By paths below /proc/sys/net; empty where there is none, as without version 6. OSError."""
    with _proc() as proc:
        return {name: _read(proc, f"sys/net/{name}") for name in names}


def _read(folder: int, name: str) -> str:
    try:
        file = os.open(name, os.O_RDONLY | os.O_CLOEXEC, dir_fd=folder)
    except FileNotFoundError:
        return ""
    try:
        return os.read(file, 64).decode().strip()
    finally:
        os.close(file)


def open_settings(name: str) -> int:
    """A folder's descriptor, for threads that are in the same namespace. OSError."""
    with _proc() as proc:
        return os.open(f"sys/net/{name}", os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC, dir_fd=proc)


def read_setting(folder: int, name: str) -> str:
    """By a path below an open folder. OSError."""
    file = os.open(name, os.O_RDONLY | os.O_CLOEXEC, dir_fd=folder)
    try:
        return os.read(file, 4096).decode().strip()
    finally:
        os.close(file)


def write_setting(folder: int, name: str, value: str) -> None:
    """By a path below an open folder. OSError."""
    file = os.open(name, os.O_WRONLY | os.O_CLOEXEC, dir_fd=folder)
    try:
        os.write(file, value.encode())
    finally:
        os.close(file)


@contextmanager
def _proc() -> Generator[int]:
    place = _own_proc()
    if place < 0:
        place = os.open("/proc", os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        yield place
    finally:
        os.close(place)


def _own_proc() -> int:
    """A mount that is nowhere; -1 where this process may make none."""
    libc = ctypes.CDLL(None, use_errno=True)
    context = libc.syscall(_FSOPEN, b"proc", _CLOEXEC)
    if context < 0:
        return -1
    try:
        if libc.syscall(_FSCONFIG, context, _CREATE, None, None, 0) < 0:
            return -1
        return int(libc.syscall(_FSMOUNT, context, _CLOEXEC, _HIDDEN))
    finally:
        os.close(context)
