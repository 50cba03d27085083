"""A dead owner's sandboxes end, a paused one among them, and none keeps another's layer."""

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from sandbox import cgroups
from sandbox.audit import check_integrity, sweep
from sandbox.layers.choice import MECHANISMS
from sandbox.processes import find_process

PATIENCE_S = 30.0
OWNER = r"""
import os, sys
from sandbox import Sandbox
from sandbox.nursery import shared_nursery
from sandbox.places import INIT_BINARY
state, toolkit, substrate, kind = sys.argv[1:]
boxes = [
    Sandbox.create(state_dir=state, toolkit=toolkit, substrate=substrate, layer=kind) for _ in range(3)
]
boxes[0].commands.start("sleep 600")
boxes[0].pause()
pids = [pid for each in boxes for pid in each._made.launched.pids]
print(shared_nursery(INIT_BINARY).pid, *pids, flush=True)
sys.stdin.read()
"""


@pytest.mark.skipif(
    all(each.version == 1 for each in cgroups.find_hierarchies()), reason="no cgroup version 2, which freezes"
)
@pytest.mark.parametrize("kind", ["memory", "disk"])
def test_a_paused_one_ends_with_its_owner_and_so_do_its_siblings(
    tmp_path: Path, toolkit: Path, substrate: str, kind: str
):
    if kind == "disk" and MECHANISMS["image"].missing(tmp_path):
        pytest.skip("no layers on disk here")
    words = [sys.executable, "-c", OWNER, str(tmp_path), str(toolkit), substrate, kind]
    with subprocess.Popen(
        words, cwd=Path(__file__).parents[3], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as owner:
        assert owner.stdout is not None
        pids = list(map(int, owner.stdout.readline().split()))
        assert len(pids) > 3
        owner.kill()
    try:
        for pid in pids:
            wait_until_gone(pid)
        kinds = {each.kind for each in check_integrity(tmp_path).leftovers}
        assert kinds <= {"record", "cgroup"}, kinds  # no process, mount or loop device
    finally:
        sweep(tmp_path)
    assert check_integrity(tmp_path).is_clean


def wait_until_gone(pid: int) -> None:
    give_up_s = time.monotonic() + PATIENCE_S
    while (found := find_process(pid)) is not None and found.is_alive():
        assert time.monotonic() < give_up_s, Path(f"/proc/{pid}/cmdline").read_bytes()
        os.sched_yield()
