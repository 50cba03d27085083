"""Mounts that lie nowhere: made by descriptor, to be put somewhere by whoever is handed it (Linux 5.2).

Such a mount is in no namespace, so the host's mount table does not change, and it goes with its last
descriptor unless a sandbox has put it into its own namespace by then.
"""

import ctypes
import os
from collections.abc import Sequence
from pathlib import Path

_OPEN_TREE, _FSOPEN, _FSCONFIG, _FSMOUNT, _MOUNT_SETATTR = 428, 430, 431, 432, 442
_CLONE_TREE, _CLOEXEC, _EMPTY_PATH = 1, os.O_CLOEXEC, 0x1000
_SET_FLAG, _SET_STRING, _CREATE = 0, 1, 6  # commands of fsconfig
_NOSUID, _NODEV = 2, 4  # of mount_setattr(2)
_FDCWD = -100

_libc = ctypes.CDLL(None, use_errno=True)


class _Attributes(ctypes.Structure):
    _fields_ = (
        ("set", ctypes.c_uint64), ("clear", ctypes.c_uint64),
        ("propagation", ctypes.c_uint64), ("userns", ctypes.c_uint64),
    )  # fmt: skip


def mount_device(kind: str, device: Path, flags: Sequence[str] = ()) -> int:
    """A descriptor of the mounted file system on `device`, nosuid and nodev; milliseconds. OSError."""
    context = _call(_FSOPEN, kind.encode(), 1)
    try:
        _call(_FSCONFIG, context, _SET_STRING, b"source", os.fsencode(device), 0)
        for flag in flags:
            _call(_FSCONFIG, context, _SET_FLAG, flag.encode(), None, 0)
        _call(_FSCONFIG, context, _CREATE, None, None, 0)
        return _call(_FSMOUNT, context, 1, _NOSUID | _NODEV)
    finally:
        os.close(context)


def mount_directory(directory: Path) -> int:
    """A descriptor of a mount that shows this directory, nosuid and nodev. OSError."""
    mount = _call(_OPEN_TREE, _FDCWD, os.fsencode(directory), _CLONE_TREE | _CLOEXEC)
    try:
        attributes = _Attributes(set=_NOSUID | _NODEV)
        size = ctypes.sizeof(attributes)
        _call(_MOUNT_SETATTR, mount, b"", _EMPTY_PATH, ctypes.byref(attributes), size)
    except BaseException:
        os.close(mount)
        raise
    return mount


def _call(number: int, *arguments: object) -> int:
    result = int(_libc.syscall(ctypes.c_long(number), *(_word(each) for each in arguments)))
    if result < 0:
        error = ctypes.get_errno()
        raise OSError(error, os.strerror(error))
    return result


def _word(value: object) -> object:
    """As wide as a register: of a plain int the upper half would be undefined."""
    return ctypes.c_long(value) if isinstance(value, int) else value
