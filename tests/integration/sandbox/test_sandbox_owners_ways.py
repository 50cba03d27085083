"""What an owner is like at its first create (umask, signals, limits, processors) decides over no later
sandbox; what it is like at a create, over that one alone."""

import json
import os
import resource
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

PATIENCE_S = 60
BEGIN = """
import json, os, resource, signal, sys, threading
from pathlib import Path
from sandbox import Sandbox
def create():
    return Sandbox.create(substrate=sys.argv[1], state_dir=sys.argv[2], toolkit=sys.argv[3])
def says(box, words):
    done = box.commands.run(words)
    assert done.ok, done
    return done.stdout.strip()
def give(*found):
    print(json.dumps(found))
"""


@pytest.fixture
def owner(substrate: str, toolkit: Path, tmp_path: Path):
    """Runs a program that is an owner, in a state directory of its own; returns what it gives."""

    def run(script: str, *before: str) -> Any:
        words = [
            *before,
            sys.executable,
            "-c",
            BEGIN + script,
            substrate,
            str(tmp_path / "state"),
            str(toolkit),
        ]
        done = subprocess.run(words, capture_output=True, text=True, check=False, timeout=PATIENCE_S)
        assert done.returncode == 0, done.stderr
        return json.loads(done.stdout)

    return run


@pytest.mark.parametrize("umask", [0o000, 0o027, 0o077])
def test_the_umask_is_not_the_owners(owner, umask: int):
    script = f"os.umask({umask})\nbox = create()\n"
    script += "give(says(box, 'umask'), says(box, 'stat -c %a / /tmp /workspace'))\nbox.kill()"
    umask_inside, modes = owner(script)
    assert umask_inside == "0022"
    assert modes.split()[:2] == ["555", "1777"]


@pytest.mark.parametrize("when", ["inherited", "before", "after"])
def test_an_owner_that_ignores_the_end_of_its_children(owner, when: str):
    ignore = "signal.signal(signal.SIGCHLD, signal.SIG_IGN)\n"
    script = "create().kill()\n" if when == "after" else ""
    script += ignore if when != "inherited" else ""
    script += "box = create()\ngive(says(box, '(exit 3) & wait $!; echo $?'))\nbox.kill()"
    assert owner(script, *(("env", "--ignore-signal=CHLD") if when == "inherited" else ())) == ["3"]


def test_signals_that_are_blocked_and_ignored(owner):
    script = """
for number in (signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGINT):
    signal.signal(number, signal.SIG_IGN)
signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())
box = create()
give(says(box, "grep -E 'Sig(Blk|Ign)' /proc/self/status"))
box.kill()
"""
    (lines,) = owner(script)
    assert [int(line.split()[1], 16) & (1 << 31) - 1 for line in lines.splitlines()] == [0, 0]


@pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="there is one processor")
def test_the_first_thread_to_create_keeps_its_processor_and_priority_to_itself(owner):
    script = """
def first():
    os.sched_setaffinity(threading.get_native_id(), {min(os.sched_getaffinity(0))})
    os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), os.getpriority(os.PRIO_PROCESS, 0) + 3)
    create().kill()
thread = threading.Thread(target=first)
thread.start()
thread.join()
box = create()
give(says(box, "nproc"), len(os.sched_getaffinity(0)), says(box, "nice"), os.getpriority(os.PRIO_PROCESS, 0))
box.kill()
os.sched_setaffinity(0, {max(os.sched_getaffinity(0))})
"""
    inside, outside, nice, own_nice = owner(script)
    assert (int(inside), int(nice)) == (outside, own_nice)


def test_limits_are_those_of_the_create(owner):
    script = """
create().kill()
resource.setrlimit(resource.RLIMIT_STACK, (1 << 22, resource.getrlimit(resource.RLIMIT_STACK)[1]))
box = create()
give(says(box, "ulimit -s"))
box.kill()
"""
    assert owner(script) == ["4096"]


def test_the_nursery_takes_all_descriptors_that_it_may_have(owner):
    script = """
from sandbox.nursery import shared_nursery
from sandbox.places import INIT_BINARY
most = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
resource.setrlimit(resource.RLIMIT_NOFILE, (64, most))
create().kill()
give(resource.prlimit(shared_nursery(INIT_BINARY).pid, resource.RLIMIT_NOFILE))
"""
    most = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    assert owner(script) == [[most, most]]


def test_a_snapshot_of_an_owner_that_ignores_the_end_of_its_children_is_refused_by_saying_so(owner):
    script = """
from sandbox.errors import UnsupportedError
box = create()
signal.signal(signal.SIGCHLD, signal.SIG_IGN)
says(box, "head -c 5000000 /dev/zero >zeros")
try:
    box.snapshot("taken", max_mb=1)
except UnsupportedError as error:
    told = error.hint
signal.signal(signal.SIGCHLD, signal.SIG_DFL)
box.snapshot("taken")
give(told)
box.kill()
"""
    (told,) = owner(script)
    assert "SIGCHLD" in told


def writable_by_others(place: Path) -> list[Path]:
    """At and below it, as far as others may enter."""
    mode = place.lstat().st_mode
    found = [place] if mode & 0o022 else []
    below = place.iterdir() if place.is_dir() and mode & 0o005 else ()
    return found + [each for entry in below if not entry.is_symlink() for each in writable_by_others(entry)]


def test_nobody_else_writes_to_the_state_directory(owner, tmp_path: Path):
    owner("os.umask(0)\nbox = create()\nbox.snapshot('taken')\nbox.kill()\ngive()")
    assert (tmp_path / "state" / "snapshots" / "taken").is_dir()
    assert writable_by_others(tmp_path / "state") == []
