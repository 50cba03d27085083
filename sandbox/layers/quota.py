"""A layer in a directory under a project quota of the host's file system (ext4 or XFS, mounted with
prjquota). Needs root and Linux 5.14.

The directory's project is inherited by all that is made in it, and only the host's root can change it. It is
STATE_DIR/layers/SANDBOX; whoever finds one whose sandbox is no more removes it (`remove_directory`).
"""

import ctypes
import errno
import fcntl
import os
import secrets
import struct
import subprocess
from contextlib import suppress
from pathlib import Path

from sandbox.errors import CapacityError, is_shortage
from sandbox.host_tree import remove_tree
from sandbox.layers import mounts
from sandbox.layers.base import Layer, LayerSize
from sandbox.layers.image import check_room, place

# From linux/fs.h: struct fsxattr, and the flag that children inherit.
_GET_ATTRIBUTES, _SET_ATTRIBUTES = 0x801C581F, 0x401C5820
_ATTRIBUTES, _INHERIT = struct.Struct("=IIIII8x"), 0x200
# From linux/quota.h: struct if_dqblk. Byte limits are in blocks of a kibibyte.
_QUOTACTL_FD, _PROJECT = 443, 2
_GET_QUOTA, _SET_QUOTA = 0x800007 << 8 | _PROJECT, 0x800008 << 8 | _PROJECT
_LIMITS, _ALL_LIMITS = struct.Struct("=QQQQQQQQI4x"), 1 | 4  # QIF_BLIMITS, QIF_ILIMITS
_FIRST_PROJECT, _NUM_PROJECTS = 0x44590000, 1 << 20
_ATTEMPTS = 16
_OWN_INODES = 8  # of the layer and the overlay
_TRIAL_BYTES, _NOBODY = 1 << 20, 65534

_libc = ctypes.CDLL(None, use_errno=True)


class QuotaLayers:
    """Remembers which file systems can."""

    def __init__(self) -> None:
        self._found: dict[tuple[Path, int], str] = {}  # by user, too

    def missing(self, state_dir: Path) -> str:
        """Fills a small one until it is full."""
        key = state_dir, os.geteuid()
        if key not in self._found:
            self._found[key] = _attempt(state_dir)
        return self._found[key]

    def make(self, state_dir: Path, sandbox_id: str, size: LayerSize) -> Layer:
        """A directory with limits, and a mount that shows it."""
        directory = place(state_dir) / sandbox_id
        directory.mkdir(mode=0o755)
        try:
            _limit(directory, _draw_project(directory), size.bytes, size.inodes + _OWN_INODES)
            return Layer(mounts.mount_directory(directory), directory)
        except BaseException:
            remove_directory(directory)
            raise

    def remove(self, layer: Layer) -> None:
        """Removes the directory and its limits."""
        layer.let_go()
        if layer.directory is not None:
            remove_directory(layer.directory)
        layer.directory = None


def remove_directory(directory: Path) -> None:
    """What a sandbox has written, and the limits of its project. Nothing there: no error."""
    with suppress(OSError):
        _, project = _project(directory)
        if _FIRST_PROJECT <= project < _FIRST_PROJECT + _NUM_PROJECTS:
            fd = os.open(directory.parent, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
            try:
                _write_limits(fd, project, 0, 0)
            finally:
                os.close(fd)
    remove_tree(directory)


def _attempt(state_dir: Path) -> str:
    if os.geteuid() != 0:
        return "a project quota needs root"
    check_room(state_dir, LayerSize(4 * _TRIAL_BYTES, 16))  # or a full disk would be taken for a quota
    directory = place(state_dir) / f"draft-{os.getpid()}-{secrets.token_hex(4)}"
    directory.mkdir(mode=0o700)
    try:
        _limit(directory, _draw_project(directory), _TRIAL_BYTES, 16)
        is_bounded = _is_bounded(directory / "file")
    except OSError as error:
        if is_shortage(error):
            raise
        why = "it is not mounted with prjquota" if error.errno == errno.ESRCH else error.strerror
        return f"no project quota on the file system of {state_dir}: {why}"
    finally:
        remove_directory(directory)
    return (
        "" if is_bounded else f"the file system of {state_dir} takes a project quota and does not enforce it"
    )


def _is_bounded(path: Path) -> bool:
    """Whether somebody without privilege, for whom alone a quota holds, cannot write four times as much."""
    with path.open("wb") as file:
        words = ["head", "-c", str(4 * _TRIAL_BYTES), "/dev/zero"]
        subprocess.run(
            words, stdout=file, stderr=subprocess.DEVNULL, check=False, user=_NOBODY, group=_NOBODY
        )
    return path.stat().st_size <= _TRIAL_BYTES


def _draw_project(directory: Path) -> int:
    """One that nothing is charged to. Given to the directory before anybody else can draw it too: two that
    draw at the same moment meet with a chance of one in a million."""
    for _ in range(_ATTEMPTS):
        project = _FIRST_PROJECT + secrets.randbelow(_NUM_PROJECTS)
        if _usage(directory, project) == (0, 0):
            _set_project(directory, project)
            return project
    raise CapacityError("no project id is free for a writable layer", hint="run `dockyard down`, then again")


def _limit(directory: Path, project: int, num_bytes: int, inodes: int) -> None:
    fd = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        _write_limits(fd, project, num_bytes, inodes)
    finally:
        os.close(fd)


def _write_limits(fd: int, project: int, num_bytes: int, inodes: int) -> None:
    blocks = -(-num_bytes // 1024)
    limits = _LIMITS.pack(blocks, blocks, 0, inodes, inodes, 0, 0, 0, _ALL_LIMITS)
    _quotactl(fd, _SET_QUOTA, project, limits)


def _usage(directory: Path, project: int) -> tuple[int, int]:
    """Bytes and inodes that a project has."""
    fd = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        fields = _LIMITS.unpack(_quotactl(fd, _GET_QUOTA, project, bytes(_LIMITS.size)))
    except FileNotFoundError:  # XFS has nothing of a project that was never used
        return 0, 0
    finally:
        os.close(fd)
    return fields[2], fields[5]


def _quotactl(fd: int, command: int, project: int, record: bytes) -> bytes:
    buffer = ctypes.create_string_buffer(record, len(record))
    words = map(ctypes.c_long, (_QUOTACTL_FD, fd, command, project))
    if _libc.syscall(*words, buffer) < 0:
        error = ctypes.get_errno()
        raise OSError(error, os.strerror(error))
    return buffer.raw


def _project(directory: Path) -> tuple[int, int]:
    """Flags and project of a directory."""
    fd = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    try:
        fields = _ATTRIBUTES.unpack(fcntl.ioctl(fd, _GET_ATTRIBUTES, bytes(_ATTRIBUTES.size)))
    finally:
        os.close(fd)
    return fields[0], fields[3]


def _set_project(directory: Path, project: int) -> None:
    flags, _ = _project(directory)
    fd = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    try:
        fcntl.ioctl(fd, _SET_ATTRIBUTES, _ATTRIBUTES.pack(flags | _INHERIT, 0, 0, project, 0))
    finally:
        os.close(fd)
