"""What users of other platforms complain of, continued: what goes on while something else is broken.

docs/complaints.md has all of them, with the test of each.
"""

import os
import resource
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Generator
from contextlib import contextmanager
from pathlib import Path
from shutil import which

import pytest

from sandbox import Sandbox, Snapshots
from sandbox.audit import check_integrity, sweep
from sandbox.errors import CapacityError, StartError

Create = Callable[..., Sandbox]

# Takes the whole control plane away: first it answers nothing, then it is gone.
WITH_RAY = """
import os, signal, sys
import psutil, ray
from sandbox import Sandbox
substrate, state_dir, toolkit, ray_dir = sys.argv[1:]
size = 80 << 20
ray.init(num_cpus=1, include_dashboard=False, log_to_driver=False, object_store_memory=size,
         _temp_dir=ray_dir)
@ray.remote
def one(): return 1
assert ray.get(one.remote()) == 1
names = {"gcs_server", "raylet"}
plane = [each for each in psutil.Process().children(recursive=True) if each.name() in names]
assert {each.name() for each in plane} == names
def use(box, words):
    assert box.commands.run(f"echo {words} | tee said").stdout == words + chr(10)
    assert box.files.read("said") == words.encode() + b"\\n"
with Sandbox.create(substrate=substrate, state_dir=state_dir, toolkit=toolkit) as box:
    use(box, "before")
    for each in plane:
        each.send_signal(signal.SIGSTOP)
    use(box, "frozen")
    with Sandbox.create(substrate=substrate, state_dir=state_dir, toolkit=toolkit) as other:
        use(other, "new")
    for each in plane:
        each.kill()
    use(box, "gone")
    with Sandbox.create(substrate=substrate, state_dir=state_dir, toolkit=toolkit) as other:
        use(other, "newer")
print("all of it went on", flush=True)
for each in psutil.Process().children(recursive=True):
    each.kill()
os._exit(0)
"""
LOSES_ITS_OWNER = """
import os, signal, sys
from sandbox import Sandbox
substrate, state_dir, toolkit = sys.argv[1:]
box = Sandbox.create(substrate=substrate, state_dir=state_dir, toolkit=toolkit, lifetime_s=600)
box.commands.run("echo an hour of work > work")
box.snapshot("before-the-crash")
box.commands.run("echo half a line > half")
os.kill(os.getpid(), signal.SIGKILL)
"""
FAILS_FIRST = """#!/bin/sh
count=$(cat {folder}/count 2>/dev/null || echo 0)
echo $((count + 1)) > {folder}/count
[ $count -ge {failures} ] || {{ echo "runtime: connection reset by its own helper" >&2; exit 128; }}
exec {runtime} "$@"
"""


@pytest.mark.timeout(180)
def test_sandboxes_go_on_while_the_control_plane_is_frozen_and_when_it_is_gone(
    substrate: str, tmp_path: Path, toolkit: Path
):
    """Those that run are served, new ones are made, and all end: Ray is on no path of theirs."""
    environment = {**os.environ, "RAY_USAGE_STATS_ENABLED": "0"}
    with tempfile.TemporaryDirectory(
        prefix="ray-"
    ) as ray_dir:  # sockets lie in it, whose names may not be long
        words = [sys.executable, "-c", WITH_RAY, substrate, str(tmp_path), str(toolkit), ray_dir]
        done = subprocess.run(
            words, capture_output=True, text=True, timeout=150, check=False, env=environment
        )
    assert done.stdout.endswith("all of it went on\n"), done.stderr[-2000:]
    assert check_integrity(tmp_path).is_clean


