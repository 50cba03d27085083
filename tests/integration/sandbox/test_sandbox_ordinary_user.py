"""`function` for a user who is not root: no cgroups, no other uids, one more user namespace."""

import importlib.metadata
import json
import os
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

pytestmark = pytest.mark.skipif(os.geteuid() != 0, reason="every other test runs as an ordinary user here")

NOBODY = 65534
REPOSITORY = Path(__file__).parents[3]
SCRIPT = r"""
import json, sys
from pathlib import Path
from sandbox import Sandbox
from sandbox.audit import check_integrity, sweep
from sandbox.errors import UnsupportedError

BOMB = '''
import os
while True:
    try: os.fork()
    except OSError: pass
'''
INOTIFY = '''
import ctypes
libc, taken = ctypes.CDLL(None), 0
while libc.inotify_init1(0) >= 0:
    taken += 1
print(taken)
'''
state = Path(sys.argv[1]) / "state"
options = {"state_dir": state, "toolkit": sys.argv[2]}
seen = {}
with Sandbox.create(pids=32, disk_mb=8, **options) as box:
    seen["degraded"] = [text.split()[0] for text in box.info.limits.degraded]
    seen["python"] = box.commands.run("python3 -V").stdout
    seen["id"] = box.commands.run("id -u; cat /proc/self/uid_map").stdout.split()
    seen["bomb"] = box.commands.run(["python3", "-c", BOMB], timeout_s=1).reason
    seen["left"] = box.commands.run(["ps", "-eo", "comm="]).stdout.split()
    seen["full"] = box.commands.run("head -c 50M /dev/zero > big").stderr
    seen["eater"] = box.commands.run(["python3", "-c", "bytearray(2 << 30)"]).stderr.splitlines()[-1]
    seen["inotify"] = int(box.commands.run(["python3", "-c", INOTIFY]).stdout)
    seen["root"] = box.commands.run("touch /x").exit_code
    seen["interfaces"] = box.commands.run("cat /proc/net/dev").stdout.count(":")
refused = []
for wish in ({"memory_mb": 64}, {"cpu": 1}, {"substrate": "container"}, {"layer": "disk"}):
    try:
        Sandbox.create(**wish, **options)
    except UnsupportedError as error:
        refused.append(str(error).split()[0])
seen["refused"] = refused
seen["capabilities"] = {each.name: each.status for each in Sandbox.capabilities(**options)}
audit = check_integrity(state)
seen["clean"] = [list(audit.live), list(audit.leftovers), list(sweep(state))]
print(json.dumps(seen))
"""


@pytest.fixture
def place(toolkit: Path) -> Iterator[Path]:
    """Somewhere that anybody can read, with copies of what the script needs."""
    root = Path(tempfile.mkdtemp(prefix="dockyard-test-"))
    root.chmod(0o755)
    shutil.copytree(toolkit, root / "toolkit", symlinks=True)
    for name in ("protocol", "sandbox"):
        shutil.copytree(REPOSITORY / name, root / "lib" / name)
    for name in ("pydantic", "pydantic_core", "annotated_types", "typing_extensions", "typing_inspection"):
        for file in importlib.metadata.distribution(name).files or ():
            if ".." not in file.parts and "__pycache__" not in file.parts:
                target = root / "lib" / file
                target.parent.mkdir(parents=True, exist_ok=True)
                shutil.copyfile(file.locate(), target)
    (root / "home").mkdir()
    os.chown(root / "home", NOBODY, NOBODY)
    for path in (root / "lib").rglob("*"):
        path.chmod(path.stat().st_mode | (0o555 if path.is_dir() else 0o444))
    yield root
    shutil.rmtree(root)


def test_an_ordinary_user_gets_what_the_host_can_enforce_and_is_told_the_rest(place: Path):
    done = subprocess.run(
        [place / "toolkit/bin/python3", "-B", "-c", SCRIPT, place / "home", place / "toolkit"],
        env={
            "PATH": "/usr/sbin:/usr/bin:/sbin:/bin",
            "PYTHONPATH": str(place / "lib"),
            "HOME": str(place / "home"),
        },
        user=NOBODY,
        group=NOBODY,
        extra_groups=[],
        cwd=place / "home",
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    seen = json.loads(done.stdout)
    assert seen["degraded"] == ["cpu", "memory"]
    assert seen["python"].startswith("Python 3.")
    assert seen["id"][:3] == ["0", "0", "0"]
    assert seen["bomb"] == "timeout"
    assert "python3" not in seen["left"]
    assert "No space left" in seen["full"]
    assert seen["eater"] == "MemoryError"
    assert seen["inotify"] == 64  # of its owner's own, of which there are mostly 128
    assert seen["root"] != 0
    assert seen["interfaces"] == 1
    assert seen["refused"] == ["memory_mb=64", "cpu=1", "substrate", "layer='disk'"]
    assert seen["capabilities"]["substrate function"] == "degraded"
    assert seen["capabilities"]["substrate container"] == "missing"
    assert seen["capabilities"]["overlay"] == "enforced"
    assert seen["clean"] == [[], [], []]
