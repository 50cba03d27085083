"""Kernel surface, first part: system calls that a sandbox has no business making.

Where a call needs a capability, the attempt first makes namespaces of its own to have it in, as real attacks
do. Calls that would harm a machine are made with arguments that cannot: what comes from behind the door then
is an error about the arguments.
"""

import errno
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from bench.attack_cases.model import (
    WITHOUT_BOTH,
    WITHOUT_SECCOMP,
    Apart,
    Case,
    Control,
    Outside,
    Probe,
    Substrate,
)
from sandbox.cgroups import parse_hierarchies
from sandbox.policy.seccomp import NUMBERS, this_machine

_AS_ROOT, _IN_NAMESPACES = Apart("root"), Apart("namespace")
_EPERM, _NO_FAMILY = frozenset({"EPERM"}), frozenset({"EAFNOSUPPORT"})
_NONE_LEFT = frozenset({"ENOSPC"})  # no user namespace is left to make
_X86 = this_machine() == "x86_64"
_NEW_USER, _NEW_NETWORK = 0x10000000, 0x40000000
_MS_BIND, _MS_REC, _MNT_DETACH = 4096, 16384, 2
_PACKET, _VSOCK, _XDP, _NETLINK, _NETLINK_AUDIT = 17, 40, 44, 16, 9
_MAP_ATTRIBUTES = {"hex": "02000000040000000800000001000000" + "00" * 104}  # an array of one entry
# A software clock of this very process, user space alone.
_EVENT_ATTRIBUTES = {"hex": "0100000080000000" + "00" * 32 + "61000000" + "00" * 84}
_HANDLE = {"hex": "0800000001000000" + "00" * 128}  # of a file that is not there
_RLIMIT_CORE, _NO_CORE = 4, {"hex": "00" * 16}  # which it has already
_Q_QUOTAON = 0x80000600
_GETPID_OF_X32 = str(0x40000000 + 39)
_GETPID_BY_INT80 = "b814000000cd80c3"  # mov eax, 20; int 0x80; ret

_BY_SECCOMP = "seccomp"
_BY_BOTH = "seccomp and Landlock, each by itself"
_BY_CAPABILITY = "seccomp and no capability, each by itself"
_FUNCTION_TOO = "seccomp and no user namespaces (bubblewrap), each by itself"


def _number(name: str) -> str:
    return str(NUMBERS[name][0 if _X86 else 1])


def _call(name: str, *arguments: Any, spaces: bool = False, reached: tuple[int, ...] = ()) -> Probe:
    words = (_number(name), json.dumps(arguments), "1" if spaces else "", " ".join(map(str, reached)))
    return Probe("calls", "call", words)


def _spaced(name: str, *arguments: Any, reached: tuple[int, ...] = ()) -> Probe:
    return _call(name, *arguments, spaces=True, reached=reached)


def _case(
    number: int,
    name: str,
    title: str,
    attack: Probe,
    control: Control,
    *,
    mechanism: str,
    shut: frozenset[str] = _EPERM,
    on: tuple[Substrate, ...] = ("function", "container"),
    needs: Callable[[], str] | None = None,
) -> Case:
    return Case(number, name, title, attack, shut, mechanism, control, on=on, needs=needs)


def _by_seccomp(
    number: int, name: str, title: str, attack: Probe, shut: frozenset[str] = _EPERM
) -> list[Case]:
    """Seccomp is all that refuses it, on both substrates."""
    return [_case(number, name, title, attack, WITHOUT_SECCOMP, mechanism=_BY_SECCOMP, shut=shut)]


def _in_spaces(
    number: int, name: str, title: str, attack: Probe, control: Control = WITHOUT_SECCOMP,
    *, shut: frozenset[str] = _EPERM, also: frozenset[str] = frozenset(),
    needs: Callable[[], str] | None = None,
) -> list[Case]:  # fmt: skip
    """What needs capabilities in namespaces of its own. `function` refuses the namespaces a second time."""
    mechanism = _BY_SECCOMP if control == WITHOUT_SECCOMP else _BY_BOTH
    return [
        _case(
            number,
            name,
            title,
            attack,
            Apart("namespace", also=also),
            mechanism=_FUNCTION_TOO,
            shut=shut,
            on=("function",),
            needs=needs,
        ),
        _case(
            number,
            name,
            title,
            attack,
            control,
            mechanism=mechanism,
            shut=shut,
            on=("container",),
            needs=needs,
        ),
    ]


