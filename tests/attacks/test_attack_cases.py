"""Every known attack on every substrate: the door is shut, by what the case names, and it is a door."""

import os
from collections import Counter

import pytest

from bench.attack_cases import ABSENT, CASES, NUMBERS
from bench.attack_cases.arena import Arena
from bench.attack_cases.cases_resources import needs_cgroups
from bench.attack_cases.model import SUBSTRATES, Case, NoControl, Substrate
from bench.attack_cases.trial import Finding, run_case
from bench.attack_cases.world import missing
from sandbox.audit import check_integrity

LONG = [pytest.mark.soak, pytest.mark.timeout(1_800)]
ATTACKS = [
    pytest.param(substrate, case, id=f"{substrate}-{case.key}", marks=LONG if case.soak else [])
    for substrate in SUBSTRATES
    for case in CASES
    if substrate in case.on
]
# What root may fail to show: there is nothing to switch off, or kernels leave these calls out.
MAY_LACK_CONTROL = frozenset(
    (
        *("35-read-everything", "64-read-socket", "20-delete-module", "20-finit-module", "20-init-module"),
        *("20-iopl", "20-kexec", "24-x32"),
    )
)
MAY_BE_MISSING = frozenset({"06-mount-cgroup-1", "12-uevent-helper"})
LEAST_SHOWN = 171  # of a substrate, where root can connect and limit sandboxes
found: dict[Substrate, dict[str, Finding]] = {}


@pytest.mark.parametrize(("arena", "case"), ATTACKS, indirect=["arena"])
def test_the_door_is_shut(arena: Arena, case: Case):
    finding = run_case(case, arena)
    found.setdefault(arena.substrate, {})[case.key] = finding
    if finding.outcome == "not here":
        pytest.skip(finding.said)
    assert finding.outcome == case.effect, finding
    assert finding.shown or finding.control.startswith("no control: "), finding
    if os.geteuid() == 0:
        assert finding.shown or case.key in MAY_LACK_CONTROL, finding
    assert check_integrity(arena.state_dir).leftovers == ()


@pytest.mark.parametrize("arena", SUBSTRATES, indirect=True)
def test_most_doors_are_shown_to_be_doors(arena: Arena):
    """What this host lacks counts for nothing shown: a control, or a case, does not vanish without a word."""
    findings = found.get(arena.substrate, {})
    if os.geteuid() != 0 or not findings.keys() >= {case.key for case in CASES if not case.soak}:
        pytest.skip("asks for root and for all cases")
    lacking = {missing(), needs_cgroups()} - {""}
    gone = [key for key, each in findings.items() if each.outcome == "not here" and each.said not in lacking]
    assert set(gone) <= MAY_BE_MISSING
    if lacking:
        pytest.skip(f"fewer can be shown here: {' and '.join(sorted(lacking))}")
    assert sum(each.shown for each in findings.values()) >= LEAST_SHOWN


def test_what_may_go_without_is_there():
    assert {case.key for case in CASES} >= MAY_LACK_CONTROL | MAY_BE_MISSING


def test_no_known_attack_is_left_out():
    assert {case.number for case in CASES} | {absent.number for absent in ABSENT} == NUMBERS


def test_each_case_has_one_name_and_is_on_each_substrate():
    named = Counter((case.key, substrate) for case in CASES for substrate in case.on)
    assert set(named.values()) == {1}
    assert set(named) == {(case.key, substrate) for case in CASES for substrate in SUBSTRATES}


def test_cases_without_a_control_are_few():
    """And say why; those whose control this kernel lacks are not counted."""
    without = [case for case in CASES if isinstance(case.control, NoControl)]
    assert len(without) <= 2
    assert all(case.control.reason for case in without if isinstance(case.control, NoControl))
