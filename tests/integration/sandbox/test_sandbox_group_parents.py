"""Cgroups above those of sandboxes: they stay for the next one, and go with their owner."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from sandbox.cgroups import members, mount_roots

_SCRIPT = """
import sys
from pathlib import Path
from sandbox import Sandbox
from sandbox.cgroups import TOP, mount_roots, state_key

state, toolkit, substrate = sys.argv[1:]
for _ in range(2):
    Sandbox.create(substrate=substrate, state_dir=state, toolkit=toolkit).kill()
above = [root / TOP / state_key(Path(state)) for root in mount_roots()]
print(*(path for path in above if path.is_dir() and not any(each.is_dir() for each in path.iterdir())))
"""


def test_they_go_with_their_owner(tmp_path: Path, toolkit: Path, substrate: str):
    words = [sys.executable, "-c", _SCRIPT, str(tmp_path), str(toolkit), substrate]
    done = subprocess.run(words, capture_output=True, text=True, check=True)
    stayed = [Path(each) for each in done.stdout.split()]
    assert stayed or os.geteuid() != 0
    assert [each for each in stayed if each.exists()] == []


def test_one_that_goes_while_it_is_read_has_no_members(monkeypatch: pytest.MonkeyPatch):
    """Between the opening of the list and the reading, upon which the kernel says ENODEV."""
    group = mount_roots()[0] / f"dockyard-test-{os.getpid()}"
    try:
        group.mkdir()
    except OSError:
        pytest.skip("no cgroup can be made here")

    def read_late(path: Path) -> str:
        with path.open() as file:
            group.rmdir()
            return file.read()

    monkeypatch.setattr(Path, "read_text", read_late)
    assert members(group) == []
