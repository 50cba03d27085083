"""Whoever may run on the machine may take the name of an owner's door first; it is found nevertheless."""

import socket
import subprocess
import sys
from pathlib import Path

import pytest

from sandbox import sandboxes
from sandbox.audit import sweep
from sandbox.door_names import name_of
from sandbox.processes import find_process

OWNER = """
import sys
sys.stdin.readline()
from sandbox import Sandbox
with Sandbox.create(state_dir=sys.argv[1], toolkit=sys.argv[2]) as box:
    print(box.id, flush=True)
    sys.stdin.readline()
"""


@pytest.mark.parametrize("listens", [False, True])
def test_a_door_whose_name_is_taken_is_found(tmp_path: Path, toolkit: Path, listens: bool):
    words = [sys.executable, "-c", OWNER, str(tmp_path), str(toolkit)]
    owner = subprocess.Popen(
        words, cwd=Path(__file__).parents[3], text=True, stdin=subprocess.PIPE, stdout=subprocess.PIPE
    )
    with owner, socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as taker:
        assert owner.stdin is not None
        assert owner.stdout is not None
        key = find_process(owner.pid)
        assert key is not None
        taker.bind(name_of(key))
        if listens:
            taker.listen()
        print(file=owner.stdin, flush=True)
        id = owner.stdout.readline().strip()
        box = sandboxes.attach(id, state_dir=tmp_path)
        assert box.commands.run("echo hi").stdout == "hi\n"
        assert sandboxes.kill(id, state_dir=tmp_path).id == id
        owner.stdin.close()
    sweep(tmp_path)
