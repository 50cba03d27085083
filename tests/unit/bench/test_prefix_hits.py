"""Hits of small traces, counted by hand."""

from pathlib import Path

import pytest

from bench.prefix_hits import chains, hit_percent, main, read_trace


def test_a_block_hits_only_behind_its_whole_prefix(tmp_path: Path) -> None:
    trace = tmp_path / "trace.jsonl"
    trace.write_text(
        "".join(f'{{"hash_ids": {ids}}}\n' for ids in ([1, 2, 3], [1, 2, 4], [5, 2, 3], [1, 2, 3]))
    )
    requests = chains(read_trace(trace))
    assert hit_percent(requests, 0) == 100 * (0 + 2 + 0 + 3) / 12
    assert hit_percent(requests, 3) == 100 * 2 / 12  # the third request drives out the first prefix


def test_without_traces_it_says_where_it_looked(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--data", str(tmp_path)]) == 2
    assert str(tmp_path) in capsys.readouterr().err
