"""Kernel surface, second part: files, devices, descriptors and sockets by which sandboxes have been left."""

import os
from contextlib import suppress
from pathlib import Path

from bench.attack_cases import peers
from bench.attack_cases.arena import Arena
from bench.attack_cases.model import (
    WITHOUT_LANDLOCK,
    WITHOUT_SECCOMP,
    Apart,
    Box,
    Case,
    Instead,
    NoControl,
    Outside,
    Probe,
    Seen,
    Shown,
)
from sandbox.errors import InvalidArgument
from sandbox.policy.seccomp import NUMBERS, this_machine

_EACCES = frozenset({"EACCES"})
_NOT_DUMPABLE = "init and minder are not dumpable, so no process of theirs may be looked into"
_NO_WAY_TO_WRITE = "not its uid's to write, read-only in `container`, Landlock"
_AS_USER, _AS_ROOT = Outside("user"), Outside("root")
_LAST_FD = 12
_IOCTL = str(NUMBERS["ioctl"][0 if this_machine() == "x86_64" else 1])
_SETFLAGS, _IMMUTABLE, _NODUMP = "0x40086602", "0x10", "0x40"  # FS_IOC_SETFLAGS, FS_..._FL
_FIXED, _EXECUTABLE = "0x0040000", "0x0400000"  # ADDR_NO_RANDOMIZE, READ_IMPLIES_EXEC
_LOOP = ("7", "0")  # a loop device; one without a file reads as empty
_TAINT = Path("/proc/sys/kernel/tainted")
_UEVENT_HELPER = Path("/sys/kernel/uevent_helper")


def _paths(function: str, *arguments: str, timeout_s: float = 30.0) -> Probe:
    return Probe("paths", function, arguments, timeout_s=timeout_s)


def _enter_descriptors(arena: Arena) -> Seen:
    """Commands whose working directory is a descriptor of whoever starts them."""
    with arena.sandbox(Box()) as box:
        for fd in range(_LAST_FD):
            with suppress(InvalidArgument):
                found = box.commands.run(["ls", "-a"], cwd=f"/proc/self/fd/{fd}")
                return Seen(True, f"descriptor {fd} leads to {found.stdout.split()[:3]}")
    return arena.inside(_paths("use_descriptors"))


def _enter_leaked_descriptor(arena: Arena) -> Seen:
    fd = os.open(arena.open_place, os.O_RDONLY | os.O_DIRECTORY)
    try:
        return arena.outside(_paths("use_descriptors"), "user", fds=(fd,))
    finally:
        os.close(fd)


def _list_leaked_descriptor(arena: Arena) -> Seen:
    fd = os.open(arena.open_place, os.O_RDONLY | os.O_DIRECTORY)
    try:
        return arena.outside(_paths("list_descriptors"), "user", fds=(fd,))
    finally:
        os.close(fd)


def _read_all(arena: Arena) -> Seen:
    before = _TAINT.read_text()
    seen = arena.inside(_paths("read_everything", "/proc", "/sys", "/dev", timeout_s=120))
    changed = _TAINT.read_text() != before
    return Seen(changed or seen.opened, "the kernel is tainted" if changed else seen.said)


def _personality(arena: Arena) -> Seen:
    """One command changes its own; the next must not start with it, nor the neighbour's."""
    with arena.sandbox(Box()) as _:
        arena.inside(_paths("change_personality", _FIXED))
        return arena.inside(_paths("read_personality"))


def _unix(address: str) -> Probe:
    return Probe("network", "unix", (address,))


def _uevent_helper() -> str:
    return "" if _UEVENT_HELPER.exists() else "this kernel has no uevent_helper"


_SYSCTLS = tuple(f"/proc/sys/{name}" for name in (
    "kernel/core_pattern", "kernel/modprobe", "kernel/hotplug", "kernel/panic", "kernel/sysrq",
    "vm/overcommit_memory", "vm/drop_caches", "fs/suid_dumpable", "net/core/rmem_default",
))  # fmt: skip