def _by_capability(number: int, name: str, title: str, attack: Probe, control: Control) -> list[Case]:
    """What needs a capability that no namespace of a sandbox's own gives."""
    return [_case(number, name, title, attack, control, mechanism=_BY_CAPABILITY)]


def _mount(kind: str, target: str = "/tmp", data: str | None = None, flags: int = 0) -> Probe:
    return _spaced("mount", kind, target, kind, flags, data)


def _version_1() -> str:
    """A namespace may mount a tree that is there, and make none."""
    here = any(version == 1 for _, version, _ in parse_hierarchies(Path("/proc/mounts").read_text()))
    return "" if here else "this machine has no cgroups of version 1"


_BIND = ("/usr", "/tmp", None, _MS_BIND | _MS_REC, None)
_PROC = ("proc", "/tmp", "proc", 0, None)


def _outside_without_spaces(probe: Probe) -> Apart:
    """The guard has made namespaces already, with processes of their own in them."""
    return Apart("namespace", (*probe.arguments[:2], "", probe.arguments[3]))


_MOUNTS: tuple[list[Case], ...] = (
    _in_spaces(5, "mount-over-proc", "a mount over /proc/sys, to redirect writes",
               _mount("tmpfs", "/proc/sys"), WITHOUT_BOTH),
    _in_spaces(6, "mount-cgroup-1", "version 1 cgroups mounted, for their release_agent",
               _mount("cgroup", data="pids"), WITHOUT_BOTH, needs=_version_1),
    _in_spaces(6, "mount-cgroup-2", "version 2 cgroups mounted", _mount("cgroup2"), WITHOUT_BOTH),
    _in_spaces(13, "mount-binfmt", "binfmt_misc mounted, to register an interpreter", _mount("binfmt_misc"),
               WITHOUT_BOTH),
    _in_spaces(16, "mount-tmpfs", "a tmpfs mounted", _mount("tmpfs"), WITHOUT_BOTH),
    _in_spaces(16, "mount-mqueue", "message queues mounted", _mount("mqueue"), WITHOUT_BOTH),
    _in_spaces(16, "pivot-root", "another root",
               _spaced("pivot_root", "/tmp", "/tmp", reached=(errno.EINVAL,)), WITHOUT_BOTH),
    _in_spaces(16, "move-mount", "a mount moved",
               _spaced("move_mount", -100, "/usr", -100, "/tmp", 0, reached=(errno.EINVAL,)), WITHOUT_BOTH),
    _by_capability(16, "mount-sysfs", "sysfs mounted", _mount("sysfs"), _IN_NAMESPACES),
    _by_capability(16, "mount-overlay", "an overlay mounted", _mount("overlay", data="lowerdir=/usr:/etc"),
                   _IN_NAMESPACES),
    _by_capability(16, "mount-bind", "a directory mounted elsewhere", _spaced("mount", *_BIND),
                   _IN_NAMESPACES),
    _by_capability(16, "mount-proc", "a /proc without masks", _spaced("mount", *_PROC),
                   _outside_without_spaces(_spaced("mount", *_PROC))),
    _in_spaces(16, "open-tree", "a copy of a tree of mounts", _spaced("open_tree", -100, "/usr", 0x8001)),
    _in_spaces(16, "umount", "a mask unmounted",
               _spaced("umount2", "/dev/shm", _MNT_DETACH, reached=(errno.EINVAL,))),
    _in_spaces(16, "fspick", "a mounted file system configured",
               _spaced("fspick", -100, "/tmp", 0, reached=(errno.EINVAL,))),
    _in_spaces(16, "fsmount", "a configured file system mounted",
               _spaced("fsmount", -1, 0, 0, reached=(errno.EBADF,))),
    _in_spaces(16, "mount-setattr", "attributes of a mount changed",
               _spaced("mount_setattr", -100, "/tmp", 0, {"hex": "00" * 32}, 32, reached=(errno.EINVAL,))),
    _in_spaces(16, "chroot", "another root directory", _spaced("chroot", "/tmp")),
    _in_spaces(7, "fsopen", "a file system's context opened (CVE-2022-0185)", _spaced("fsopen", "tmpfs", 0)),
    _by_seccomp(7, "fsconfig", "a file system's context configured (CVE-2022-0185)",
                _call("fsconfig", -1, 1, "size", "1", 0, reached=(errno.EBADF, errno.EINVAL))),
)  # fmt: skip

