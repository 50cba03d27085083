"""Records of what sandboxes own."""

import json
import os
import socket
import threading
from dataclasses import replace
from itertools import count
from pathlib import Path

import pytest
from cut_short import files_end_at

from sandbox.journal import Journal, Record
from sandbox.processes import ProcessKey, boot_id, find_process, this_process


@pytest.fixture
def journal(tmp_path: Path) -> Journal:
    return Journal(tmp_path)


def a_record(name: str = "sbx-1") -> Record:
    return Record(name, this_process(), boot_id(), "function", cgroups=("/sys/fs/cgroup/x",))


def test_a_record_comes_back_as_it_was(journal: Journal):
    record = a_record().with_processes((ProcessKey(7, 8),))
    journal.write(record)
    assert journal.records() == [record]


def test_a_record_names_its_links_and_one_of_before_has_none(journal: Journal, tmp_path: Path):
    record = replace(a_record(), links=("dky1",))
    journal.write(record)
    assert journal.records() == [record]
    place = tmp_path / "sandboxes" / "sbx-1.json"
    fields = json.loads(place.read_text())
    del fields["links"]
    place.write_text(json.dumps(fields))
    assert journal.records() == [a_record()]


def test_a_later_record_replaces_the_earlier(journal: Journal):
    journal.write(a_record())
    journal.write(a_record().with_processes((ProcessKey(1, 2),)))
    assert [record.processes for record in journal.records()] == [(ProcessKey(1, 2),)]


@pytest.mark.parametrize("num_bytes", [0, 1, 50, -1])
def test_an_owner_that_dies_while_it_writes_leaves_the_record_of_before(
    journal: Journal, tmp_path: Path, num_bytes: int
):
    journal.write(a_record())
    place = tmp_path / "sandboxes" / "sbx-1.json"
    before = place.stat().st_size
    journal.write(a_record().with_processes((ProcessKey(1, 2),)))
    later = place.read_bytes()[before:-1]
    place.write_bytes(place.read_bytes()[:before] + later[:num_bytes])
    assert journal.records() == [a_record()]
    assert journal.strays() == []


def test_removing_is_idempotent(journal: Journal):
    journal.write(a_record())
    journal.remove("sbx-1")
    journal.remove("sbx-1")
    assert journal.records() == []
    assert journal.strays() == []


def test_an_absent_directory_has_no_records(tmp_path: Path):
    assert Journal(tmp_path / "absent").records() == []
    assert Journal(tmp_path / "absent").strays() == []


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"{",
        b"[]",
        b"5\n",
        b'"id"\n',
        b"{}",
        b'{"id": "sbx-2"}',
        b"\xff\n",
        b"[" * 100_000,
        b"{" * 2_000_000,
    ],
)
def test_a_torn_record_is_a_stray(journal: Journal, tmp_path: Path, content: bytes):
    journal.write(a_record())
    torn = tmp_path / "sandboxes" / "sbx-2.json"
    torn.write_bytes(content)
    assert [record.id for record in journal.records()] == ["sbx-1"]
    assert journal.strays() == [torn]


ODD_KEYS = ([1], "1/../self", -1, 10**30, True, {}, "a\0")
ODD: dict[str, list[object]] = {
    "id": ["../../sbx-2", "sbx-1", "sbx-2\0", 5],
    "owner": [[], 5, None, {"pid": 1}, *({"pid": each, "start_ticks": 1} for each in ODD_KEYS)],
    "boot": [5],
    "substrate": [None],
    "cgroups": ["/", [5], ["a\0"], {}],
    "links": ["dky1", [[]], 5],
    "processes": [{}, [5], [{"pid": 1}], *([{"pid": 1, "start_ticks": each}] for each in ODD_KEYS)],
}


@pytest.mark.parametrize(
    ("name", "value"), [(name, value) for name, values in ODD.items() for value in values]
)
def test_a_record_with_an_odd_field_is_a_stray(journal: Journal, tmp_path: Path, name: str, value: object):
    journal.write(a_record("sbx-2"))
    place = tmp_path / "sandboxes" / "sbx-2.json"
    place.write_text(json.dumps({**json.loads(place.read_text()), name: value}))
    assert journal.records() == []
    assert journal.strays() == [place]


