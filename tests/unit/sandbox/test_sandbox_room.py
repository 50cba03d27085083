"""Whether a sandbox's memory has room for what is to be written, by what the kernel says of its group."""

import threading
from pathlib import Path
from typing import Literal

import pytest

from sandbox.room import SPARE_BYTES, Room

MIB = 1 << 20
LIMIT = 256 * MIB


def group(place: Path, version: Literal[1, 2], used: int, dropped: int) -> Path:
    """What version 1 says without `total_` leaves groups below out."""
    says(place / {1: "memory.usage_in_bytes", 2: "memory.current"}[version], f"{used}\n")
    names = {1: "active_file 1\ntotal_active_file", 2: "active_file"}
    says(place / "memory.stat", f"anon 1\n{names[version]} {dropped}\n")
    return place


def says(file: Path, text: str) -> None:
    """Whole at any time, as the kernel's own files are: another thread may be reading it."""
    draft = file.with_suffix(".draft")
    draft.write_text(text)
    draft.replace(file)


def is_free(room: Room, num_bytes: int) -> bool:
    with room.taken(num_bytes) as free:
        return free


@pytest.mark.parametrize("version", [1, 2])
@pytest.mark.parametrize(
    ("used", "dropped", "expected"),
    [
        (0, 0, True),
        (LIMIT - SPARE_BYTES - MIB, 0, True),
        (LIMIT - SPARE_BYTES - MIB + 1, 0, False),
        (LIMIT - SPARE_BYTES, 2 * MIB, True),
        (LIMIT, 0, False),
    ],
    ids=["empty", "just", "one too many", "files are dropped", "full"],
)
def test_what_is_spared_stays_free(
    tmp_path: Path, version: Literal[1, 2], used: int, dropped: int, expected: bool
):
    room = Room(group(tmp_path, version, used, dropped), version, LIMIT)
    assert is_free(room, MIB) is expected


def test_without_a_limit_or_a_group_that_lives_there_is_room(tmp_path: Path):
    assert is_free(Room(None, 2, None), 1 << 40)
    assert is_free(Room(tmp_path, 2, None), 1 << 40)
    assert is_free(Room(tmp_path / "gone", 2, LIMIT), MIB)


def test_where_room_is_scarce_one_write_is_at_a_time(tmp_path: Path):
    room = Room(group(tmp_path, 2, LIMIT - 4 * MIB, 0), 2, LIMIT)
    asked = threading.Event()
    answers: list[bool] = []

    def ask() -> None:
        asked.set()
        answers.append(is_free(room, MIB))

    with room.taken(MIB) as free:
        assert free
        other = threading.Thread(target=ask)
        other.start()
        asked.wait()
        group(tmp_path, 2, LIMIT - 2 * MIB, 0)
        assert answers == []
    other.join()
    assert answers == [False]