def test_a_clients_crash_loses_nothing_that_it_has_kept(substrate: str, tmp_path: Path, toolkit: Path):
    """Its sandboxes end with it, as nobody is there to use them; snapshots are for whoever has the state."""
    words = [sys.executable, "-c", LOSES_ITS_OWNER, substrate, str(tmp_path), str(toolkit)]
    done = subprocess.run(words, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == -signal.SIGKILL, done.stderr
    sweep(tmp_path)
    assert check_integrity(tmp_path).is_clean
    (kept,) = Snapshots(tmp_path).list()
    with Sandbox.create(substrate=substrate, state_dir=tmp_path, toolkit=toolkit, snapshot=kept) as box:
        assert box.files.read("work") == b"an hour of work\n"
        assert not box.files.exists("half")
    kept.delete()


def test_a_policy_that_allows_nothing_blocks_nothing_of_the_platforms_own(connect: Create, substrate: str):
    """Commands, files, what is counted and what is refused go by sockets and pipes of its own: no rule is
    for them, and none can be against them."""
    box = connect(substrate=substrate)
    heard: list[str] = []
    done = box.commands.run("echo out; echo up >/dev/tcp/192.0.2.1/80", on_stdout=heard.append)
    assert "".join(heard) == "out\n"
    assert not done.ok
    assert [(each.limit, each.address) for each in done.denials] == [("network", "192.0.2.1")]
    box.files.write("a", b"x")
    assert box.files.read("a") == b"x"
    assert box.info.limits.pids
    box.pause()
    assert box.commands.run("true").ok


@contextmanager
def a_runtime_that_fails(failures: int, monkeypatch: pytest.MonkeyPatch) -> Generator[Callable[[], int]]:
    """Under a name that nobody knows; yields how often it has been started."""
    with tempfile.TemporaryDirectory(dir="/var/tmp") as folder:  # the launcher has a /tmp of its own
        place = Path(folder, "sometimes")
        text = FAILS_FIRST.format(folder=folder, failures=failures, runtime=which("runc"))
        place.write_text(text)
        place.chmod(0o755)
        monkeypatch.setenv("PATH", f"{folder}:{os.environ['PATH']}")
        yield lambda: int(Path(folder, "count").read_text())


@pytest.mark.skipif(os.geteuid() != 0 or not which("runc"), reason="needs root and runc")
def test_a_start_that_fails_is_told_and_not_tried_again_in_silence(
    create: Create, monkeypatch: pytest.MonkeyPatch
):
    """One start a create: whoever retries knows of it, and can count."""
    with a_runtime_that_fails(2, monkeypatch) as starts:
        for number in (1, 2):
            with pytest.raises(StartError, match="connection reset by its own helper"):
                create(substrate="container", runtime="sometimes")
            assert starts() == number
        assert create(substrate="container", runtime="sometimes").commands.run("echo up").stdout == "up\n"
        assert starts() == 3


def test_a_shell_that_is_attached_is_there_after_a_resume_and_a_snapshot(box: Sandbox, state_dir: Path):
    session = box.sessions.create()
    session.run("cd /tmp; there=yes")
    running = box.commands.start("read -r line; echo $line", stdin=None)
    for _ in range(3):
        box.pause()
        box.resume()
        kept = box.snapshot()
        kept.delete()
        assert session.run("echo $there $PWD").stdout == "yes /tmp\n"
    running.send_stdin("still here\n")
    assert running.wait(60).stdout == "still here\n"


def test_what_found_no_room_is_refused_at_once_and_served_when_there_is_some(create: Create, substrate: str):
    """Nothing is pending that nobody looks at again: the caller hears that a retry is worth it, and the
    same request is served then."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    free = os.dup(0)
    os.close(free)
    resource.setrlimit(resource.RLIMIT_NOFILE, (free + 1, hard))
    try:
        with pytest.raises(CapacityError) as refused:
            create(substrate=substrate, key=f"wanted-{substrate}")
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    assert refused.value.retryable
    box = create(substrate=substrate, key=f"wanted-{substrate}")
    assert box.commands.run("echo up").stdout == "up\n"


LOOKS_FOR_HISTORY = r"""
find / \( -path /proc -o -path /sys \) -prune -o \( -name .git -o -name .hg -o -name packed-refs \
  -o -name '*.pack' -o -name ORIG_HEAD -o -name .gitmodules \) -print 2>/dev/null
git -C / log --all 2>&1 | head -1
"""


def test_no_history_of_anything_is_in_sight(box: Sandbox):
    """Neither of the image nor of the toolkit, nor of what the platform itself is made from."""
    (found,) = box.commands.run(LOOKS_FOR_HISTORY, timeout_s=120).stdout.splitlines()
    assert found.startswith("fatal: not a git repository") or "not found" in found
