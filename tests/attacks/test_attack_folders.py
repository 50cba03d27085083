"""What the suite makes goes with it: a run that was killed leaves it to the next, never what somebody has."""

import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import pytest

from bench.attack_cases.folders import Folder, remove_left
from sandbox.journal import Journal, Record
from sandbox.processes import ProcessKey, boot_id

OLD_S = 3_600.0
LEAVE = """
import os
from bench.attack_cases.folders import Folder
print(Folder().path, flush=True)
"""
KILLED = LEAVE.replace("print(Folder()", "folder = Folder()\nprint(folder") + "os.kill(os.getpid(), 9)\n"


@pytest.fixture
def temporary(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    return tmp_path


def left_by(program: str) -> Path:
    """The folder that it has told, as old as one of a run some time ago."""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    return Path(done.stdout.strip())


def age(folder: Path) -> None:
    os.utime(folder, (time.time() - OLD_S,) * 2)


def test_a_killed_runs_folder_goes_with_the_next_run(temporary: Path):
    folder = left_by(KILLED)
    assert folder.parent == temporary
    Journal(folder).write(Record("sbx-00000000000dead", ProcessKey(2**22, 1), boot_id(), "function", ()))
    age(folder)
    remove_left()
    assert not folder.exists()


def test_one_that_somebody_has_or_has_just_made_or_that_is_no_folder_stays(temporary: Path):
    held, new = Folder(), left_by(KILLED)
    age(held.path)
    link = temporary / "dockyard-attack-link"
    (temporary / "else").mkdir()
    age(temporary / "else")
    link.symlink_to(temporary / "else")
    remove_left()
    assert (held.path.is_dir(), new.is_dir(), link.is_symlink()) == (True, True, True)
    held.remove()
    assert not held.path.exists()


def test_one_that_nobody_removes_goes_with_its_process(temporary: Path):
    assert left_by(LEAVE).parent == temporary
    assert list(temporary.iterdir()) == []
