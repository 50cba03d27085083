"""The book of id ranges: what one user has had is never another's."""

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sandbox.privileged import ranges
from sandbox.privileged.ranges import FIRST_ID, LAST_ID, NUM_IDS, Ranges

ALICE, BOB = 61001, 61002


@pytest.fixture
def few(monkeypatch: pytest.MonkeyPatch) -> int:
    monkeypatch.setattr(ranges, "_NUM_RANGES", 11)
    return 11


def test_two_users_never_have_the_same(few: int, tmp_path: Path):
    """With few enough that drawing alone would have hit one twice."""
    alice, bob = Ranges(ALICE, tmp_path / "ids"), Ranges(BOB, tmp_path / "ids")
    drawn: dict[int, set[int]] = {ALICE: set(), BOB: set()}
    for _ in range(5):
        for uid, book in ((ALICE, alice), (BOB, bob)):
            first = book.draw()
            assert first is not None
            drawn[uid].add(first)
    assert (len(drawn[ALICE]), len(drawn[BOB])) == (5, 5)
    assert not drawn[ALICE] & drawn[BOB]
    assert alice.draw() is not None
    assert alice.draw() is bob.draw() is None
    bob.give_back(drawn[BOB])
    assert alice.draw() is None  # what is his stays his, also where he does not use it
    assert bob.draw() in drawn[BOB]


def test_a_helper_that_was_killed_leaves_them_to_the_same_user(few: int, tmp_path: Path):
    first = Ranges(ALICE, tmp_path / "ids").draw()
    again, bob = Ranges(ALICE, tmp_path / "ids"), Ranges(BOB, tmp_path / "ids")
    others = {bob.draw() for _ in range(10)}
    assert first not in others
    assert None not in others
    assert again.draw() is None  # who knows what is left in it
    again.give_back(again.own)
    assert [again.draw(), again.draw()] == [first, None]


def test_a_user_has_so_many_and_no_more(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    monkeypatch.setattr(ranges, "MOST_OF_A_USER", 3)
    book = Ranges(ALICE, tmp_path / "ids")
    firsts = [book.draw() for _ in range(4)]
    assert (len({*firsts}), firsts[3]) == (4, None)
    assert Ranges(BOB, tmp_path / "ids").draw() is not None


@given(steps=st.lists(st.tuples(st.sampled_from([ALICE, BOB]), st.booleans()), max_size=60))
def test_no_range_is_in_use_twice(steps: list[tuple[int, bool]], tmp_path_factory: pytest.TempPathFactory):
    place = tmp_path_factory.mktemp("book") / "ids"
    books = {uid: Ranges(uid, place) for uid in (ALICE, BOB)}
    live: list[tuple[int, int]] = []
    for uid, gives in steps:
        mine = [each for each in live if each[0] == uid]
        if gives and mine:
            live.remove(mine[0])
            books[uid].give_back([mine[0][1]])
        elif (first := books[uid].draw()) is not None:
            assert first not in {each for _, each in live}
            assert FIRST_ID <= first <= LAST_ID - NUM_IDS
            assert (first - FIRST_ID) % NUM_IDS == 0
            live.append((uid, first))


def test_they_are_nobody_elses_by_custom():
    """shadow's subordinate ids, nspawn's containers, SSSD's users of a directory; and -1 is no id."""
    assert max(600_100_000, 0x6FFFFFFF, 2_000_200_000) < FIRST_ID
    assert LAST_ID + NUM_IDS < 0xFFFFFFFF
