"""Who has the pid of a process that has ended gets nothing copied of what is his."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from sandbox import cgroups
from sandbox.errors import SandboxError
from sandbox.nursery import shared_nursery
from sandbox.places import INIT_BINARY
from sandbox.processes import find_process

pytestmark = [
    pytest.mark.skipif(os.geteuid() != 0, reason="root sets which pid is the next"),
    pytest.mark.skipif(
        all(each.version == 1 for each in cgroups.find_hierarchies()), reason="no cgroup version 2"
    ),
]

OWNERS = r"""
import os, signal, sys, time
from pathlib import Path
from sandbox import Sandbox
from sandbox.errors import SandboxError
from sandbox.nursery import shared_nursery
from sandbox.places import INIT_BINARY
options = {"state_dir": sys.argv[1], "toolkit": sys.argv[2], "substrate": "container"}
box = Sandbox.create(**options)
doomed = shared_nursery(INIT_BINARY).pid
ready, told = os.pipe(), os.pipe()
if os.fork() == 0:  # another owner
    os.close(told[0])
    os.read(ready[0], 1)
    Path("/proc/sys/kernel/ns_last_pid").write_text(str(doomed - 1))
    if shared_nursery(INIT_BINARY).pid == doomed:
        other = Sandbox.create(**options)
        other.files.write("/workspace/secret", b"of the other")
        os.write(told[1], b"x")
        os.read(ready[0], 1)
        other.kill()
    os._exit(0)
os.kill(doomed, signal.SIGKILL)
while Path(f"/proc/{doomed}").exists():
    time.sleep(0.01)
os.close(told[1])
os.write(ready[1], b"x")
if not os.read(told[0], 1):
    sys.exit("the pid was not had again")
for copy in (box.fork_fs, lambda: box.snapshot("kept")):
    try:
        print("copied", copy().commands.run("ls /workspace").stdout)
    except SandboxError as error:
        print(type(error).__name__, error)
print(box.commands.run("ls -A /workspace").stdout or "empty")
os.write(ready[1], b"x")
os.wait()
box.kill()
"""


def test_a_copy_never_is_of_another_sandboxs_layer(state_dir: Path, toolkit: Path):
    words = ["unshare", "--pid", "--fork", "--kill-child", "--mount-proc", sys.executable, "-c", OWNERS]
    done = subprocess.run(
        [*words, str(state_dir), str(toolkit)],
        cwd=Path(__file__).parents[3], text=True, capture_output=True, timeout=120, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    said = done.stdout.splitlines()
    assert len(said) == 3, done.stdout
    for line in said[:2]:
        assert line.startswith("SandboxError"), line
        assert "cannot be reached any more" in line
        assert "has ended" in line
    assert said[2] == "empty"


def test_a_process_that_has_ended_opens_nothing(tmp_path: Path):
    with subprocess.Popen(["sleep", "60"], cwd=tmp_path) as process:
        key = find_process(process.pid)
        assert key is not None
        os.close(key.open("cwd", os.O_RDONLY | os.O_DIRECTORY))
        process.kill()
    with pytest.raises(ProcessLookupError, match="has ended"):
        key.open("cwd", os.O_RDONLY | os.O_DIRECTORY)
    another = type(key)(os.getpid(), key.start_ticks - 1)
    with pytest.raises(ProcessLookupError, match="has ended"):
        another.open("cwd", os.O_RDONLY | os.O_DIRECTORY)


def test_a_copy_after_the_nurserys_death_says_what_to_do(create, substrate: str):
    box = create(substrate=substrate)
    box.files.write("kept", b"content")
    stays = box._made.launched.stays
    os.kill(shared_nursery(INIT_BINARY).pid if stays is None else stays.pid, signal.SIGKILL)
    with pytest.raises(SandboxError, match="has ended") as caught:
        box.fork_fs()
    assert "create another" in caught.value.hint
    assert box.files.read("kept") == b"content"
    with create(substrate=substrate) as other:  # by the next one
        other.fork_fs().kill()
