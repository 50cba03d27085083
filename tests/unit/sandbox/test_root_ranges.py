"""Ids of root's sandboxes: no two live ones have the same, whichever processes own them."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from sandbox import root_ranges
from sandbox.errors import CapacityError
from sandbox.privileged import ranges
from sandbox.root_ranges import RootRanges, shared_root_ranges
from sandbox.snapshots import FIRST_ID
from sandbox.substrates.base import UIDS_A_SANDBOX

OTHER = """
import sys
from pathlib import Path
from sandbox import root_ranges
root_ranges._LAST_ID = root_ranges._FIRST_ID + int(sys.argv[2]) * 65536
root_ranges._LAST_MORE = root_ranges._FIRST_MORE + 65536
book = root_ranges.RootRanges(Path(sys.argv[1]))
print(*(book.draw() for _ in range(int(sys.argv[3]))), flush=True)
input()
"""


@pytest.fixture
def few(monkeypatch: pytest.MonkeyPatch) -> int:
    monkeypatch.setattr(root_ranges, "_LAST_ID", root_ranges._FIRST_ID + 6 * UIDS_A_SANDBOX)
    monkeypatch.setattr(root_ranges, "_LAST_MORE", root_ranges._FIRST_MORE + UIDS_A_SANDBOX)
    return 6


def test_no_two_are_the_same_and_one_that_is_given_back_is_there_again(few: int, tmp_path: Path):
    book = RootRanges(tmp_path / "ids")
    drawn = [book.draw() for _ in range(few + 1)]
    assert len(set(drawn)) == few + 1
    assert drawn[few] == root_ranges._FIRST_MORE  # only where the others are taken
    with pytest.raises(CapacityError, match="range of ids"):
        book.draw()
    book.give_back(drawn[2])
    book.give_back(drawn[2])
    assert book.draw() == drawn[2]
    book.close()


def test_a_stretch_that_is_all_its_own_is_not_looked_through(
    few: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    book = RootRanges(tmp_path / "ids")
    drawn = [book.draw() for _ in range(few)]
    looked: list[int] = []
    around = root_ranges._around
    monkeypatch.setattr(root_ranges, "_around", lambda *ends: (looked.append(ends[0]), around(*ends))[1])
    assert book.draw() == root_ranges._FIRST_MORE
    book.give_back(drawn[0])
    assert book.draw() == drawn[0]
    assert looked == [root_ranges._FIRST_MORE, root_ranges._FIRST_ID]
    book.close()


def test_other_processes_have_others_and_what_they_had_when_they_end(few: int, tmp_path: Path):
    words = [sys.executable, "-c", OTHER, str(tmp_path / "ids"), str(few), "4"]
    with subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as other:
        assert other.stdout is not None
        theirs = set(map(int, other.stdout.readline().split()))
        book = RootRanges(tmp_path / "ids")
        ours = {book.draw() for _ in range(3)}
        assert (len(theirs), len(ours), theirs & ours) == (4, 3, set())
        with pytest.raises(CapacityError):
            book.draw()
        other.kill()
        other.wait()
    assert {book.draw() for _ in range(4)} == theirs
    book.close()


def test_a_forked_child_has_its_own(few: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """With a book opened anew: what the parent draws afterwards, it does not."""
    monkeypatch.setattr(RootRanges.__init__, "__defaults__", (tmp_path / "ids",))
    monkeypatch.setattr(root_ranges, "_shared", {})
    ours = {shared_root_ranges().draw()}
    go_on, here = os.pipe()
    back, there = os.pipe()
    if (child := os.fork()) == 0:
        try:
            os.read(go_on, 1)
            theirs = [shared_root_ranges().draw() for _ in range(3)]
            os.write(there, " ".join(map(str, theirs)).encode())
        finally:
            os._exit(0)
    ours |= {shared_root_ranges().draw() for _ in range(3)}
    os.write(here, b"1")
    os.close(there)
    theirs = set(map(int, os.read(back, 1000).split()))
    os.waitpid(child, 0)
    for fd in (go_on, here, back):
        os.close(fd)
    shared_root_ranges().close()
    assert (len(ours), len(theirs), ours & theirs) == (4, 3, set())


def test_they_meet_nobody_elses():
    """Helpers' ranges, that of snapshots, shadow's subordinate ids, SSSD's, systemd's for files of others."""
    own = (
        (root_ranges._FIRST_ID, root_ranges._LAST_ID),
        (root_ranges._FIRST_MORE, root_ranges._LAST_MORE),
    )
    others = (
        (ranges.FIRST_ID, ranges.LAST_ID),
        (FIRST_ID, FIRST_ID + UIDS_A_SANDBOX),
        (100_000, 600_100_001),
        (0x7FFE0000, 0x7FFF0000),
        (0x80000000, 1 << 32),
    )
    for first, last in own:
        assert (first % UIDS_A_SANDBOX, last % UIDS_A_SANDBOX) == (0, 0)
        assert all(last <= begin or end <= first for begin, end in others)
    assert own[0][0] > 2_000_200_000
