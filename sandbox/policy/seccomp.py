"""Which system calls a sandbox may not make: one table for both substrates. Pure.

An OCI runtime gets the table as it is, bubblewrap gets it as a program for the kernel's filter machine.
Everything else is allowed: what is denied here is the list that container engines deny by default, less what
test suites need (ptrace, personality), and more of what has a history of bugs or is counted for the whole
machine (asynchronous I/O contexts, keys). Numbers are those of Linux for each architecture.
"""

import errno
import platform
import struct
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from typing import Any, Literal

from sandbox.errors import UnsupportedError

Machine = Literal["x86_64", "aarch64"]
Comparison = Literal["equal", "above", "masked"]

# name: number on x86_64, on aarch64; None where it is not there.
NUMBERS: dict[str, tuple[int | None, int | None]] = {
    **{"mount": (165, 40), "umount2": (166, 39), "pivot_root": (155, 41), "chroot": (161, 51)},
    **{"fsopen": (430, 430), "fsmount": (432, 432), "fsconfig": (431, 431), "fspick": (433, 433)},
    **{"move_mount": (429, 429), "open_tree": (428, 428), "mount_setattr": (442, 442)},
    **{"setns": (308, 268), "unshare": (272, 97), "open_by_handle_at": (304, 265)},
    **{"bpf": (321, 280), "perf_event_open": (298, 241), "userfaultfd": (323, 282)},
    **{"keyctl": (250, 219), "add_key": (248, 217), "request_key": (249, 218)},
    **{"kexec_load": (246, 104), "kexec_file_load": (320, 294), "reboot": (169, 142)},
    **{"init_module": (175, 105), "finit_module": (313, 273), "delete_module": (176, 106)},
    **{"create_module": (174, None), "query_module": (178, None), "get_kernel_syms": (177, None)},
    **{"io_uring_setup": (425, 425), "io_uring_enter": (426, 426), "io_uring_register": (427, 427)},
    **{"swapon": (167, 224), "swapoff": (168, 225), "quotactl": (179, 60), "quotactl_fd": (443, 443)},
    **{"acct": (163, 89), "syslog": (103, 116), "vhangup": (153, 58), "lookup_dcookie": (212, 18)},
    **{"process_vm_readv": (310, 270), "process_vm_writev": (311, 271), "kcmp": (312, 272)},
    **{"pidfd_getfd": (438, 438), "process_madvise": (440, 440), "fanotify_init": (300, 262)},
    **{"settimeofday": (164, 170), "clock_settime": (227, 112), "nfsservctl": (180, 42)},
    **{"sethostname": (170, 161), "setdomainname": (171, 162), "iopl": (172, None), "ioperm": (173, None)},
    **{"_sysctl": (156, None), "sysfs": (139, None), "ustat": (136, None), "uselib": (134, None)},
    **{"io_setup": (206, 0), "socket": (41, 198), "socketpair": (53, 199), "ioctl": (16, 29)},
    **{"clone": (56, 220), "clone3": (435, 435), "setsockopt": (54, 208)},
}


@dataclass(frozen=True, slots=True)
class Condition:
    """About one argument, 64 bits wide. masked: its bits in `mask` are those of `value`."""

    argument: int
    comparison: Comparison
    value: int
    mask: int = 0


@dataclass(frozen=True, slots=True)
class Rule:
    """Calls that fail with `errno` where all conditions hold; with 0 they succeed and do nothing."""

    calls: tuple[str, ...]
    errno: int
    conditions: tuple[Condition, ...] = ()


_CONDITIONAL = ("socket", "socketpair", "setsockopt", "ioctl", "clone", "clone3", "io_setup")
_UNIX, _INET, _INET6, _NETLINK, _NETLINK_ROUTE = 1, 2, 10, 16, 0
_NO_FAMILIES = tuple(family for family in range(_NETLINK) if family not in (_UNIX, _INET, _INET6))
_SOL_SOCKET, _SO_RCVBUF = 1, 8
_CLONE_NEWUSER = 0x10000000
# The kernel reads 32 bits of these arguments, so the others must not decide (CVE-2019-10063).
_LOW = 0xFFFFFFFF
# Input into another's terminal, the console's clipboard, line disciplines, and the swap of extents of XFS.
_IOCTLS = {"TIOCSTI": 0x5412, "TIOCLINUX": 0x541C, "TIOCSETD": 0x5423, "XFS_IOC_SWAPEXT": 0xC0C0586D}

RULES: tuple[Rule, ...] = (
    Rule(tuple(name for name in NUMBERS if name not in _CONDITIONAL), errno.EPERM),
    # "Not there": upon which libc uses clone, whose flags no pointer hides, and programs use their threads.
    Rule(("clone3", "io_setup"), errno.ENOSYS),
    Rule(("clone",), errno.EPERM, (Condition(0, "masked", _CLONE_NEWUSER, _CLONE_NEWUSER),)),
    *(Rule(("ioctl",), errno.EPERM, (Condition(1, "masked", each, _LOW),)) for each in _IOCTLS.values()),
    # Families that no network namespace holds (vsock), or that nobody needs without a network.
    *(
        Rule(("socket", "socketpair"), errno.EAFNOSUPPORT, (Condition(0, "masked", family, _LOW),))
        for family in _NO_FAMILIES
    ),
    Rule(("socket", "socketpair"), errno.EAFNOSUPPORT, (Condition(0, "above", _NETLINK),)),
    Rule(
        ("socket",),
        errno.EPROTONOSUPPORT,
        (Condition(0, "equal", _NETLINK), Condition(2, "above", _NETLINK_ROUTE)),
    ),
    # What lies unread in queues of errors and of netlink's answers is no cgroup's memory: a queue keeps its
    # first size. The kernel too cuts down what is asked for without a word.
    Rule(
        ("setsockopt",),
        0,
        (Condition(1, "masked", _SOL_SOCKET, _LOW), Condition(2, "masked", _SO_RCVBUF, _LOW)),
    ),
)

