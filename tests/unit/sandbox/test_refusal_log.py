"""Refusals in the audit log: there, counted, and never many."""

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sandbox.audit_log import FILE_NAME, SandboxLog, entries
from sandbox.refusal_log import MAX_LINES, MAX_TEXT, Allowance, RefusalLog, _is_round
from sandbox.refusals import Attempt, Refusals

PLENTY = 1e9


def attempt(number: int = 0) -> Attempt:
    return Attempt("connect", f"192.0.2.{number % 250}", number, "tcp")


def logged(state_dir: Path, allowance: Allowance | None = None) -> tuple[Refusals, RefusalLog]:
    refusals, log = Refusals(), RefusalLog(SandboxLog(state_dir, "sbx-1"), allowance or Allowance(PLENTY, 0))
    refusals.watcher = log
    return refusals, log


def test_the_first_the_tenth_and_the_hundredth_are_lines(tmp_path: Path):
    refusals, log = logged(tmp_path)
    for _ in range(250):
        refusals.add(attempt(81))
    found = list(entries(tmp_path))
    assert [each["count"] for each in found] == [1, 10, 100]
    assert found[0] == {
        **found[0], "deed": "refused", "sandbox": "sbx-1", "hook": "connect", "address": "192.0.2.81",
        "port": 81, "protocol": "tcp",
    }  # fmt: skip
    assert log.num_left_out == 247


def test_one_sandbox_has_so_many_lines_whatever_it_tries(tmp_path: Path):
    refusals, log = logged(tmp_path)
    for number in range(20_000):
        refusals.add(attempt(number % 5000))
    found = list(entries(tmp_path))
    assert len(found) == MAX_LINES
    assert log.num_left_out == 20_000 - MAX_LINES
    assert (tmp_path / FILE_NAME).stat().st_size < MAX_LINES * 1024


def test_all_of_a_process_share_what_there_is_a_second(tmp_path: Path):
    now = [0.0]
    allowance = Allowance(10, 2, lambda: now[0])
    boxes = [logged(tmp_path, allowance) for _ in range(50)]
    for refusals, _ in boxes:
        refusals.add(attempt())
    assert len(list(entries(tmp_path))) == 10
    now[0] = 3.0
    for refusals, _ in boxes:
        refusals.add(attempt(1))
    assert len(list(entries(tmp_path))) == 16
    assert sum(log.num_left_out for _, log in boxes) == 100 - 16


def test_what_is_said_is_as_long_as_names_are(tmp_path: Path):
    refusals, _ = logged(tmp_path)
    refusals.add(Attempt("name", "a\n\x00é" * 1000, 53, "dns", "is not allowed"))
    (line,) = (tmp_path / FILE_NAME).read_text().splitlines()
    assert len(line) < 6 * MAX_TEXT + 300
    (found,) = entries(tmp_path)
    assert len(found["address"]) == MAX_TEXT


def test_a_log_that_cannot_be_written_holds_nobody_up(tmp_path: Path):
    refusals, _ = logged(tmp_path / "absent")
    for number in range(100):
        refusals.add(attempt(number))
    assert sum(refusals.counts().values()) == 100
    assert not (tmp_path / "absent").exists()


@given(st.integers(1, 10**12))
def test_round_numbers_are_powers_of_ten(count: int):
    assert _is_round(count) == (str(count).rstrip("0") == "1")


@given(st.lists(st.floats(0, 5), max_size=60))
def test_an_allowance_is_never_more_than_it_says(waits: list[float]):
    now, taken = [0.0], 0
    allowance = Allowance(5, 3, lambda: now[0])
    for wait in waits:
        now[0] += wait
        taken += allowance.take()
    assert taken <= 5 + 3 * now[0] + 1e-6


@pytest.mark.parametrize("at_once", [0.0, 0.5])
def test_less_than_one_is_none(at_once: float):
    assert not Allowance(at_once, 0).take()
