"""A user who is not root and has no helper: no cgroups, no other uids, one more user namespace."""

import os

import pytest
from ordinary_user import User, user

__all__ = ["user"]  # a fixture

pytestmark = pytest.mark.skipif(os.geteuid() != 0, reason="every other test runs as an ordinary user here")

COMMON = r"""
import json, sys
from pathlib import Path
from sandbox import Policy, Sandbox, sandboxes
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
state = Path(sys.argv[1])
options = {"state_dir": state, "toolkit": sys.argv[2]}

def look(**wishes):
    seen = {}
    with Sandbox.create(pids=32, disk_mb=8, **wishes, **options) as box:
        seen["degraded"] = [text.split()[0] for text in box.info.limits.degraded]
        seen["python"] = box.commands.run("python3 -V").stdout
        seen["id"] = box.commands.run("id -u; cat /proc/self/uid_map").stdout.split()
        seen["bomb"] = box.commands.run(["python3", "-c", BOMB], timeout_s=1).reason
        seen["left"] = box.commands.run(["ps", "-eo", "comm="]).stdout.split()
        seen["full"] = box.commands.run("head -c 50M /dev/zero > big; rm big").stderr
        seen["eater"] = box.commands.run(["python3", "-c", "bytearray(2 << 30)"]).stderr.splitlines()[-1]
        seen["inotify"] = int(box.commands.run(["python3", "-c", INOTIFY]).stdout)
        seen["root"] = box.commands.run("touch /x").exit_code
        seen["interfaces"] = box.commands.run("cat /proc/net/dev").stdout.count(":")
        seen["kcore"] = box.commands.run("head -c 1 /proc/kcore | wc -c").stdout.strip()
        power = "grep -E 'CapBnd|NoNewPrivs|Seccomp:' /proc/self/status"
        seen["power"] = box.commands.run(power).stdout.split()
        seen["mount"] = box.commands.run("unshare -m true").exit_code
        box.files.write("/workspace/a", "text")
        seen["file"] = box.files.read("/workspace/a").decode()
        seen["devices"] = box.commands.run("echo x > /dev/null && head -c 4 /dev/zero | wc -c").stdout.strip()
    narrow = Policy(masked=("/usr/share",), read_only=("/root",), devices=frozenset({"tty"}))
    with Sandbox.create(policy=narrow, labels={"a": "b"}, env={"TOKEN": "7"}, **wishes, **options) as box:
        probe = "ls /usr/share | wc -l; touch /root/a 2>/dev/null; echo $?"
        probe += "; head -c 1 /dev/zero | wc -c; echo $TOKEN"
        seen["narrow"] = box.commands.run(probe).stdout.split()
        seen["by id"] = [each.id == box.id for each in Sandbox.list(labels={"a": "b"}, state_dir=state)]
        attached = sandboxes.attach(box.id, state_dir=state)
        seen["attached"] = attached.commands.run("echo on").stdout
    return seen
"""
WHOLE = (
    COMMON
    + r"""
refused = []
for wish in ({"memory_mb": 64}, {"cpu": 1}, {"substrate": "container", "memory_mb": 64}, {"layer": "disk"}):
    try:
        Sandbox.create(**wish, **options)
    except UnsupportedError as error:
        refused.append(str(error).split()[0])
seen = {"function": look(), "refused": refused}
seen["capabilities"] = {each.name: each.status for each in Sandbox.capabilities(**options)}
audit = check_integrity(state)
seen["clean"] = [list(audit.live), list(audit.leftovers), list(sweep(state))]
print(json.dumps(seen))
"""
)
CONTAINER = COMMON + "print(json.dumps(look(substrate='container', runtime=sys.argv[3])))"


def check_common(seen: dict[str, object]) -> None:
    assert str(seen["python"]).startswith("Python 3.")
    assert seen["id"] == ["0", "0", "0", "1"]
    assert seen["bomb"] == "timeout"
    assert "python3" not in seen["left"]  # pyright: ignore[reportOperatorIssue]
    assert "No space left" in str(seen["full"])
    assert seen["eater"] == "MemoryError"
    assert seen["inotify"] == 64  # of its owner's own, of which there are mostly 128
    assert seen["root"] != 0
    assert seen["interfaces"] == 1
    assert seen["file"] == "text"
    assert seen["devices"] == "4"
    assert seen["power"] == ["CapBnd:", "0" * 16, "NoNewPrivs:", "1", "Seccomp:", "2"]
    assert seen["mount"] != 0
    assert seen["narrow"] == ["0", "1", "0", "7"]
    assert seen["by id"] == [True]
    assert seen["attached"] == "on\n"


def test_an_ordinary_user_gets_what_the_host_can_enforce_and_is_told_the_rest(user: User):
    seen = user.run(WHOLE)
    check_common(seen["function"])
    assert seen["function"]["degraded"] == ["cpu", "memory"]
    assert seen["refused"] == ["memory_mb=64", "cpu=1", "memory_mb=64", "layer='disk'"]
    assert seen["capabilities"]["substrate function"] == "degraded"
    assert seen["capabilities"]["substrate container"] == "degraded"
    assert seen["capabilities"]["overlay"] == "enforced"
    assert seen["capabilities"]["helper"] == "missing"
    assert seen["clean"] == [[], [], []]


@pytest.mark.parametrize("runtime", ["crun", "runc"])
def test_a_container_without_root_has_one_id_and_says_so(user: User, runtime: str):
    seen = user.run(CONTAINER, runtime)
    check_common(seen)
    assert seen["degraded"] == ["cpu", "memory", "ids"]
    assert seen["kcore"] == "0"
