"""The guard of this process's sandboxes: programs at the kernel's security hooks, and the map that says which
cgroups are sandboxes.

The programs hold for as long as this process lives, as its sandboxes do; nothing is pinned. A sandbox is
sealed when its first process is ready and runs nothing yet.
"""

import ctypes
import errno
import os
import struct
import threading
from functools import cache
from pathlib import Path

from sandbox.egress.libbpf import BpfObject
from sandbox.errors import telling_shortage
from sandbox.forks import free_in_children
from sandbox.places import GUARD_OBJECT
from sandbox.refusals import Attempt, Counts, Deed

# enum deed of guard.bpf.c, from 0 on.
_DEEDS: tuple[Deed, ...] = ("bpf", "trace", "signal", "mount", "namespaces", "module")
_HOOKS = (
    *("bpf", "sb_mount", "move_mount", "sb_pivotroot", "userns_create", "kernel_module_request"),
    *("ptrace_access_check", "task_kill"),
)
_COUNTERS = struct.Struct(f"={len(_DEEDS)}Q")
_KEY = struct.Struct("=Q")
_LIST_MODULES, _MOST_MODULES, _BPF = 461, 32, 109  # lsm_list_modules(2), LSM_ID_BPF of linux/lsm.h
_NAMES_FILE = Path("/sys/kernel/security/lsm")


class Guard:
    """Thread-safe."""

    def __init__(self) -> None:
        """Loads and attaches; some hundred milliseconds. OSError when the kernel refuses."""
        if not _is_active():
            raise OSError(errno.EOPNOTSUPP, "the kernel was booted without `bpf` in its `lsm=` list")
        if not GUARD_OBJECT.is_file():
            raise OSError(errno.ENOENT, "its programs are not built: python -m sandbox.guard.build")
        try:
            self._object = BpfObject(GUARD_OBJECT)
        except OSError as error:
            number = error.errno or errno.EINVAL
            raise OSError(number, f"the kernel does not take its programs: {os.strerror(number)}") from error
        try:
            self._sealed = self._object.map("sealed")
            for hook in _HOOKS:
                self._object.attach_to_hook(hook)
        except BaseException:
            self._object.close()
            raise

    def seal(self, group: Path) -> int:
        """From now on nothing in this cgroup does what the guard refuses. Returns the cgroup's id, for
        `refused` and `forget`. OSError when it cannot."""
        sandbox = group.stat().st_ino
        self._sealed.set(_KEY.pack(sandbox), bytes(_COUNTERS.size))
        return sandbox

    def refused(self, sandbox: int) -> Counts:
        """What a sandbox was refused so far."""
        value = self._sealed.get(_KEY.pack(sandbox), _COUNTERS.size)
        counts = _COUNTERS.unpack(value) if value is not None else ()
        return {Attempt(deed): count for deed, count in zip(_DEEDS, counts, strict=False) if count}

    def forget(self, sandbox: int) -> None:
        """Its cgroup is gone. Idempotent."""
        self._sealed.remove(_KEY.pack(sandbox))


@cache
def _attempt(uid: int) -> "tuple[Guard | None, str]":
    del uid  # who has dropped root has none
    try:
        with telling_shortage("loading the guard's programs"):
            return Guard(), ""
    except OSError as error:
        return None, error.strerror or str(error)


_lock = threading.Lock()
free_in_children(_lock)


def shared_guard() -> Guard | None:
    """The one of this process, made at the first use; None where this host does not have it. CapacityError
    where this process is out of something for now, by which the host is not to be known."""
    with _lock:
        return _attempt(os.geteuid())[0]


def missing() -> str:
    """Why there is no guard here; empty where there is. CapacityError as above."""
    with _lock:
        return _attempt(os.geteuid())[1]


def _is_active() -> bool:
    """Whether the kernel asks BPF programs at all: it attaches them even where it does not."""
    if os.geteuid() != 0:
        return False
    modules, size = (ctypes.c_uint64 * _MOST_MODULES)(), ctypes.c_uint32(8 * _MOST_MODULES)
    count = ctypes.CDLL(None, use_errno=True).syscall(_LIST_MODULES, modules, ctypes.byref(size), 0)
    if count >= 0:
        return _BPF in modules[:count]
    return _NAMES_FILE.exists() and "bpf" in _NAMES_FILE.read_text().strip().split(",")  # before Linux 6.8
