"""AppArmor: one profile for each distinct policy, as text for `apparmor_parser`. Pure.

It says again what namespaces, capabilities, Landlock and seccomp say already, in a mechanism of its own, and
says what none of them can: which paths inside of a writable directory are not to be written, or not to be
read. Init puts itself under the profile before it serves, so it holds for all that runs in the sandbox.

Source: apparmor.d(5), and the profile that container engines use by default.
"""

import hashlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import PurePosixPath

from sandbox.policy.paths import plain

PREFIX = "dockyard-"
_CAPABILITIES = (
    *("audit_control", "audit_read", "audit_write", "block_suspend", "bpf", "checkpoint_restore", "ipc_lock"),
    *("ipc_owner", "lease", "linux_immutable", "mac_admin", "mac_override", "mknod", "net_admin"),
    *("net_broadcast", "net_raw", "perfmon", "sys_admin", "sys_boot", "sys_chroot", "sys_module", "sys_nice"),
    *("sys_pacct", "sys_ptrace", "sys_rawio", "sys_resource", "sys_time", "sys_tty_config", "syslog"),
    "wake_alarm",
)
_UNREADABLE = (
    *("/proc/kcore", "/proc/kmem", "/proc/mem", "/proc/kallsyms", "/proc/keys", "/proc/kmsg"),
    *("/proc/sysrq-trigger", "/proc/kpage*", "/proc/timer_list", "/sys/firmware/**"),
    *("/sys/kernel/debug/**", "/sys/kernel/security/**", "/sys/kernel/tracing/**", "/sys/fs/bpf/**"),
)
_UNWRITABLE = ("/proc/sys/**", "/sys/**")
_SPECIAL = frozenset("*?[]{}^@")
_TOP = 2  # parts of a path such as /workspace


@dataclass(frozen=True, slots=True)
class Profile:
    """`name` follows from the text and the scope, so equal policies of one scope share it."""

    name: str
    text: str


def profile(scope: str, *, protected: Sequence[str] = (), hidden: Sequence[str] = ()) -> Profile:
    """A sandbox may read and not write what lies at and below `protected`, and do neither at `hidden`. Paths
    are matched, so folders above them can be neither made nor renamed, nor their modes changed.
    `scope`: letters and digits that tell owners apart."""
    places = [plain(path) for path in protected], [plain(path) for path in hidden]
    rules = "\n".join(f"  {rule}," for rule in _rules(*places))
    name = f"{PREFIX}{scope}-{hashlib.sha256(rules.encode()).hexdigest()[:16]}"
    flags = "attach_disconnected,mediate_deleted"
    body = f"profile {name} flags=({flags}) {{\n{rules.replace(_SELF, name)}\n}}\n"
    return Profile(name, f"abi <abi/3.0>,\n{body}")


_SELF = "@SELF@"


def _rules(protected: Sequence[str], hidden: Sequence[str]) -> Iterator[str]:
    yield from ("file", "unix", "network inet", "network inet6", "network unix", "network netlink raw")
    yield f"signal (send, receive) peer={_SELF}"
    yield "signal (receive) peer=unconfined"  # of the owner
    yield f"ptrace (trace, read, tracedby, readby) peer={_SELF}"
    yield "ptrace (tracedby, readby) peer=unconfined"
    yield from ("deny mount", "deny remount", "deny umount", "deny pivot_root", "deny network packet")
    yield from (f"deny capability {name}" for name in _CAPABILITIES)
    yield from (f"deny {path} rwklx" for path in _UNREADABLE)
    yield from (f"deny {path} wkl" for path in _UNWRITABLE)
    for path in protected:
        yield from _both("audit deny", path, "wl")
    for path in hidden:
        yield from _both("audit deny", path, "rwklx")
    for path in dict.fromkeys(parent for place in (*protected, *hidden) for parent in _parents(place)):
        yield from _itself("audit deny", path, "wl")


def _parents(path: str) -> Iterator[str]:
    """Those that a sandbox could rename, and with them what its places are called: the root's own entries are
    nobody's there to rename."""
    yield from (str(parent) for parent in PurePosixPath(path).parents if len(parent.parts) > _TOP)


def _both(action: str, path: str, access: str) -> Iterator[str]:
    """The place itself, and what lies below."""
    yield from _itself(action, path, access)
    yield f'{action} "{_quoted(path)}/**" {access}'


def _itself(action: str, path: str, access: str) -> Iterator[str]:
    """As a file and as a directory."""
    yield f'{action} "{_quoted(path)}" {access}'
    yield f'{action} "{_quoted(path)}/" {access}'


def _quoted(path: str) -> str:
    return "".join(f"\\{letter}" if letter in _SPECIAL else letter for letter in path)
