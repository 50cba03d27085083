"""How the guests' run ends: a guest that hangs, panics or fails fails it, and only a host without guests is
let off by continuous integration."""

import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType

import pytest

PROJECT = Path(__file__).parents[3]
HUNG = None
Boot = Callable[[list[str], float], tuple[int | None, str]]


@pytest.fixture
def guests(monkeypatch: pytest.MonkeyPatch) -> Iterator[ModuleType]:
    """tests/vm/run.py, whose modules find each other by their folder."""
    monkeypatch.syspath_prepend(str(PROJECT / "tests/vm"))
    names = ("run", "image", "kernel")
    assert not set(names) & set(sys.modules)
    import run

    yield run
    for name in names:
        sys.modules.pop(name, None)


def boots(*ended: int | None, console: str = "") -> Boot:
    """A lane each; every boot of a lane ends alike."""

    def boot(command: list[str], patience_s: float) -> tuple[int | None, str]:
        del patience_s
        (lane,) = (word[-1] for word in command[-1].split() if word.startswith("DOCKYARD_LANE="))
        return ended[int(lane)], console

    return boot


@pytest.mark.parametrize(
    ("ended", "code"),
    [
        ((0, 0), 0), ((0, 5), 0), ((5, 5), 5), ((1, 0), 1), ((5, 1), 1), ((1, HUNG), 1), ((HUNG, 0), 1),
        ((HUNG, 5), 1), ((3, 0), 1), ((0, 3), 1), ((2, 1), 1), ((4, 5), 1), ((77, 0), 1), ((139, 0), 1),
    ],
)  # fmt: skip
def test_a_lane_that_fails_is_not_hidden_by_the_other(
    guests: ModuleType, monkeypatch: pytest.MonkeyPatch, ended: tuple[int | None, int | None], code: int
):
    monkeypatch.setattr(guests, "boot", boots(*ended))
    assert guests.run([sys.executable, "console=ttyS0"], 1.0) == code


def test_a_guest_is_booted_again_only_where_it_came_to_no_test(
    guests: ModuleType, monkeypatch: pytest.MonkeyPatch
):
    consoles: list[str] = []

    def boot(command: list[str], patience_s: float) -> tuple[int | None, str]:
        del patience_s
        consoles.append(command[-1])
        return (HUNG, "Kernel panic" if len(consoles) == 1 else f"{guests.BEGUN}\nKernel panic")

    monkeypatch.setattr(guests, "boot", boot)
    assert guests.run_lane(["qemu", "console=ttyS0"], 0, 1.0) == 1
    assert len(consoles) == 2
    assert guests.run_lane(["qemu", "console=ttyS0"], 0, 1.0) == 1
    assert len(consoles) == 3


def test_only_a_host_that_can_make_none_says_so(
    guests: ModuleType, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
):
    def lacks(folder: Path, arguments: str) -> list[str]:
        raise guests.GuestError("no package here")

    def breaks(folder: Path, arguments: str) -> list[str]:
        raise RuntimeError("mke2fs: no")

    assert guests.run(["/nowhere/qemu", "console=ttyS0"], 1.0) == 77
    monkeypatch.setattr(guests, "install", lambda: None)
    monkeypatch.setattr(guests, "prepare", lacks)
    assert guests.main(["--folder", str(tmp_path)]) == 77
    monkeypatch.setattr(guests, "prepare", breaks)
    with pytest.raises(RuntimeError, match="mke2fs"):
        guests.main(["--folder", str(tmp_path)])


@pytest.mark.parametrize(("code", "ends"), [(0, 0), (77, 0), (1, 1), (3, 3), (5, 5)])
def test_continuous_integration_lets_only_that_pass(tmp_path: Path, code: int, ends: int):
    (tmp_path / ".ci").mkdir()
    own = tmp_path / ".ci/run"
    own.write_text((PROJECT / ".ci/run").read_text())
    program = tmp_path / ".venv/bin/python"
    program.parent.mkdir(parents=True)
    program.write_text(f"#!/bin/sh\nexit {code}\n")
    program.chmod(0o755)
    (tmp_path / "Makefile").write_text("test check:\n")
    done = subprocess.run(["bash", str(own)], capture_output=True, text=True, check=False)
    assert done.returncode == ends, done.stderr
    assert ("tests/vm: not run" in done.stdout) == (code == 77)
