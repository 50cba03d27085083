"""The suite as an ordinary user whom root's helper serves."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).parents[2]
ONE_OF_EACH = ("11-own-score", "36-processes", "71-egress-port", "83-egress-tunnel", "87-egress-not-there")


def run(*words: str, **variables: str) -> "subprocess.CompletedProcess[str]":
    words = (sys.executable, "-m", "bench.attacks", "--json", *words)
    env = os.environ | variables
    return subprocess.run(words, capture_output=True, text=True, check=False, cwd=REPOSITORY, env=env)


@pytest.mark.skipif(os.geteuid() != 0, reason="root starts the helper")
def test_doors_are_shut_for_a_user_with_the_helper():
    done = run("--user", "nobody", "--only", *ONE_OF_EACH)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout.splitlines()[-1])
    assert (found["env"]["uid"], found["value"], found["leftovers"]) == (65534, 0, [])
    cases = {(each["case"], each["substrate"]): each for each in found["cases"]}
    for substrate in ("function", "container"):
        for name in ONE_OF_EACH[:-1]:
            assert cases[name, substrate]["outcome"] in ("denied", "contained"), cases[name, substrate]
            assert cases[name, substrate]["shown"], cases[name, substrate]
        assert cases[ONE_OF_EACH[-1], substrate]["outcome"] == "not here"


@pytest.mark.skipif(os.geteuid() != 0, reason="root starts the helper")
@pytest.mark.parametrize(
    ("user", "words"),
    [("no-such-user", "is unknown"), ("root", "is no ordinary user"), ("0", "is no ordinary user")],
)
def test_nobody_and_root_are_no_ordinary_users(user: str, words: str):
    done = run("--user", user)
    assert (done.returncode, done.stderr.count("error: ")) == (2, 1)
    assert f"error: user={user!r} {words} (" in done.stderr


@pytest.mark.skipif(os.geteuid() == 0, reason="root may start the helper")
def test_only_root_starts_the_helper():
    done = run("--user", "nobody")
    assert (done.returncode, done.stderr.count("error: ")) == (2, 1)
    assert "error: --user starts a helper, which needs root" in done.stderr


def test_a_state_directory_that_it_did_not_make_stays(tmp_path: Path, toolkit: Path):
    (tmp_path / "toolkit").symlink_to(toolkit)
    kept = tmp_path / "sandbox" / "snapshots" / "mine"
    kept.mkdir(parents=True)
    done = run("--only", "none", "--lent-world", str(tmp_path / "asked"), DOCKYARD_HOME=str(tmp_path))
    found = json.loads(done.stdout.splitlines()[-1])
    assert (done.returncode, found["cases"], found["leftovers"]) == (1, [], [])
    assert kept.is_dir()