_NAMESPACES: tuple[list[Case], ...] = (
    _in_spaces(17, "unshare-user", "a user namespace by unshare", _call("unshare", _NEW_USER),
               also=_NONE_LEFT),
    _in_spaces(17, "clone-user", "a user namespace by clone",
               Probe("calls", "fork_into", (_number("clone"), str(_NEW_USER))), also=_NONE_LEFT),
    _by_seccomp(17, "clone3", "clone3, whose flags no filter sees",
                _call("clone3", None, 0, reached=(errno.EINVAL,)),
                frozenset({"ENOSYS"})),
    _in_spaces(17, "unshare-net", "a network namespace", _spaced("unshare", _NEW_NETWORK)),
    _in_spaces(17, "sethostname", "another host name", _spaced("sethostname", "x", 1)),
    _in_spaces(18, "setns", "a namespace entered by a descriptor of it",
               _spaced("setns", {"open": "/proc/self/ns/net"}, 0)),
)  # fmt: skip

_MACHINE: tuple[list[Case], ...] = (
    _by_capability(20, "bpf", "a BPF map", _call("bpf", 0, _MAP_ATTRIBUTES, 120), _AS_ROOT),
    _by_seccomp(20, "perf", "a performance counter",
                _call("perf_event_open", _EVENT_ATTRIBUTES, 0, -1, -1, 0)),
    _by_seccomp(20, "userfaultfd", "page faults of its own handled", _call("userfaultfd", 1)),
    _by_capability(20, "userfaultfd-kernel", "page faults of the kernel handled", _call("userfaultfd", 0),
                   _AS_ROOT),
    _by_capability(20, "kexec", "another kernel loaded",
                   _call("kexec_file_load", -1, -1, 0, "", 0, reached=(errno.EBADF,)), _AS_ROOT),
    _by_capability(20, "init-module", "a module loaded from memory",
                   _call("init_module", None, 0, "", reached=(errno.ENOEXEC, errno.EFAULT, errno.EINVAL)),
                   _AS_ROOT),
    _by_capability(20, "finit-module", "a module loaded from a file",
                   _call("finit_module", -1, "", 0, reached=(errno.EBADF,)), _AS_ROOT),
    _by_capability(20, "delete-module", "a module unloaded",
                   _call("delete_module", "dockyard_none", 0, reached=(errno.ENOENT,)), _AS_ROOT),
    _by_capability(20, "reboot", "a restart", _call("reboot", 0, 0, 0, None, reached=(errno.EINVAL,)),
                   _AS_ROOT),
    _by_capability(20, "swapon", "a swap file", _call("swapon", "/dockyard-none", 0, reached=(errno.ENOENT,)),
                   _AS_ROOT),
    _by_capability(20, "acct", "accounting of all processes",
                   _call("acct", "/dockyard-none", reached=(errno.ENOENT,)), _AS_ROOT),
    _by_capability(20, "syslog", "the kernel's log", _call("syslog", 10, None, 0), _AS_ROOT),
    _by_seccomp(20, "quotactl", "quotas",
                _call("quotactl", _Q_QUOTAON, "/dockyard-none", 0, None, reached=(errno.ENOENT,))),
    _by_seccomp(20, "add-key", "a key", _call("add_key", "user", "dockyard", "x", 1, -1)),
    _by_seccomp(20, "keyctl", "a keyring", _call("keyctl", 0, -3, 0)),
    _by_seccomp(20, "fanotify", "file accesses of others watched", _call("fanotify_init", 0x200, 0)),
    _by_seccomp(20, "pidfd-getfd", "a descriptor of another process",
                _call("pidfd_getfd", -1, 0, 0, reached=(errno.EBADF,))),
    _by_seccomp(20, "process-vm-readv", "memory of another process",
                _call("process_vm_readv", 1, None, 0, None, 0, 0)),
    _by_capability(20, "kcmp", "kernel objects of pid 1 compared", _call("kcmp", 1, 1, 0, 0, 0),
                   _IN_NAMESPACES),
    _by_capability(20, "open-by-handle", "a file by its handle, past every mount",
                   _call("open_by_handle_at", -100, _HANDLE, 0, reached=(errno.ESTALE,)), _AS_ROOT),
    _by_seccomp(20, "prlimit", "limits of pid 1 lowered",
                _call("prlimit64", 1, _RLIMIT_CORE, _NO_CORE, None)),
    _by_seccomp(21, "io-uring", "a ring of asynchronous calls", _call("io_uring_setup", 4, {"room": 120})),
    _by_seccomp(77, "io-uring-network", "a connection by a ring, past hooks on sockets: no ring can be made",
                _call("io_uring_setup", 4, {"room": 120})),
    _by_seccomp(21, "io-setup", "a context of asynchronous calls, of which the machine has few",
                _call("io_setup", 1, {"room": 8}), frozenset({"ENOSYS"})),
    _by_seccomp(23, "tiocsti", "keys typed into a terminal",
                Probe("calls", "terminal_ioctl", (_number("ioctl"), "0x5412", "78"))),
    _by_seccomp(23, "tiocsti-high-bits", "the same with bits that only a filter would read (CVE-2019-10063)",
                Probe("calls", "terminal_ioctl", (_number("ioctl"), "0x100005412", "78"))),
    _by_seccomp(23, "tioclinux", "the console's clipboard",
                Probe("calls", "terminal_ioctl", (_number("ioctl"), "0x541c", "02", str(errno.ENOTTY)))),
    _by_seccomp(23, "tiocsetd", "a line discipline of a terminal",
                Probe("calls", "terminal_ioctl", (_number("ioctl"), "0x5423", "00"))),
    _by_seccomp(34, "xfs-swapext", "extents of two files exchanged",
                Probe("calls", "file_ioctl", (_number("ioctl"), "0xC0C0586D", "/tmp/extents",
                str(errno.ENOTTY)))),
    _by_capability(34, "freeze", "a file system that takes no writes any more",
                   Probe("calls", "file_ioctl", (_number("ioctl"), "0xC0045877", "/tmp/frozen",
                   str(errno.EOPNOTSUPP))), _AS_ROOT),
    _by_capability(58, "settimeofday", "another time", _call("settimeofday", None, None), _AS_ROOT),
)  # fmt: skip

