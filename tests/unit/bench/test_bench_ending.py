"""A bench that is told to end removes what it has made, and says so in one line."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from bench import equivalence, nano_quality

REPOSITORY = Path(__file__).parents[3]
BENCH = """
import os, signal, sys
from bench import common
from sandbox.places import default_state_dir

def main(arguments):
    before = os.environ["DOCKYARD_HOME"]
    with common.temporary_home():
        assert arguments == ["--quick"]
        default_state_dir().mkdir()
        (default_state_dir() / "kept").touch()
        print(default_state_dir(), flush=True)
        if "wait" in before:
            signal.pause()
    assert os.environ["DOCKYARD_HOME"] == before
    return 3

common.run(main)
"""


def start(home: Path) -> "subprocess.Popen[str]":
    return subprocess.Popen(
        [sys.executable, "-c", BENCH, "--quick"], cwd=REPOSITORY, text=True,
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, env={**os.environ, "DOCKYARD_HOME": str(home)},
    )  # fmt: skip


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_what_it_has_made_goes_with_one_line(tmp_path: Path, number: signal.Signals):
    with start(tmp_path / "wait") as bench:
        assert bench.stdout is not None
        state = Path(bench.stdout.readline().strip())
        assert (state / "kept").exists()
        assert tmp_path not in state.parents
        bench.send_signal(number)
        _, said = bench.communicate(timeout=60)
    assert bench.returncode == 128 + number
    assert said.strip() == f"{number.name}: the bench ends, and removes what it has made"
    assert not state.parent.exists()
    assert list(tmp_path.iterdir()) == []


def test_a_bench_that_ends_by_itself_has_its_own_exit_code(tmp_path: Path):
    with start(tmp_path / "home") as bench:
        printed, said = bench.communicate(timeout=60)
    assert (bench.returncode, said) == (3, "")
    assert not Path(printed.strip()).parent.exists()


@pytest.mark.parametrize(("main", "option"), [(equivalence.main, "--only"), (nano_quality.main, "--model")])
def test_help_has_a_benchs_own_options(main, option: str, capsys: pytest.CaptureFixture[str]):
    with pytest.raises(SystemExit) as ended:
        main(["--help"])
    assert ended.value.code == 0
    assert f"  {option} " in capsys.readouterr().out
