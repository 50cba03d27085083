"""A process that ends by itself leaves nothing of its sandboxes, whether it has killed them or not."""

import subprocess
import sys
from pathlib import Path

import pytest

from sandbox.audit import check_integrity

OWNER = """
import sys
from sandbox import Sandbox
boxes = [Sandbox.create(state_dir=sys.argv[1], toolkit=sys.argv[2], substrate=sys.argv[3]) for _ in range(2)]
running = boxes[0].commands.start("sleep 600")
boxes[1].kill()
LAST
"""
LASTS = {"falls off": "", "exits": "sys.exit(0)", "raises": "raise RuntimeError('fault')"}


@pytest.mark.parametrize("last", LASTS)
def test_an_owner_that_ends_ends_its_sandboxes(tmp_path: Path, toolkit: Path, substrate: str, last: str):
    script = OWNER.replace("LAST", LASTS[last])
    done = subprocess.run(
        [sys.executable, "-c", script, str(tmp_path), str(toolkit), substrate],
        cwd=Path(__file__).parents[3], text=True, capture_output=True, timeout=60, check=False,
    )  # fmt: skip
    assert done.returncode == (last == "raises"), done.stderr
    audit = check_integrity(tmp_path)
    assert (audit.live, audit.leftovers) == ((), ())


CREATING = """
import sys, threading
from sandbox import Sandbox
from sandbox.errors import StartError
wishes = {"state_dir": sys.argv[1], "toolkit": sys.argv[2], "substrate": sys.argv[3]}
made, kept, refused = threading.Semaphore(0), [], []

def create():
    try:
        while True:
            kept.append(Sandbox.create(**wishes))
            made.release()
    except StartError as error:
        refused.append(error)

for _ in range(4):
    threading.Thread(target=create, daemon=True).start()
for _ in range(6):
    made.acquire()
sys.exit(0)
"""


def test_an_owner_that_ends_while_threads_create_leaves_nothing(
    tmp_path: Path, toolkit: Path, substrate: str
):
    done = subprocess.run(
        [sys.executable, "-c", CREATING, str(tmp_path), str(toolkit), substrate],
        cwd=Path(__file__).parents[3], text=True, capture_output=True, timeout=60, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    audit = check_integrity(tmp_path)
    assert (audit.live, audit.leftovers) == ((), ())
