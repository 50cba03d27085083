"""Known attacks on sandboxes, each with a positive control.

Both `tests/attacks` and `bench/attacks.py` run them, so they lie where both may import from: `bench` imports
everything and is shipped to nobody,
and no package may import tests. Numbers are those of the project's list of
known attacks, which has gaps.
"""

from bench.attack_cases import (
    cases_calls,
    cases_egress,
    cases_files,
    cases_integrity,
    cases_kernel,
    cases_network,
    cases_resources,
)
from bench.attack_cases.model import Absent, Case

GROUPS: dict[str, tuple[Case, ...]] = {
    "kernel surface: calls": cases_calls.CASES,
    "kernel surface: files and sockets": cases_kernel.CASES,
    "resources": cases_resources.CASES,
    "file trust": cases_files.CASES,
    "network: none": cases_network.CASES,
    "network: rules": cases_egress.CASES,
    "integrity": cases_integrity.CASES,
}
CASES: tuple[Case, ...] = tuple(
    sorted((case for group in GROUPS.values() for case in group), key=lambda case: (case.number, case.name))
)

_NO_PROXY = "rules know addresses and names, and nothing of ours looks into TLS or HTTP"
ABSENT: tuple[Absent, ...] = (
    Absent(81, "metadata through a proxy that is allowed", _NO_PROXY),
    Absent(83, "DNS over HTTPS to a host that is allowed", _NO_PROXY),
    Absent(84, "names in TLS that differ from the host's, fronting, CONNECT, redirects", _NO_PROXY),
    Absent(85, "a mirror that has the answer", "what an allowed mirror offers is the mirror's; none is ours"),
    Absent(
        91, "a covert channel through a host that is allowed", "a residual risk: what is allowed can be used"
    ),
    Absent(96, "later commits in a task's repository", "images hold no repositories yet"),
    Absent(104, "orders to a judge in what is printed", "no judge reads output here: tests decide"),
)
_ROOTS = "the helper gives none: only root's sandboxes have it"
NOT_HELPED: tuple[Absent, ...] = (
    Absent(43, "more files and bytes than a layer on disk holds", _ROOTS),
    Absent(32, "doors that AppArmor holds: protected and hidden places", _ROOTS),
    Absent(20, "doors that the guard at the kernel's hooks holds", _ROOTS),
)
"""What an ordinary user cannot express, with a helper or without."""
NUMBERS: frozenset[int] = frozenset(
    (*range(1, 4), *range(5, 8), *range(9, 15), *range(16, 19), 20, 21, 23, 24, 26, *range(28, 31),
    *range(32, 36),
     *range(36, 39), *range(40, 45), 46, 47, 49, *range(51, 54), *range(55, 60), 60, *range(62, 65), 67, 69,
     70,
     71, 72, 74, 75, 77, 79, *range(81, 88), *range(89, 92), 92, 93, *range(95, 99), 100, 102, 104, 105, 106)
)  # fmt: skip
