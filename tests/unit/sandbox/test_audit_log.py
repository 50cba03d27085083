"""Lines of the audit log: whole, counted, rotated."""

import json
import os
import threading
from concurrent.futures import ThreadPoolExecutor
from itertools import count
from pathlib import Path
from typing import IO, Any

import pytest
from cut_short import files_end_at

from sandbox import audit_log
from sandbox.audit_log import FILE_NAME, SandboxLog, entries, of_argv, policy_digest
from sandbox.directory import owner_of
from sandbox.errors import SandboxNotFound
from sandbox.policy import Network, Policy


def numbers(state_dir: Path) -> list[int]:
    return [each["number"] for each in entries(state_dir)]


def test_lines_of_many_writers_are_whole_and_in_order(tmp_path: Path):
    def write(writer: int) -> None:
        log = SandboxLog(tmp_path, f"sbx-{writer}")
        for number in range(200):
            log.write("exec", number=number, filler="x" * 500)

    with ThreadPoolExecutor(8) as pool:
        list(pool.map(write, range(8)))
    for writer in range(8):
        own = [each["number"] for each in entries(tmp_path) if each["sandbox"] == f"sbx-{writer}"]
        assert own == list(range(200))


def test_a_full_file_becomes_an_older_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(audit_log, "MAX_BYTES", 1_000)
    monkeypatch.setattr(audit_log, "NUM_KEPT", 2)
    log = SandboxLog(tmp_path, "sbx-1")
    for number in range(100):
        log.write("exec", number=number)
    names = sorted(path.name for path in tmp_path.iterdir())
    assert names == [FILE_NAME, f"{FILE_NAME}.1", f"{FILE_NAME}.2"]
    assert all(path.stat().st_size < 1_200 for path in tmp_path.iterdir())
    found = numbers(tmp_path)
    assert found == list(range(found[0], 100))
    assert 15 < len(found) < 40


def test_rotation_by_several_at_once_loses_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(audit_log, "MAX_BYTES", 4_000)
    monkeypatch.setattr(audit_log, "NUM_KEPT", 1_000)

    def write(writer: int) -> None:
        log = SandboxLog(tmp_path, f"sbx-{writer}")
        for number in range(100):
            log.write("exec", number=number)

    with ThreadPoolExecutor(8) as pool:
        list(pool.map(write, range(8)))
    assert sorted(numbers(tmp_path)) == sorted(list(range(100)) * 8)


def test_what_is_missed_is_counted_in_the_next_line(tmp_path: Path):
    log = SandboxLog(tmp_path / "gone", "sbx-1")
    log.note("kill", number=0)
    log.note("end", number=1)
    assert not (tmp_path / "gone").exists()
    log.write("exec", number=2)
    log.write("exec", number=3)
    assert [each.get("missed", 0) for each in entries(tmp_path / "gone")] == [2, 0]


def test_a_line_that_was_cut_short_is_left_out(tmp_path: Path):
    torn = b'{"number": 1}\n{"number"\n{"number": 2}\n\xff\xfe\n\0\0\0\n{"number": 3}\n5\n[1]\nnull\n"x"\n'
    (tmp_path / FILE_NAME).write_bytes(torn)
    assert numbers(tmp_path) == [1, 2, 3]
    with pytest.raises(SandboxNotFound):
        owner_of(tmp_path, "sbx-1")


@pytest.fixture
def full_log(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> SandboxLog:
    """Five older files and one that is soon full; no rotation drops the oldest."""
    monkeypatch.setattr(audit_log, "MAX_BYTES", 400)
    monkeypatch.setattr(audit_log, "NUM_KEPT", 100)
    log = SandboxLog(tmp_path, "sbx-1")
    for number in range(17):
        log.write("exec", number=number, filler="x" * 50)
    assert len(list(tmp_path.iterdir())) == 6
    return log


def test_a_log_that_is_rotated_while_it_is_read_is_read_whole(full_log: SandboxLog, tmp_path: Path):
    found = entries(tmp_path)
    seen = [next(found)["number"]]
    for number in range(17, 40):
        full_log.write("exec", number=number, filler="x" * 50)
    assert [*seen, *(each["number"] for each in found)][:17] == list(range(17))


@pytest.mark.parametrize("num_lines", [1, 5, 9, 30])
@pytest.mark.parametrize("opened_before", range(6))
def test_a_log_that_is_rotated_between_two_opens_is_read_whole_and_in_order(
    full_log: SandboxLog,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    opened_before: int,
    num_lines: int,
):
    really_open, num_opened = Path.open, count()

    def open_late(path: Path, mode: str) -> IO[Any]:
        if next(num_opened) == opened_before:
            for number in range(17, 17 + num_lines):
                full_log.write("exec", number=number, filler="x" * 50)
        return really_open(path, mode)

    monkeypatch.setattr(Path, "open", open_late)
    found = numbers(tmp_path)
    assert found[:17] == list(range(17))
    assert found == sorted(set(found))


def test_a_line_behind_anothers_that_a_full_disk_has_cut_is_whole(tmp_path: Path):
    first, other = SandboxLog(tmp_path, "sbx-1"), SandboxLog(tmp_path, "sbx-2")
    first.write("exec", number=1)
    with files_end_at((tmp_path / FILE_NAME).stat().st_size + 20):
        with pytest.raises(OSError, match="No space left") as caught:
            first.write("exec", number=2)
        assert caught.value.filename == str(tmp_path / FILE_NAME)
        with pytest.raises(OSError, match="too large"):
            other.write("exec", number=3)
    other.write("exec", number=4)
    first.write("exec", number=5)
    assert numbers(tmp_path) == [1, 4, 5]


def test_lines_are_whole_whoever_is_cut_short_beside_them(tmp_path: Path):
    SandboxLog(tmp_path, "sbx-1").write("exec", number=-1)
    is_over = threading.Event()

    def be_cut_short() -> None:
        fd = os.open(tmp_path / FILE_NAME, os.O_WRONLY | os.O_APPEND)
        while not is_over.is_set():
            os.write(fd, b'{"number": 7, "deed"')
        os.close(fd)

    unlucky = threading.Thread(target=be_cut_short)
    unlucky.start()
    try:
        for number in range(300):
            SandboxLog(tmp_path, "sbx-1").write("exec", number=number)
    finally:
        is_over.set()
        unlucky.join()
    assert numbers(tmp_path) == list(range(-1, 300))


@pytest.mark.parametrize("text", ["\n", "\udc80", "\x00", '"}', "é"])
def test_no_text_makes_two_lines_of_one(tmp_path: Path, text: str):
    SandboxLog(tmp_path, "sbx-1").write("create", labels={text: text})
    assert (tmp_path / FILE_NAME).read_bytes().count(b"\n") == 1
    assert json.loads((tmp_path / FILE_NAME).read_text())["labels"] == {text: text}


def test_commands_differ_by_their_words():
    assert of_argv(["a", "b c"]) != of_argv(["a", "b", "c"])
    assert of_argv(["\udc80"])["argv_bytes"] == 1


def test_equal_policies_have_one_digest():
    both = frozenset({"landlock", "seccomp", "apparmor", "guard"})
    assert policy_digest(Policy(without=both)) == policy_digest(Policy(without=frozenset(sorted(both))))
    assert policy_digest(Policy()) != policy_digest(Policy(network=Network()))
