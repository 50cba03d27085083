"""Loop devices: a file as a disk. Each detaches itself with its last user (autoclear), so one is attached for
as long as a mount of it lives and no longer, whatever became of its owner."""

import fcntl
import os
import struct
from collections.abc import Generator, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from sandbox.processes import ProcessKey, this_process

# From linux/loop.h.
_GET_FREE, _CONFIGURE, _CLEAR, _GET_STATUS = 0x4C82, 0x4C0A, 0x4C01, 0x4C05
_AUTOCLEAR, _DIRECT_IO = 4, 16
_INFO = struct.Struct("=QQQQQIIII64s64s32sQQ")
_CONFIG_HEAD, _RESERVED = struct.Struct("=II"), bytes(64)
_BLOCK_BYTES = 4096
_ATTEMPTS = 64  # another process may be quicker to take the free one


@dataclass(frozen=True, slots=True)
class Loop:
    """A device that a process of ours has attached. `state` names the state directory that it is for."""

    device: Path
    state: str
    owner: ProcessKey


@contextmanager
def attached(file: int, state: str) -> Generator[Path]:
    """The device of an open file. When the block ends it stays attached as long as it is mounted."""
    device, path = _attach(file, _label(state, this_process()))
    try:
        yield path
    finally:
        os.close(device)


def list_loops() -> Iterator[Loop]:
    """Devices that processes of ours have attached, dead ones too."""
    for path in sorted(Path("/sys/block").glob("loop*/loop")):
        device = Path("/dev", path.parent.name)
        with suppress(OSError):  # detached meanwhile, or not this user's to look at
            if (loop := _read(device)) is not None:
                yield loop


def detach(device: Path) -> None:
    """Lets go of its file, at once or with its last user."""
    with suppress(OSError):
        fd = os.open(device, os.O_RDONLY | os.O_CLOEXEC)
        try:
            fcntl.ioctl(fd, _CLEAR)
        finally:
            os.close(fd)


def _attach(file: int, label: bytes) -> tuple[int, Path]:
    """Direct I/O keeps the file's pages from being cached twice; a file system without it goes without."""
    control = os.open("/dev/loop-control", os.O_RDWR | os.O_CLOEXEC)
    try:
        for flags in (_AUTOCLEAR | _DIRECT_IO, _AUTOCLEAR):
            info = _INFO.pack(0, 0, 0, 0, 0, 0, 0, 0, flags, label, b"", b"", 0, 0)
            config = _CONFIG_HEAD.pack(file, _BLOCK_BYTES) + info + _RESERVED
            for _ in range(_ATTEMPTS):
                path = Path(f"/dev/loop{fcntl.ioctl(control, _GET_FREE)}")
                device = os.open(path, os.O_RDWR | os.O_CLOEXEC)
                try:
                    fcntl.ioctl(device, _CONFIGURE, config)
                    return device, path
                except OSError as error:
                    os.close(device)
                    if error.errno == 22:  # EINVAL: no direct I/O here
                        break
                    if error.errno != 16:  # EBUSY: another was quicker
                        raise
        raise OSError(16, "no loop device is free")
    finally:
        os.close(control)


def _label(state: str, owner: ProcessKey) -> bytes:
    return f"dockyard {state} {owner.pid} {owner.start_ticks}".encode()


def _read(device: Path) -> Loop | None:
    fd = os.open(device, os.O_RDONLY | os.O_CLOEXEC)
    try:
        fields = _INFO.unpack(fcntl.ioctl(fd, _GET_STATUS, bytes(_INFO.size)))
    finally:
        os.close(fd)
    words = fields[9].rstrip(b"\0").decode("ascii", "replace").split(" ")
    if len(words) != 4 or words[0] != "dockyard" or not (words[2] + words[3]).isdecimal():
        return None
    return Loop(device, words[1], ProcessKey(int(words[2]), int(words[3])))
