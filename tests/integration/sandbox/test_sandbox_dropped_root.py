"""An owner that drops root once it has made sandboxes: what it makes from then on is an ordinary user's."""

import json
import os
import subprocess
from pathlib import Path

import pytest
from ordinary_user import BEGIN, NOBODY, User, user

from sandbox.audit import check_integrity, sweep

__all__ = ["user"]  # a fixture
pytestmark = pytest.mark.skipif(os.geteuid() != 0, reason="nobody else can drop root")

OWNER = r"""
from sandbox.errors import SandboxError
from sandbox.nursery import shared_nursery
from sandbox.places import INIT_BINARY
substrate, of_root, uid = sys.argv[3], Path(sys.argv[4]), int(sys.argv[5])
def create(state_dir):
    return Sandbox.create(substrate=substrate, state_dir=state_dir, toolkit=toolkit)
def words_of(box, file):
    return Path(f"/proc/{box._made.launched.init_pid}/{file}").read_text()
first, second = create(of_root), create(of_root)
lost = shared_nursery(INIT_BINARY)
"""
DROPPED = (
    OWNER
    + r"""
os.setgroups([]); os.setresgid(uid, uid, uid); os.setresuid(uid, uid, uid)
try:
    lost.start("sbx-x", ["--nothing"], (os.memfd_create("errors"),), None)
    refused = 0
except OSError as error:
    refused = error.errno
box = create(state)
uids = next(line for line in words_of(box, "status").splitlines() if line.startswith("Uid")).split()[1:]
ids = [*uids, *{line.split()[1] for line in words_of(box, "uid_map").splitlines()}]
box.kill()
pid, told = first._made.launched.init_pid, None
try:
    first.kill()
except SandboxError as error:
    told = error.record()
print(json.dumps([refused, ids, Path(f"/proc/{pid}").exists(), first.id, told]))
"""
)
AWAY = (
    OWNER
    + r"""
os.seteuid(uid)
box = create(state)
real = next(line for line in words_of(box, "status").splitlines() if line.startswith("Uid")).split()[1:]
box.kill()
os.seteuid(0)
is_same = shared_nursery(INIT_BINARY) is lost
first.kill(), second.kill()
print(json.dumps([real, is_same]))
"""
)


def run(user: User, script: str, *arguments: object) -> object:
    words = {**user.words(BEGIN + script, *arguments), "user": 0, "group": 0}
    done = subprocess.run(**words, capture_output=True, check=False, timeout=60)
    assert done.returncode == 0, done.stderr
    assert "Traceback" not in done.stderr  # its end, too
    return json.loads(done.stdout)


def test_nothing_is_made_with_root_any_more(user: User, tmp_path: Path, substrate: str):
    refused, ids, is_there, of_root, told = run(user, DROPPED, substrate, tmp_path, NOBODY)
    assert refused == 1  # EPERM
    assert set(ids) == {str(NOBODY)}
    assert not is_there, "killed by whom its first process is not"
    assert told["sandbox_id"] == of_root, "to remove it takes root, and that it is still there is said"
    assert told["hint"], told
    sweep(tmp_path)
    assert check_integrity(tmp_path).leftovers == ()


def test_one_that_is_another_user_for_a_while(user: User, tmp_path: Path, substrate: str):
    uids, is_same = run(user, AWAY, substrate, tmp_path, NOBODY)
    assert set(uids) == {str(NOBODY)}, "not even by its real uid is it root's"
    assert is_same
    assert check_integrity(tmp_path).leftovers == ()
