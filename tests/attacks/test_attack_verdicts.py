"""The suite itself: an open door is called open, and nothing passes for shown that is not."""

import json
import os
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from bench import attacks
from bench.attack_cases import neighbour, programs
from bench.attack_cases.arena import Arena
from bench.attack_cases.model import (
    WITHOUT_BOTH,
    WITHOUT_LANDLOCK,
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
from bench.attack_cases.programs import judge
from bench.attack_cases.trial import Finding, Outcome, run_case
from sandbox import Policy
from sandbox.policy.calls import MACHINES, NUMBERS, this_machine

pytestmark = pytest.mark.parametrize("arena", ["function"], indirect=True)
OPEN, SHUT = ("/workspace/x",), ("/etc/x",)
HERE = Instead(OPEN, "in /workspace")


def case(
    arguments: tuple[str, ...], control: object = HERE, shut: str = "EACCES", name: str = "make_file"
) -> Case:
    return Case(1, "x", "x", Probe("paths", name, arguments), frozenset({shut}), "modes", control)  # pyright: ignore


def test_an_open_door_is_called_open(arena: Arena):
    finding = run_case(case(OPEN), arena)
    assert (finding.outcome, finding.shown) == ("open", False)


def test_a_shut_door_with_a_control_is_shown(arena: Arena):
    finding = run_case(case(SHUT), arena)
    assert (finding.outcome, finding.shown) == ("denied", True)
    assert finding.control == "in /workspace: wrote to /workspace/x"


def test_a_door_that_is_shut_otherwise_than_expected_fails(arena: Arena):
    assert run_case(case(SHUT, shut="EPERM"), arena).outcome == "failed"


def test_a_probe_that_breaks_is_no_shut_door(arena: Arena):
    finding = run_case(case((), name="find_file"), arena)
    assert finding.outcome == "failed"
    assert "TypeError" in finding.said


@pytest.mark.parametrize("error", [PermissionError(13, "Permission denied", "/x"), OSError("no seat")])
def test_an_error_that_no_sandbox_raises_fails_whoever_tries(
    arena: Arena, error: OSError, monkeypatch: pytest.MonkeyPatch
):
    """Nobody's rights excuse it: a case that takes root's says so in `needs`."""

    def deed(_: Arena) -> Seen:
        raise error

    by_deed = Case(1, "x", "x", deed, frozenset({"EACCES"}), "modes", HERE)
    by_control = replace(by_deed, attack=case(SHUT).attack, control=Shown(deed, "in a folder"))
    for uid in (os.geteuid(), 65534):
        monkeypatch.setattr(os, "geteuid", lambda uid=uid: uid)
        finding = run_case(by_deed, arena)
        assert (finding.outcome, finding.said) == ("failed", f"{type(error).__name__}: {error}")
        assert run_case(by_control, arena).outcome == "failed"


def test_a_control_that_finds_the_door_shut_fails(arena: Arena):
    assert run_case(case(SHUT, Instead(SHUT, "again")), arena).outcome == "failed"


def test_a_case_without_a_control_is_not_shown(arena: Arena):
    finding = run_case(case(SHUT, NoControl("too dear")), arena)
    assert (finding.outcome, finding.shown, finding.control) == ("denied", False, "no control: too dear")


def test_protections_that_are_said_to_hold_a_door_each_must(arena: Arena):
    """Landlock alone holds this one, so without it the door is open although seccomp is on."""
    own = case(("/proc/self/comm",), WITHOUT_BOTH)
    finding = run_case(own, arena)
    assert finding.outcome == "failed"
    assert "without landlock alone" in finding.control
    assert run_case(case(("/proc/self/comm",), WITHOUT_LANDLOCK), arena).shown


def test_what_a_kernel_does_not_have_is_not_shown(arena: Arena):
    nothing = Case(
        1, "x", "x", Probe("calls", "call", ("1000",)), frozenset({"ENOSYS"}), "none", Outside("user")
    )
    finding = run_case(nothing, arena)
    assert (finding.outcome, finding.shown) == ("denied", False)
    assert "does not have it" in finding.control


def test_one_open_door_fails_the_bench(arena: Arena):
    def finding(outcome: Outcome) -> Finding:
        return Finding(
            "01-x", "x", "function", outcome, "said", "seccomp", "control", shown=outcome == "denied"
        )

    del arena
    shut = attacks.report([finding("denied"), finding("not here")], [])
    assert (shut["met"], shut["value"], shut["shown"], shut["not_here"]) == (True, 0, 1, 1)
    bad_ones: tuple[Outcome, ...] = ("open", "failed")
    for bad in bad_ones:
        assert attacks.report([finding("denied"), finding(bad)], [])["met"] is False
    assert attacks.report([finding("denied")], ["mount /x"])["met"] is False
    assert attacks.report([finding("not here")], [])["met"] is False


def test_the_bench_says_case_substrate_outcome_mechanism_and_control(
    arena: Arena, capsys: pytest.CaptureFixture[str]
):
    del arena
    assert attacks.main(["--json", "--quick", "--only", "11-own-score"]) == 0
    found = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert [each["substrate"] for each in found["cases"]] == ["function", "container"]
    for each in found["cases"]:
        assert {"case", "substrate", "outcome", "mechanism", "control"} <= set(each)


def test_a_table_that_holds_nothing_is_told_from_one_that_does(arena: Arena):
    """What is said to be held twice over has to be: here the table lets it pass, or the rest would."""
    number = str(NUMBERS["sync"][MACHINES.index(this_machine())])
    harmless = Case(
        1, "x", "x", Probe("calls", "call", (number,)), frozenset({"EPERM"}), "both", Apart("user")
    )
    assert run_case(harmless, arena).outcome == "open"
    keys = str(NUMBERS["keyctl"][MACHINES.index(this_machine())])
    by_seccomp = Case(
        1, "x", "x", Probe("calls", "call", (keys, "[0, -3, 0]")), frozenset({"EPERM"}), "both", Apart("user")
    )
    finding = run_case(by_seccomp, arena)
    assert (finding.outcome, "without seccomp alone" in finding.control) == ("failed", True)


@pytest.mark.parametrize(
    ("harm", "words"),
    [
        ("kill $(cat resident)", "not well"),
        ("echo x >> files/3", "not well"),
        ("echo x > mark", "not well"),
    ],
)
def test_a_neighbour_that_is_harmed_is_noticed(
    arena: Arena, state_dir: Path, toolkit: Path, harm: str, words: str
):
    del arena
    with Arena("function", state_dir=state_dir, toolkit=toolkit) as own:

        def deed(arena: Arena) -> Seen:
            arena.neighbour.commands.run(harm)
            return Seen(False, "EACCES")

        finding = run_case(Case(1, "x", "x", deed, frozenset({"EACCES"}), "modes", HERE), own)
        assert finding.outcome == "failed"
        assert words in finding.said


HARMS: dict[str, Callable[[Arena], object]] = {
    "its process": lambda arena: arena.neighbour.commands.run("kill $(cat resident)"),
    "itself": lambda arena: arena.neighbour.kill(),
}


@pytest.mark.parametrize("opened", [True, False])
@pytest.mark.parametrize("harm", HARMS)
def test_what_harms_a_neighbour_fails_alone(
    arena: Arena, state_dir: Path, toolkit: Path, harm: str, opened: bool
):
    """And the rest is tried, beside another one."""
    del arena

    def deed(arena: Arena) -> Seen:
        HARMS[harm](arena)
        return Seen(opened, "EACCES")

    bad = Case(1, "x", "x", deed, frozenset({"EACCES"}), "modes", HERE, on=("function",))
    good = replace(case(SHUT), on=("function",))
    first, *rest = attacks.run_all([bad, good, good], state_dir, toolkit)
    assert first.outcome == ("open" if opened else "failed")
    assert "the neighbour is not well" in first.said
    assert [(each.outcome, each.shown) for each in rest] == [("denied", True)] * 2


def test_no_other_neighbour_fails_the_rest_and_forgets_nothing(
    arena: Arena, state_dir: Path, toolkit: Path, monkeypatch: pytest.MonkeyPatch
):
    del arena

    def refuse(self: Arena) -> None:
        raise neighbour.Harmed("not well from the beginning")

    def deed(arena: Arena) -> Seen:
        arena.neighbour.kill()
        monkeypatch.setattr(Arena, "_settle_neighbour", refuse)
        return Seen(True, "went through")

    bad = Case(1, "x", "x", deed, frozenset({"EACCES"}), "modes", HERE, on=("function",))
    good = replace(case(SHUT), on=("function",))
    found = list(attacks.run_all([bad, good, good], state_dir, toolkit))
    assert [each.outcome for each in found] == ["open", "failed", "failed"]
    assert found[-1].said == "not well from the beginning"


def test_a_fault_of_the_suites_own_is_not_a_cases_outcome(arena: Arena):
    def deed(_: Arena) -> Seen:
        raise AssertionError("of the suite")

    for attack, control in ((deed, HERE), (case(SHUT).attack, Shown(deed, "so"))):
        with pytest.raises(AssertionError, match="of the suite"):
            run_case(replace(case(SHUT), attack=attack, control=control), arena)
    assert not arena.beside.is_lost


def test_what_a_neighbours_thread_comes_to_is_raised(arena: Arena, monkeypatch: pytest.MonkeyPatch):
    def fail(self: neighbour.Neighbour) -> float:
        raise LookupError

    with monkeypatch.context() as patches:
        patches.setattr(neighbour.Neighbour, "_beat", fail)
        with pytest.raises(LookupError):
            run_case(case(SHUT), arena)
    assert run_case(case(SHUT), arena).outcome == "denied"


def test_a_neighbour_that_is_slowed_down_is_noticed(arena: Arena, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(neighbour, "SLOWER", 0.0)
    monkeypatch.setattr(neighbour, "GRACE_S", 0.0)
    finding = run_case(case(SHUT), arena)
    assert finding.outcome == "failed"
    assert "commands took" in finding.said


def test_a_neighbour_that_was_slow_once_is_tried_again(arena: Arena, monkeypatch: pytest.MonkeyPatch):
    """As beside a pause of the whole machine."""
    slow = [neighbour.Slowed("once")]

    def compare(self: neighbour.Neighbour, took_s: list[float]) -> None:
        assert took_s
        if slow:
            raise slow.pop()

    monkeypatch.setattr(neighbour.Neighbour, "_compare", compare)
    assert run_case(case(SHUT), arena).outcome == "denied"
    assert not slow


@pytest.mark.parametrize("fault", [neighbour.Slowed("slow"), neighbour.Harmed("not well")])
def test_a_door_that_opened_once_is_open_whatever_its_neighbour_was(
    arena: Arena, fault: Exception, monkeypatch: pytest.MonkeyPatch
):
    tries = iter([Seen(True, "went through")])

    def deed(_: Arena) -> Seen:
        return next(tries, Seen(False, "EACCES"))

    def compare(self: neighbour.Neighbour, took_s: list[float]) -> None:
        del self, took_s
        raise fault

    monkeypatch.setattr(neighbour.Neighbour, "_compare", compare)
    finding = run_case(Case(1, "x", "x", deed, frozenset({"EACCES"}), "modes", HERE), arena)
    assert (finding.outcome, finding.said) == ("open", f"went through; {fault}")


@pytest.mark.parametrize("ending", ["kill -9 $$", "sleep 50", "head -c 4M /dev/zero"])
def test_what_says_that_it_is_open_is_open_however_it_ends(arena: Arena, ending: str):
    words = f"echo '{json.dumps({'opened': True, 'said': 'went through'})}'; {ending}"
    with arena.sandbox(Box(policy=Policy(output_total_bytes=1 << 20))) as box:
        result = box.commands.run(words, timeout_s=1)
    assert result.reason != "exit"
    assert judge(result) == Seen(True, "went through")


def test_a_shut_door_is_what_ended_it(arena: Arena):
    """One that was ended may have said that it found it shut, and something else, before."""
    with arena.sandbox(Box()) as box:
        result = box.commands.run('echo \'{"opened": false, "said": "EPERM"}\'; sleep 50', timeout_s=0.5)
    assert judge(result) == Seen(False, "timeout")


@pytest.mark.parametrize("opened", [True, False])
def test_so_it_is_outside(arena: Arena, opened: bool, monkeypatch: pytest.MonkeyPatch):
    text = (
        f"import time\nprint({json.dumps({'opened': opened, 'said': 'EPERM'})!r}, flush=True)\ntime.sleep(50)"
    )
    monkeypatch.setattr(programs, "program", lambda name: text)
    seen = arena.outside(Probe("any", "any", timeout_s=3), "user")
    assert seen == (Seen(True, "EPERM") if opened else Seen(False, "timeout"))


def test_a_neighbour_works_while_something_is_tried(arena: Arena):
    seen: list[str] = []

    def deed(arena: Arena) -> Seen:
        first = arena.neighbour.files.read("beat")
        arena.neighbour.commands.run(f"until [ $(cat beat) -gt $(({int(first)} + 2)) ]; do sleep 0.01; done")
        seen.append("it went on")
        return Seen(False, "EACCES")

    run_case(Case(1, "x", "x", deed, frozenset({"EACCES"}), "modes", NoControl("none")), arena)
    assert seen == ["it went on"]
