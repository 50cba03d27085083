"""System calls by number, as a program would make them that has no library in its way.

Runs in a sandbox, or outside of one for the control, with nothing but the standard library. What opens a door
returns words; what finds it shut raises OSError.
"""

import ctypes
import json
import mmap
import os
import pty
import termios
from fcntl import ioctl
from pathlib import Path
from typing import Any

LIBC = ctypes.CDLL(None, use_errno=True)
# User, mount, network, IPC, host name and cgroup.
NEW_SPACES = 0x10000000 | 0x00020000 | 0x40000000 | 0x08000000 | 0x04000000 | 0x02000000
SIGCHLD = 17


def enter_namespaces() -> None:
    """Into namespaces in which it has every capability; where that is refused, the call is tried without."""
    LIBC.unshare(NEW_SPACES)


def call(number: str, arguments: str = "[]", spaces: str = "", reached: str = "") -> str:
    """`arguments` is a JSON list: numbers, text, {"room": bytes}, {"open": path}. `reached` names errnos that
    come from behind the door, where a call is made in a form that can do no harm."""
    if spaces:
        enter_namespaces()
    result = LIBC.syscall(ctypes.c_long(int(number)), *(_argument(each) for each in json.loads(arguments)))
    if result >= 0:
        return f"returned {result}"
    failure = ctypes.get_errno()
    if failure in [int(each) for each in reached.split()]:
        return f"got as far as: {os.strerror(failure)}"
    raise OSError(failure, "refused")


def fork_into(number: str, flags: str) -> str:
    """clone() as fork() is, with flags."""
    child = LIBC.syscall(
        ctypes.c_long(int(number)), ctypes.c_long(int(flags) | SIGCHLD), None, None, None, None
    )
    if child == 0:
        os._exit(0)
    if child < 0:
        raise OSError(ctypes.get_errno(), "refused")
    os.waitpid(child, 0)
    return "a child ran in it"


def terminal_ioctl(number: str, request: str, argument: str, reached: str = "") -> str:
    """An ioctl on the process's own terminal, made by number: all 64 bits of the request are passed."""
    ours, theirs = pty.openpty()
    reader, writer = os.pipe()
    if (child := os.fork()) == 0:
        os.setsid()
        ioctl(theirs, termios.TIOCSCTTY, 0)
        room = ctypes.create_string_buffer(bytes.fromhex(argument), 8)
        done = LIBC.syscall(ctypes.c_long(int(number)), theirs, ctypes.c_ulong(int(request, 16)), room)
        os.write(writer, str(0 if done >= 0 else ctypes.get_errno()).encode())
        os._exit(0)
    os.waitpid(child, 0)
    failure = int(os.read(reader, 16))
    os.close(ours)
    if failure and failure not in [int(each) for each in reached.split()]:
        raise OSError(failure, "refused")
    return "the terminal took it"


def file_ioctl(number: str, request: str, path: str, reached: str) -> str:
    """An ioctl on a file of its own."""
    with Path(path).open("wb") as file:
        room = ctypes.create_string_buffer(256)
        done = LIBC.syscall(ctypes.c_long(int(number)), file.fileno(), ctypes.c_ulong(int(request, 16)), room)
        failure = 0 if done >= 0 else ctypes.get_errno()
    Path(path).unlink()
    if failure and failure not in [int(each) for each in reached.split()]:
        raise OSError(failure, "refused")
    return "the file system was asked"


def machine_code(code: str) -> str:
    """Runs a few bytes that make a system call through another door, and returns what they return."""
    room = mmap.mmap(-1, mmap.PAGESIZE, prot=mmap.PROT_READ | mmap.PROT_WRITE | mmap.PROT_EXEC)
    room.write(bytes.fromhex(code))
    run = ctypes.CFUNCTYPE(ctypes.c_int)(ctypes.addressof(ctypes.c_char.from_buffer(room)))
    result = run()
    if result < 0:
        raise OSError(-result, "refused")
    return f"returned {result}"


def _argument(value: Any) -> Any:
    if isinstance(value, int):
        return ctypes.c_long(value)
    if isinstance(value, str):
        return ctypes.c_char_p(value.encode())
    if value is None:
        return None
    if "room" in value:
        return ctypes.create_string_buffer(value["room"])
    if "hex" in value:
        return ctypes.create_string_buffer(bytes.fromhex(value["hex"]))
    return ctypes.c_long(os.open(value["open"], os.O_RDONLY))
