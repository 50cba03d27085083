"""Every known attack on every substrate: the door is shut, by what the case names, and it is a door."""

from collections import Counter

import pytest

from bench.attack_cases import ABSENT, CASES, NUMBERS
from bench.attack_cases.arena import Arena
from bench.attack_cases.model import SUBSTRATES, Case, NoControl
from bench.attack_cases.trial import run_case
from sandbox.audit import check_integrity

LONG = [pytest.mark.soak, pytest.mark.timeout(1_800)]
ATTACKS = [
    pytest.param(substrate, case, id=f"{substrate}-{case.key}", marks=LONG if case.soak else [])
    for substrate in SUBSTRATES
    for case in CASES
    if substrate in case.on
]


@pytest.mark.parametrize(("arena", "case"), ATTACKS, indirect=["arena"])
def test_the_door_is_shut(arena: Arena, case: Case):
    finding = run_case(case, arena)
    if finding.outcome == "not here":
        pytest.skip(finding.said)
    assert finding.outcome == case.effect, finding
    assert finding.shown or finding.control.startswith("no control: "), finding
    assert check_integrity(arena.state_dir).leftovers == ()


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