_SOCKETS: tuple[list[Case], ...] = (
    _in_spaces(9, "packet-socket", "packets below IP (CVE-2020-14386)", _spaced("socket", _PACKET, 3, 0),
               shut=_NO_FAMILY, also=_EPERM),
    _in_spaces(75, "xdp-socket", "packets past the kernel's network", _spaced("socket", _XDP, 3, 0),
               shut=_NO_FAMILY, also=_EPERM),
    _by_seccomp(33, "vsock", "a socket to the machine's host", _call("socket", _VSOCK, 1, 0), _NO_FAMILY),
    _by_seccomp(33, "vsock-high-bits", "the same with bits that only a filter would read",
                _call("socket", _VSOCK | 1 << 32, 1, 0), _NO_FAMILY),
    _by_seccomp(75, "netlink-audit", "the audit of the machine", _call("socket", _NETLINK, 3, _NETLINK_AUDIT),
                frozenset({"EPROTONOSUPPORT"})),
)  # fmt: skip

_OLD_DOORS: tuple[list[Case], ...] = (
    _by_seccomp(24, "int80", "a system call by the door of 32-bit programs",
                Probe("calls", "machine_code", (_GETPID_BY_INT80,)), frozenset({"signal 31"})),
    [_case(24, "x32", "a system call by x32's numbers", Probe("calls", "call", (_GETPID_OF_X32,)),
           Outside("root"), mechanism=_BY_SECCOMP, shut=frozenset({"signal 31"}))],
    _by_seccomp(20, "sysfs-call", "file systems by number", _call("sysfs", 3)),
    _by_capability(20, "iopl", "ports of the hardware", _call("iopl", 3), _AS_ROOT),
) if _X86 else ()  # fmt: skip

CASES: tuple[Case, ...] = tuple(
    case
    for group in (_MOUNTS, _NAMESPACES, _MACHINE, _SOCKETS, _OLD_DOORS)
    for cases in group
    for case in cases
)
