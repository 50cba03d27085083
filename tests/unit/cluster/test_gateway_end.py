"""A gateway ends when it is told to, also where the machine has no thread more for it."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
from thread_shortage import Way

ROOT = Path(__file__).parents[3]


@pytest.mark.parametrize("way", ["its own none", "its own dead"])
def test_a_gateway_short_of_threads_answers_and_ends(tmp_path: Path, way: Way) -> None:
    done = subprocess.run(
        [sys.executable, str(Path(__file__).with_name("short_gateway.py")), way, str(tmp_path)],
        check=False, capture_output=True, text=True, timeout=60, cwd=ROOT,
        env={**os.environ, "PYTHONPATH": f"{ROOT}:{ROOT / 'tests'}"},
    )  # fmt: skip
    assert done.stdout.splitlines() == ['{"id":"gateway_0"}', "SIGTERM"], done.stderr
    assert done.stderr == ""
    assert not (tmp_path / "a.sock").exists()
