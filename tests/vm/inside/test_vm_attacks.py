"""Known attacks by a kernel with AppArmor, the guard, modules and one cgroup tree: the door is shut, and the
positive control shows that it is a door. Those that only such a kernel can show, or that are held there by
other means, run always; all of them with `--every-attack` (a quarter of an hour)."""

import pytest

from bench.attack_cases import CASES
from bench.attack_cases.model import SUBSTRATES
from bench.attack_cases.trial import run_case

ALWAYS = frozenset(
    (
        *("05-mount-over-proc", "06-mount-cgroup-2", "11-own-score", "13-mount-binfmt", "16-mount-tmpfs"),
        *("20-bpf", "20-init-module", "20-kexec", "20-iopl", "23-tiocsti", "33-vsock", "36-processes"),
        *("38-memory", "43-disk", "47-sockets", "67-file-capability", "75-egress-packet-socket"),
        *("79-other-cgroup", "87-egress-not-there", "98-control-socket"),
    )
)
OTHERS = pytest.mark.every_attack
ATTACKS = [
    pytest.param(substrate, case, id=f"{substrate}-{case.key}", marks=() if case.key in ALWAYS else OTHERS)
    for substrate in SUBSTRATES
    for case in CASES
    if substrate in case.on and not case.soak
]


@pytest.mark.parametrize(("arena", "case"), ATTACKS, indirect=["arena"])
def test_the_door_is_shut(arena, case):
    finding = run_case(case, arena)
    print(f"{finding.outcome}: {finding.said}; {finding.control}")
    if finding.outcome == "not here" and case.key not in ALWAYS:
        pytest.skip(finding.said)
    assert finding.outcome == case.effect, finding
    assert finding.shown or case.key not in ALWAYS, finding
    assert finding.shown or finding.control.startswith("no control: "), finding


def test_what_runs_always_is_there():
    assert {case.key for case in CASES} >= ALWAYS