_AUDIT: dict[Machine, int] = {"x86_64": 0xC000003E, "aarch64": 0xC00000B7}
_OCI_NAMES: dict[Machine, str] = {"x86_64": "SCMP_ARCH_X86_64", "aarch64": "SCMP_ARCH_AARCH64"}
_X32_FIRST = 0x40000000
_ALLOW, _KILL_PROCESS, _ERRNO = 0x7FFF0000, 0x80000000, 0x00050000
_LOAD, _AND, _RETURN = 0x20, 0x54, 0x06
_IF_EQUAL, _IF_ABOVE, _IF_AT_LEAST = 0x15, 0x25, 0x35
_NUMBER_AT, _ARCHITECTURE_AT, _ARGUMENTS_AT = 0, 4, 16
_FAILS = -1  # a jump to the end of its block

_Step = tuple[int, int, int, int]  # code, steps to skip when true, when false, operand


def this_machine() -> Machine:
    """UnsupportedError where the table has no numbers for this processor."""
    for known in _AUDIT:
        if platform.machine() == known:
            return known
    raise UnsupportedError(
        f"no table of system calls for {platform.machine()}", hint=f"use {' or '.join(_AUDIT)}"
    )


def oci_seccomp(machine: Machine) -> dict[str, Any]:
    """The table as `linux.seccomp` of config.json. Calls of other architectures end the caller."""
    return {
        "defaultAction": "SCMP_ACT_ALLOW",
        "architectures": [_OCI_NAMES[machine]],
        "syscalls": [_oci_rule(rule) for rule in RULES],
    }


@cache
def filter_program(machine: Machine) -> bytes:
    """The table as instructions of classic BPF (struct sock_filter), as bubblewrap takes them. Calls of other
    architectures end the process; those of x32 are "not there"."""
    steps: list[_Step] = [(_LOAD, 0, 0, _ARCHITECTURE_AT), (_IF_EQUAL, 1, 0, _AUDIT[machine])]
    steps += [(_RETURN, 0, 0, _KILL_PROCESS), (_LOAD, 0, 0, _NUMBER_AT)]
    if machine == "x86_64":
        steps += [(_IF_AT_LEAST, 0, 1, _X32_FIRST), (_RETURN, 0, 0, _ERRNO | errno.ENOSYS)]
    for rule in RULES:
        for name in rule.calls:
            number = NUMBERS[name][list(_AUDIT).index(machine)]
            if number is not None:
                steps += _block(number, rule)
    steps.append((_RETURN, 0, 0, _ALLOW))
    return b"".join(struct.pack("=HBBI", *step) for step in steps)


def _oci_rule(rule: Rule) -> dict[str, Any]:
    written: dict[str, Any] = {"names": list(rule.calls), "action": "SCMP_ACT_ERRNO", "errnoRet": rule.errno}
    if rule.conditions:
        written["args"] = [_oci_argument(each) for each in rule.conditions]
    return written


def _oci_argument(condition: Condition) -> dict[str, Any]:
    if condition.comparison == "masked":
        values = {"value": condition.mask, "valueTwo": condition.value, "op": "SCMP_CMP_MASKED_EQ"}
    else:
        name = "SCMP_CMP_EQ" if condition.comparison == "equal" else "SCMP_CMP_GT"
        values = {"value": condition.value, "valueTwo": 0, "op": name}
    return {"index": condition.argument, **values}


def _block(number: int, rule: Rule) -> Iterator[_Step]:
    """Fails the call where the rule holds; else goes on after the block, the number in the accumulator."""
    body = [step for each in rule.conditions for step in _condition(each)]
    body.append((_RETURN, 0, 0, _ERRNO | rule.errno))
    end = len(body)
    if rule.conditions:
        body.append((_LOAD, 0, 0, _NUMBER_AT))
    yield (_IF_EQUAL, 0, len(body), number)
    for at, (code, when_true, when_false, operand) in enumerate(body):
        yield (code, when_true, end - at - 1 if when_false == _FAILS else when_false, operand)


def _condition(condition: Condition) -> list[_Step]:
    """Two halves of 32 bits, the low one first in memory on both architectures."""
    low_at = _ARGUMENTS_AT + 8 * condition.argument
    low, high = condition.value & _LOW, condition.value >> 32
    if condition.comparison == "masked":
        halves = ((low_at, condition.mask & _LOW, low), (low_at + 4, condition.mask >> 32, high))
        return [
            step
            for at, mask, value in halves
            if mask
            for step in ((_LOAD, 0, 0, at), (_AND, 0, 0, mask), (_IF_EQUAL, 0, _FAILS, value))
        ]
    if condition.comparison == "equal":
        equal = [(_LOAD, 0, 0, low_at + 4), (_IF_EQUAL, 0, _FAILS, high)]
        return [*equal, (_LOAD, 0, 0, low_at), (_IF_EQUAL, 0, _FAILS, low)]
    above = [(_LOAD, 0, 0, low_at + 4), (_IF_ABOVE, 3, 0, high), (_IF_EQUAL, 0, _FAILS, high)]
    return [*above, (_LOAD, 0, 0, low_at), (_IF_ABOVE, 0, _FAILS, low)]
