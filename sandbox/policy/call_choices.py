"""What becomes of system calls whose arguments decide, beside the table of the others. Pure."""

import errno
from dataclasses import dataclass

from sandbox.policy.calls import ALLOW, known_calls

OTHERWISE = errno.ENOSYS  # of calls that the table does not have
# The kernel reads 32 bits of all arguments that are judged, so the others must not decide (CVE-2019-10063).
LOW = 0xFFFFFFFF


@dataclass(frozen=True, slots=True)
class Choice:
    """By an argument's bits in `mask`, of its low 32: what the case with its value says, else `otherwise`.
    A verdict is ALLOW or an errno, as in the table."""

    argument: int
    cases: tuple[tuple[tuple[int, ...], "Verdict"], ...]
    otherwise: "Verdict"
    mask: int = LOW

    def by_value(self) -> dict[int, "Verdict"]:
        """All cases; no value is in two."""
        return {value: then for values, then in self.cases for value in values}


Verdict = int | Choice

_UNIX, _INET, _INET6, _NETLINK, _NETLINK_ROUTE = 1, 2, 10, 16, 0
# Families that no network namespace holds (vsock), or that nobody needs without a network, are not there.
_FAMILY = Choice(
    0,
    (
        ((_UNIX, _INET, _INET6), ALLOW),
        ((_NETLINK,), Choice(2, (((_NETLINK_ROUTE,), ALLOW),), errno.EPROTONOSUPPORT)),
    ),
    errno.EAFNOSUPPORT,
)
# CLONE_NEW* of mounts, cgroups, host name, IPC, users, processes and networks.
_NEW_NAMESPACES = 0x7E020000
_SOL_SOCKET, _SO_RCVBUF = 1, 8
# None; Linux of 32 bits; releases called 2.6; both; fixed addresses; and the question which one it is.
_PERSONALITIES = (0, 0x8, 0x20000, 0x20008, 0x40000, LOW)
# Requests by the letter in bits 8 to 15. T: terminals, where keys typed into another's (TIOCSTI), the
# console's clipboard (TIOCLINUX) and line disciplines (TIOCSETD) are refused. X, f and 0x94: maintenance of
# XFS, ext4 and Btrfs, and attributes of files; allowed is to read attributes, flags and extents, to clone
# (FICLONE, FICLONERANGE, FIDEDUPERANGE), and to read a label.
_LETTER = 0xFF00
_TYPES = (0x5412, 0x541C, 0x5423)
_ATTRIBUTES = (0x801C581F,)
_READS = (0x80086601, 0x80046601, 0xC020660B)
_CLONES = (0x40049409, 0x4020940D, 0xC0189436, 0x81009431)
# Numbers of linux/prctl.h. Not among them: the memory map of a process (SET_MM), merging of equal pages, core
# scheduling, the I/O of block drivers, failing memory, and what only other processors have.
_PR_SET_VMA, _PR_SET_PTRACER = 0x53564D41, 0x59616D61
_OPTIONS = (
    *(1, 2, 3, 4, 7, 8, 15, 16),  # signal at the parent's end, dumps, capabilities kept, name
    *range(21, 31),  # seccomp, bounding set, time stamp counter, securebits, timer slack
    *range(36, 43),  # subreaper, no new privileges, address of the thread's id, huge pages
    *(
        47,
        *range(50, 57),
        *range(59, 62),
        *range(63, 67),
    ),  # ambient set; vectors, keys, tags, fixed code
    *range(74, 79),  # shadow stacks, numbers of timers, futexes
    *(_PR_SET_VMA, _PR_SET_PTRACER),
)

_ITSELF = 0  # a pid of 0: by its number too a process may ask for itself, but no filter knows it

CHOICES: dict[str, Choice] = {
    "socket": _FAMILY,
    "socketpair": _FAMILY,
    "clone": Choice(0, (((0,), ALLOW),), errno.EPERM, mask=_NEW_NAMESPACES),
    # Init and minders have a command's uid, so a command could lower their limits.
    "prlimit64": Choice(0, (((_ITSELF,), ALLOW),), errno.EPERM),
    "personality": Choice(0, ((_PERSONALITIES, ALLOW),), errno.EPERM),
    "prctl": Choice(0, ((_OPTIONS, ALLOW),), errno.EINVAL),
    "ioctl": Choice(
        1,
        (
            ((ord("T") << 8,), Choice(1, ((_TYPES, errno.EPERM),), ALLOW)),
            ((ord("X") << 8,), Choice(1, ((_ATTRIBUTES, ALLOW),), errno.EPERM)),
            ((ord("f") << 8,), Choice(1, ((_READS, ALLOW),), errno.EPERM)),
            ((0x94 << 8,), Choice(1, ((_CLONES, ALLOW),), errno.EPERM)),
        ),
        ALLOW,
        mask=_LETTER,
    ),
    # What lies unread in queues of errors and of netlink's answers is no cgroup's memory: a queue keeps its
    # first size. The kernel too cuts down what is asked for without a word.
    "setsockopt": Choice(1, (((_SOL_SOCKET,), Choice(2, (((_SO_RCVBUF,), 0),), ALLOW)),), ALLOW),
}


def verdict_of(name: str) -> Verdict:
    """What becomes of a call that the table has."""
    calls = known_calls()
    return CHOICES[name] if name in calls.by_arguments else calls.verdicts[name]
