"""A substrate that this host lacks is let off; one that is broken is not."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).parents[2]


def run(programs: str) -> tuple[int, dict[str, object]]:
    """The bench with this PATH, and its object."""
    words = [sys.executable, "-m", "bench.attacks", "--json", "--quick", "--only", "11-own-score"]
    env = {**os.environ, "PATH": programs}
    done = subprocess.run(words, capture_output=True, text=True, check=False, cwd=REPOSITORY, env=env)
    return done.returncode, json.loads(done.stdout.splitlines()[-1])


def outcomes(found: dict[str, object]) -> dict[str, str]:
    return {each["substrate"]: each["outcome"] for each in found["cases"]}  # pyright: ignore


@pytest.mark.parametrize("names", [("crun", "runc"), ("bwrap",)])
def test_a_broken_substrate_fails_the_bench(tmp_path: Path, names: tuple[str, ...]):
    for name in names:
        (tmp_path / name).write_text("#!/bin/sh\necho broken >&2\nexit 1\n")
        (tmp_path / name).chmod(0o755)
    code, found = run(f"{tmp_path}:{os.environ['PATH']}")
    broken, whole = ("function", "container") if "bwrap" in names else ("container", "function")
    assert outcomes(found)[broken] == "failed"
    assert outcomes(found)[whole] != "failed"
    assert (code, found["met"], found["value"]) == (1, False, 1)


def test_a_substrate_that_is_not_installed_is_let_off(tmp_path: Path):
    for folder in reversed(os.environ["PATH"].split(":")):
        for each in Path(folder).glob("*"):
            link = tmp_path / each.name
            link.unlink(missing_ok=True)
            link.symlink_to(each)
    for name in ("crun", "runc"):
        (tmp_path / name).unlink(missing_ok=True)
    assert outcomes(run(str(tmp_path))[1])["container"] == "not here"
