"""`dockyard doctor`: what it prints, and what it exits with."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from cli.doctor import _said  # pyright: ignore[reportPrivateUsage]
from sandbox.capability import Capability
from sandbox.native.build import build
from sandbox.places import default_home, default_state_dir, default_toolkit
from sandbox.toolkit import build_toolkit


def doctor(home: Path, *options: str) -> "subprocess.CompletedProcess[str]":
    return subprocess.run(
        [sys.executable, "-m", "cli.main", "doctor", *options], capture_output=True, text=True, check=False,
        timeout=300, env={**os.environ, "DOCKYARD_HOME": str(home), "COLUMNS": "80"},
    )  # fmt: skip


def test_where_no_sandbox_can_start_a_feature_is_missing(tmp_path: Path):
    done = doctor(tmp_path, "--json")
    assert done.returncode == 3
    assert "no sandbox can start here" in done.stderr
    found = {check["name"]: check for check in json.loads(done.stdout.splitlines()[-1])["checks"]}
    assert found["toolkit"]["status"] == "missing"
    assert found["toolkit"]["fix"].startswith("make setup, or ")
    assert found["pause and snapshots"]["status"] == "unverified"


def test_where_sandboxes_work_it_tries_to_pause_and_to_keep_one():
    build()
    build_toolkit(default_toolkit(default_state_dir()))
    done = doctor(default_home(), "--json")
    found = {check["name"]: check for check in json.loads(done.stdout.splitlines()[-1])["checks"]}
    assert done.returncode == 0
    pausing = found["pause and snapshots"]
    assert pausing["status"] == "enforced" or "cgroup" in pausing["detail"]
    for check in found.values():
        assert "see `dockyard doctor`" not in check["fix"], check


@pytest.mark.parametrize("width", [20, 60, 80, 200])
def test_words_stay_whole_at_any_width(width: int):
    path = "/a/long-path/that-has/hyphens-and/slashes/and-no-space/anywhere-in-it/at-all/to-break"
    check = Capability(
        "toolkit", "missing", f"no interpreter at {path}", "no sandbox", f"make it --into {path}"
    )
    text = _said(check, width).plain
    assert text.count(path) == 2
    assert all(len(line) <= max(width, 52) or path in line for line in text.splitlines())
    assert text.splitlines()[0].split() == ["missing", "toolkit"]
