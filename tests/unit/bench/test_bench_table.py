"""The table of all benches: which there are, what is read from them, and what a reader is told."""

from datetime import UTC, datetime

import msgspec
import pytest

from bench.run_all import Outcome, bench_names, read, said_of, stored, table

AT = said_of(True, datetime(2026, 1, 2, 3, 4, tzinfo=UTC))
VALUE = {
    "name": "speed", "value": 12.3456, "unit": "tokens/s", "peer": "llama.cpp", "peer_value": 10.0,
    "ratio": 1.23456, "target": 0.8, "met": True, "env": {"cores": 2, "load": 0.51234},
}  # fmt: skip


def row(**changes):
    return table([Outcome("speed", {**VALUE, **changes})], AT).splitlines()[6]


def test_a_row_has_every_field():
    assert row() == "| speed | 12.35 | tokens/s | 0.8 | llama.cpp: 10 | 1.235 | yes |"


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"met": False}, "**no**"),
        ({"met": None, "noisy": True}, "void: noisy"),
        ({"met": None}, "not judged"),
    ],
)
def test_a_verdict_is_in_words(changes, said):
    assert row(**changes).endswith(f"| {said} |")


def test_no_peer_leaves_its_cells_empty():
    assert row(peer=None, peer_value=None, ratio=None) == "| speed | 12.35 | tokens/s | 0.8 |  |  | yes |"


def test_the_conditions_stand_below():
    assert "- speed: cores 2, load 0.5123" in table([Outcome("speed", VALUE)], AT)


def test_a_bench_that_failed_is_in_the_table():
    outcome = read("speed", "Traceback\nKeyError: 'a|b'", 1)
    assert outcome.is_missed
    assert "| failed |" in table([outcome], AT)


@pytest.mark.parametrize("output", ["", "[1, 2]", "12", '{"name": "cut'])
def test_what_is_no_object_is_a_failure(output):
    assert read("speed", output, 0).value is None


def test_progress_before_the_object_is_no_part_of_it():
    assert read("speed", 'warming up\n{"met": false}\n', 1).value == {"met": False}


def test_the_newest_stored_result_of_each_bench_is_read(tmp_path):
    for day, value in (("2026-01-02", 1.0), ("2026-01-10", 2.0), ("2025-12-31", 3.0)):
        (tmp_path / f"{day}-speed.json").write_bytes(msgspec.json.encode({**VALUE, "value": value}))
    (tmp_path / "2026-01-01-agility.json").write_bytes(msgspec.json.encode(VALUE))
    found = stored(tmp_path)
    assert [each.name for each in found] == ["agility", "speed"]
    assert [each.value["value"] for each in found] == [12.3456, 2.0]


def test_noise_is_no_miss():
    assert not Outcome("speed", {"met": None, "noisy": True}).is_missed
    assert Outcome("speed", {"met": False}).is_missed


def test_the_benches_are_found_and_their_parts_are_not(tmp_path):
    names = bench_names()
    assert {"critical_path_known", "critical_path_truth", "demo_overhead"} <= set(names)
    assert not {"run_all", "team_replays", "team_report", "short_team"} & set(names)
    (tmp_path / "part.py").write_text('"""Run by `if __name__ == "__main__":` elsewhere."""\n')
    assert bench_names(tmp_path) == ()
