"""`make test` in two runs: each test is in one of them, and what is wrong in either ends both."""

import pytest
from side_by_side import OF_THE_MACHINE, TESTS, verdict


def test_the_first_run_has_folders_that_are_there_and_none_within_another():
    folders = [TESTS / each for each in OF_THE_MACHINE]
    assert [each for each in folders if not any(each.glob("test_*.py"))] == []
    assert [each for each in folders if {*each.parents} & {*folders}] == []


@pytest.mark.parametrize(
    ("first", "second", "both"),
    [(0, 0, 0), (0, 5, 0), (5, 0, 0), (5, 5, 5), (1, 0, 1), (0, 1, 1), (5, 1, 1), (1, 2, 1), (0, -9, 9)],
)
def test_the_code_of_both_is_of_what_was_wrong(first: int, second: int, both: int):
    assert verdict(first, second) == both
