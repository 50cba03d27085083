"""`dockyard sandbox run`: the command's exit code is its own, whatever it is."""

import json
import os
import secrets
import subprocess
import sys

import pytest


def test_a_command_that_exits_with_130_was_not_interrupted() -> None:
    command = [sys.executable, "-m", "cli.main", "sandbox", "run", "--", "sh", "-c", "exit 130"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    said = [line for line in done.stderr.splitlines() if "sandboxes lack on this host" not in line]
    assert (done.returncode, said) == (130, [])


def test_standard_input_reaches_the_command_where_it_is_asked_for() -> None:
    command = [sys.executable, "-m", "cli.main", "sandbox", "run", "--stdin", "--", "cat"]
    done = subprocess.run(command, input=b"a\xff\n", capture_output=True, timeout=120, check=False)
    assert (done.returncode, done.stdout) == (0, b"a\xff\n")


def test_closed_standard_input_is_an_empty_one() -> None:
    command = f"exec {sys.executable} -m cli.main sandbox run --stdin -- cat <&-"
    done = subprocess.run(["sh", "-c", command], capture_output=True, text=True, timeout=120, check=False)
    assert (done.returncode, done.stdout) == (0, ""), done.stderr


def test_a_limit_that_bit_is_told() -> None:
    command = [sys.executable, "-m", "cli.main", "sandbox", "run", "--pids", "8", "--"]
    forks = "for n in 1 2 3 4 5 6 7 8 9 10 11 12; do sleep 5 & done; true"
    done = subprocess.run(
        [*command, "sh", "-c", forks], capture_output=True, text=True, timeout=120, check=False
    )
    assert "dockyard: pids limit: " in done.stderr


@pytest.mark.skipif(os.geteuid() != 0, reason="freezing needs root")
def test_a_name_that_is_taken_is_said_before_anything_is_done() -> None:
    command, name = [sys.executable, "-m", "cli.main", "sandbox"], f"test-{secrets.token_hex(6)}"
    keep = [*command, "run", "--json", "--keep", name, "--", "echo done"]
    try:
        first = subprocess.run(keep, capture_output=True, text=True, timeout=120, check=False)
        assert json.loads(first.stdout)["stdout"] == "done\n", first.stderr
        again = subprocess.run(keep, capture_output=True, text=True, timeout=120, check=False)
        assert again.returncode == 2
        assert "is there already" in again.stdout + again.stderr
        assert "done\\n" not in again.stdout
    finally:
        subprocess.run(
            [*command, "snapshots", "--delete", name], capture_output=True, timeout=60, check=False
        )


@pytest.mark.skipif(os.geteuid() != 0, reason="hides the groups of version 2, which needs root")
def test_a_host_that_can_keep_nothing_says_so_before_anything_is_done() -> None:
    hidden = 'umount -R /sys/fs/cgroup && exec "$@"'
    command = [sys.executable, "-m", "cli.main", "sandbox", "run", "--keep", "ready", "--", "echo done"]
    done = subprocess.run(
        ["unshare", "--mount", "sh", "-c", hidden, "sh", *command], capture_output=True, text=True,
        timeout=120, check=False,
    )  # fmt: skip
    assert (done.returncode, done.stdout) == (3, ""), done.stderr
    assert "needs cgroup version 2" in done.stderr