def test_what_is_no_file_is_no_record_and_keeps_nobody_waiting(journal: Journal, tmp_path: Path):
    journal.write(a_record())
    folder = tmp_path / "sandboxes"
    os.mkfifo(folder / "sbx-2.json")
    (folder / "sbx-3.json").mkdir()
    (folder / "sbx-4.json").symlink_to(folder / "sbx-1.json")
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(folder / "sbx-5.json"))
        assert [record.id for record in journal.records()] == ["sbx-1"]
        assert [journal.find(f"sbx-{number}") for number in (2, 3, 4, 5)] == [None] * 4


def test_a_draft_is_a_stray_once_its_writer_has_gone(journal: Journal, tmp_path: Path):
    journal.write(a_record())
    mine = tmp_path / "sandboxes" / f"sbx-3.{this_process().pid}.draft"
    orphan = tmp_path / "sandboxes" / "sbx-4.4194999.draft"
    mine.write_text("")
    orphan.write_text("")
    assert journal.strays() == [orphan]


def test_records_that_come_and_go_are_never_strays(journal: Journal):
    is_over = threading.Event()

    def write() -> None:
        for number in count():
            if is_over.is_set():
                return
            journal.write(a_record(f"sbx-{number}"))
            if number >= 20:
                journal.remove(f"sbx-{number - 20}")

    writer = threading.Thread(target=write)
    writer.start()
    try:
        found = [journal.strays() for _ in range(200)]
    finally:
        is_over.set()
        writer.join()
    assert not any(found)


def test_what_has_become_a_record_is_not_removed_as_a_stray(journal: Journal, tmp_path: Path):
    journal.write(a_record())
    torn = tmp_path / "sandboxes" / "sbx-2.json"
    torn.write_text("{")
    journal.write(a_record("sbx-2"))
    for path in (torn, tmp_path / "sandboxes" / "sbx-1.json"):
        journal.remove_stray(path)
    assert [record.id for record in journal.records()] == ["sbx-1", "sbx-2"]
    torn.write_text("{")
    journal.remove_stray(torn)
    journal.remove_stray(torn)
    assert [record.id for record in journal.records()] == ["sbx-1"]


def test_a_change_that_a_full_disk_has_cut_takes_the_next_one_along_no_more(journal: Journal, tmp_path: Path):
    journal.write(a_record())
    size = (tmp_path / "sandboxes" / "sbx-1.json").stat().st_size
    with files_end_at(size + 20), pytest.raises(OSError, match="No space left"):
        journal.write(a_record().with_processes((ProcessKey(1, 2),)))
    assert journal.records() == [a_record()]
    journal.write(a_record().with_processes((ProcessKey(3, 4),)))
    assert journal.records() == [a_record().with_processes((ProcessKey(3, 4),))]


def test_a_first_record_that_finds_no_room_leaves_no_draft(journal: Journal, tmp_path: Path):
    journal.write(a_record())
    with files_end_at(20), pytest.raises(OSError, match="No space left"):
        journal.write(a_record("sbx-2"))
    (tmp_path / "sandboxes" / "sbx-3.json").mkdir()
    with pytest.raises(IsADirectoryError):
        journal.write(a_record("sbx-3"))
    assert sorted(path.name for path in (tmp_path / "sandboxes").iterdir()) == ["sbx-1.json", "sbx-3.json"]


def test_this_process_is_alive_and_another_with_its_pid_would_not_be():
    me = this_process()
    assert me.is_alive()
    assert not ProcessKey(me.pid, me.start_ticks + 1).is_alive()
    assert find_process(me.pid) == me


def test_killing_what_is_not_there_says_so():
    assert not ProcessKey(4194999, 1).kill()
    assert not ProcessKey(this_process().pid, 1).kill()
