"""The helper for an ordinary user where version 2 is the only tree of cgroups: he is handed controllers."""

import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from contextlib import contextmanager
from pathlib import Path

import pytest

from sandbox.helper_start import Bounds, helper_words

NOBODY = 65534
PATIENCE_S = 120.0
SCRIPT = r"""
import json, os, sys
from pathlib import Path
from sandbox import Sandbox
FORKS = '''
import os, time
try:
    while True:
        if os.fork() == 0: time.sleep(60)
except OSError as error:
    print(error.errno)
'''
BOUNDED = "memory.max", "memory.swap.max", "pids.max", "cpu.max"
seen = {}
with Sandbox.create(
    substrate=sys.argv[2], memory_mb=64, pids=24, cpu=1, state_dir=Path(sys.argv[1]), toolkit="/opt/toolkit"
) as box:
    seen["degraded"] = box.info.limits.degraded
    init = box._made.launched.init_pid
    status = open(f"/proc/{init}/status").read()
    seen["uid"] = int(status.split("Uid:")[1].split()[0])
    group = Path("/sys/fs/cgroup" + open(f"/proc/{init}/cgroup").read().split("::")[1].strip())
    seen["limits"] = [(group / name).read_text().strip() for name in ("memory.max", "pids.max", "cpu.max")]
    seen["together"] = [(group.parent / name).read_text().strip() for name in BOUNDED]
    seen["lifted"] = os.access(group.parent / "memory.max", os.W_OK)
    seen["eater"] = box.commands.run(["python3", "-c", "bytearray(200 << 20)"], timeout_s=100).reason
    seen["forks"] = box.commands.run(["python3", "-c", FORKS], timeout_s=100).stdout.strip()
    box.pause()
    seen["after"] = box.commands.run("echo on", timeout_s=100).stdout.strip()
print(json.dumps(seen))
"""


@contextmanager
def helped(home, bounds):
    """The helper runs meanwhile; its socket."""
    place = home / "helper.sock"
    with subprocess.Popen(helper_words(str(NOBODY), place, bounds)) as helper:
        give_up = time.monotonic() + PATIENCE_S
        while not place.exists() and helper.poll() is None and time.monotonic() < give_up:
            time.sleep(0.05)
        try:
            yield place
        finally:
            helper.terminate()
    assert helper.returncode == 0


@pytest.mark.parametrize(
    ("bounds", "together"),
    [
        (Bounds(), ["max", "max", "max", "max 100000"]),
        (Bounds(memory_mb=300, pids=200, cpu=1.5), [str(300 << 20), "0", "200", "150000 100000"]),
    ],
)
def test_an_ordinary_user_has_limits_of_version_2(substrate, bounds, together):
    home = Path(tempfile.mkdtemp())
    try:
        home.chmod(0o755)
        (home / "state").mkdir()
        os.chown(home / "state", NOBODY, NOBODY)
        with helped(home, bounds) as place:
            done = subprocess.run(
                [sys.executable, "-B", "-c", SCRIPT, home / "state", substrate],
                env={**os.environ, "HOME": str(home / "state"), "DOCKYARD_HELPER": str(place)},
                user=NOBODY, group=NOBODY, extra_groups=[], cwd="/", capture_output=True, text=True,
                check=False,
            )  # fmt: skip
        assert done.returncode == 0, done.stderr
        seen = json.loads(done.stdout)
        assert seen["degraded"] == []
        assert seen["uid"] >= 0x80000000
        assert seen["limits"] == [str(64 << 20), "24", "100000 100000"]
        assert (seen["together"], seen["lifted"]) == (together, False)
        assert (seen["eater"], seen["forks"], seen["after"]) == ("oom", "11", "on")
        assert list(Path("/sys/fs/cgroup/dockyard").glob(f"u{NOBODY}x*")) == []
    finally:
        shutil.rmtree(home)
