"""A user whom his helper bounds: all of his sandboxes together, and himself where he moves there."""

import os

import pytest
from ordinary_user import User, groups_of_user, user
from sandbox_internet import wait_until

from sandbox.helper_start import Bounds

__all__ = ["user"]  # a fixture

pytestmark = pytest.mark.skipif(os.geteuid() != 0, reason="root runs the helper")

TOGETHER = r"""
import json, sys
from contextlib import ExitStack
from pathlib import Path
from sandbox import Sandbox
from sandbox.errors import SandboxError
state, toolkit = Path(sys.argv[1]), sys.argv[2]
seen = {}
with ExitStack() as stack:
    boxes = [
        stack.enter_context(Sandbox.create(memory_mb=256, state_dir=state, toolkit=toolkit)) for _ in range(2)
    ]
    seen["eater"] = boxes[0].commands.run(["python3", "-c", "bytearray(200 << 20)"], timeout_s=60).ok
    try:
        stack.enter_context(Sandbox.create(state_dir=Path(sys.argv[3]), toolkit=toolkit))
    except SandboxError as error:
        seen["another"] = str(error)
    pids = Path("/sys/fs/cgroup/pids/dockyard")
    memory = Path("/sys/fs/cgroup/memory/dockyard")
    if memory.is_dir():  # of version 1, where he may move himself
        (own,) = memory.glob("u*")
        try:
            (own / "memory.limit_in_bytes").write_text("-1")
        except PermissionError:
            seen["lifted"] = False
        inner = own / "unbounded"
        inner.mkdir()
        seen["top"] = int((own / "memory.limit_in_bytes").read_text())
        inner.rmdir()
        seen["pids"] = (next(pids.glob("u*")) / "pids.max").read_text().strip()
print(json.dumps(seen))
"""

FEW_CORES = r"""
import json, sys
from pathlib import Path
from sandbox import Sandbox
from sandbox.errors import InvalidArgument
wishes = {"state_dir": Path(sys.argv[1]), "toolkit": sys.argv[2]}
seen = {"cpus": []}
for cpu in (None, 0.2, 0.5):
    with Sandbox.create(cpu=cpu, **wishes) as box:
        seen["cpus"].append(box.info.limits.cpus)
        seen["ok"] = box.commands.run("true").ok
try:
    Sandbox.create(cpu=0.75, **wishes).kill()
except InvalidArgument as error:
    seen["refused"] = str(error)
print(json.dumps(seen))
"""


def test_no_sandbox_has_more_of_the_processors_than_all_together(user: User):
    """Which version 1 refuses, the default among it."""
    with user.helped(bounds=Bounds(cpu=0.5)):
        seen = user.run(FEW_CORES)
        wait_until(lambda: groups_of_user() == [])
    assert (seen["cpus"], seen["ok"]) == ([0.5, 0.2, 0.5], True)
    assert "cpu=0.75 is more than the 0.5 cores" in seen["refused"]


def test_a_users_sandboxes_are_bounded_together(user: User):
    with user.helped(bounds=Bounds(memory_mb=150, pids=300, cpu=1)):
        seen = user.run(TOGETHER, user.home / "another")
        wait_until(lambda: groups_of_user() == [])
    assert seen["eater"] is False
    assert "one state directory at a time" in seen["another"]
    if "top" in seen:
        assert seen["lifted"] is False
        assert (seen["top"], seen["pids"]) == (150 << 20, "300")