CASES: tuple[Case, ...] = (
    Case(1, "exe-of-init", "the program of init or of its minder opened by /proc/PID/exe (CVE-2019-5736)",
         _paths("look_into_parents", "exe"), _EACCES, _NOT_DUMPABLE, _AS_USER),
    Case(1, "write-init", "the program of init overwritten by its name",
         _paths("make_file", "/.dockyard/init", "/.dockyard/other"),
         frozenset({"EACCES", "EROFS", "EACCES ETXTBSY"}), "not its uid's to write, Landlock",
         Instead(("/workspace/init",), "in the same sandbox, a file of /workspace")),
    Case(2, "cwd-by-descriptor", "a working directory by a descriptor left open (CVE-2024-21626)",
         _enter_descriptors, frozenset({"no descriptor leads to a directory"}),
         "init's descriptors are close-on-exec and none is a directory",
         Shown(_enter_leaked_descriptor, "outside, with a directory left open")),
    Case(3, "swap-dev-null", "/dev/null replaced by a link (CVE-2025-31133)", _paths("swap", "/dev/null"),
         frozenset({"EROFS"}), "/dev is mounted read-only",
         Instead(("/workspace/null", "make"), "in the same sandbox, a file of /workspace")),
    Case(10, "core-pattern", "core_pattern opened for writing", _paths("open_any", "write", _SYSCTLS[0]),
         frozenset({"EACCES", "EROFS"}), _NO_WAY_TO_WRITE, _AS_ROOT),
    Case(11, "sysctls", "settings of the machine opened for writing", _paths("open_any", "write", *_SYSCTLS),
         frozenset({"EACCES", "EACCES ENOENT", "EROFS", "ENOENT EROFS"}), _NO_WAY_TO_WRITE, _AS_ROOT),
    Case(11, "own-score", "what modes alone let it write in /proc",
         _paths("open_any", "write", "/proc/self/oom_score_adj", "/proc/self/comm"), _EACCES, "Landlock",
         WITHOUT_LANDLOCK),
    Case(12, "uevent-helper", "uevent_helper opened for writing",
         _paths("open_any", "write", str(_UEVENT_HELPER)),
         frozenset({"ENOENT"}), "no sysfs in the sandbox", _AS_ROOT, needs=_uevent_helper),
    Case(12, "sysfs", "anything below /sys", _paths("find_any_entry", "/sys"), frozenset({"empty"}),
         "no sysfs in the sandbox", _AS_USER),
    Case(14, "block-device", "a block device of the machine", _paths("make_device", "block", *_LOOP),
         _EACCES, "Landlock, and no capability behind it", _AS_ROOT),
    Case(14, "memory-device", "a character device of the machine",
         _paths("make_device", "character", "1", "3"),
         _EACCES, "Landlock, and no capability behind it", _AS_ROOT),
    Case(26, "personality", "fixed addresses for what starts later", _personality, frozenset({"as it was"}),
         "a process changes its own alone",
         Shown(lambda arena: arena.inside(_paths("change_personality", _FIXED)),
               "in the same sandbox, the children of the process itself"), "contained"),
    Case(26, "personality-code", "a personality in which data is code",
         _paths("take_personality", _EXECUTABLE), frozenset({"EPERM"}), "seccomp", WITHOUT_SECCOMP),
    Case(28, "abstract-socket", "an abstract Unix socket of the host",
         peers.sought_inside(peers.abstract, _unix),
         frozenset({"ECONNREFUSED"}), "network namespace", peers.sought_outside(peers.abstract, _unix)),
    Case(29, "socket-by-path", "a Unix socket of the host by its path",
         peers.sought_inside(peers.by_path, _unix),
         frozenset({"ENOENT"}), "a root of its own", peers.sought_outside(peers.by_path, _unix)),
    Case(29, "known-sockets", "sockets of docker, X11 and D-Bus",
         _paths("find_any_entry", "/var/run/dbus", "/run/dbus", "/tmp/.X11-unix", "/run"),
         frozenset({"empty"}),
         "a root of its own", Outside("user")),
    Case(30, "descriptors", "descriptors left open for a command", _paths("list_descriptors"),
         frozenset({"only 0, 1 and 2"}), "init's descriptors are close-on-exec",
         Shown(_list_leaked_descriptor, "outside, with a directory left open")),
    Case(32, "environment-of-init", "the environment of init or of its minder",
         _paths("look_into_parents", "environ"), _EACCES, _NOT_DUMPABLE, _AS_USER),
    Case(32, "root-of-init", "another process's root by /proc/PID/root", _paths("look_into_parents", "root"),
         _EACCES, _NOT_DUMPABLE, _AS_USER),
    Case(32, "memory-of-init", "the memory of init or of its minder", _paths("look_into_parents", "maps"),
         _EACCES, _NOT_DUMPABLE, _AS_USER),
    Case(34, "immutable-file", "a file that its owner cannot remove",
         _paths("set_flags", "/tmp/immutable", _IOCTL, _SETFLAGS, _IMMUTABLE), frozenset({"EPERM"}),
         "seccomp and no capability, each by itself",
         Apart("root")),
    Case(34, "flags", "attributes of a file of its own, which file systems keep apart from its modes",
         _paths("set_flags", "/tmp/flagged", _IOCTL, _SETFLAGS, _NODUMP), frozenset({"EPERM"}), "seccomp",
         WITHOUT_SECCOMP),
    Case(35, "kernel-memory", "files that show the kernel's memory", _paths("read_kernel_memory"),
         frozenset({"nothing: ENOENT", "nothing: EACCES ENOENT", "nothing: EACCES ENOENT EPERM"}),
         "not its uid's to read, masked in `container`, a /dev of its own", _AS_ROOT),
    Case(35, "read-everything", "all of /proc, /sys and /dev read", _read_all, frozenset({"finished"}),
         "nothing there blocks or breaks the kernel",
         NoControl("nothing to switch off: it shows that reading ends and leaves the kernel untainted"),
         "contained"),
)  # fmt: skip
