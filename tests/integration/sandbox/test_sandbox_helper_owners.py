"""Owners, helpers and their sandboxes that come and go: nothing stays of any, and the rest goes on."""

import os
import signal
import subprocess
import time
from pathlib import Path

import pytest
from ordinary_user import BEGIN, NOBODY, User, asked, groups_of_user, said, user
from sandbox_internet import HOST, Internet, wait_until

from sandbox import cgroups
from sandbox.processes import find_process

__all__ = ["user"]  # a fixture

pytestmark = pytest.mark.skipif(os.geteuid() != 0, reason="root runs the helper")


OWNER = (
    BEGIN
    + r"""
import time
from sandbox.policy.presets import agent
options = {"state_dir": Path(sys.argv[3]), "toolkit": toolkit, "substrate": sys.argv[4]}
if len(sys.argv) > 5:
    options["policy"] = agent(f"{sys.argv[5]}:80")
box = Sandbox.create(**options)
box.commands.start("sleep 1000")
def ended():
    patience = time.monotonic() + 30
    while box.ended is None and time.monotonic() < patience:
        time.sleep(0.01)
    return box.ended and box.ended.record()
print(json.dumps([box.id, box._made.launched.init_pid]), flush=True)
for line in sys.stdin:
    told = ended() if "ended" in line else box.commands.run("echo here").stdout.strip()
    print(json.dumps(told), flush=True)
"""
)


def test_nothing_stays_of_an_owner_that_was_killed(user: User, internet: Internet):
    with (
        user.helped(inside=internet),
        user.start(OWNER, user.state, "container", HOST, inside=internet) as owner,
    ):
        _, init = said(owner)
        assert len(groups_of_user()) >= 4
        assert internet.devices() != ["lo"]
        owner.send_signal(signal.SIGKILL)
        wait_until(lambda: find_process(init) is None)
        wait_until(lambda: groups_of_user() == [])
        wait_until(lambda: internet.devices() == ["lo"])


def test_two_owners_do_not_get_in_each_others_way(user: User):
    """Of one state directory and of another; one of them is killed."""
    with (
        user.helped(),
        user.start(OWNER, user.state, "container") as first,
        user.start(OWNER, user.state, "function") as second,
        user.start(OWNER, user.home / "other", "container") as third,
    ):
        ids = [said(each)[0] for each in (first, second, third)]
        assert len(set(ids)) == 3
        first.kill()
        wait_until(lambda: not list(Path("/sys/fs/cgroup").glob(f"*/dockyard/u{NOBODY}x*/{ids[0]}")))
        for each in (second, third):
            assert each.stdin is not None
            each.stdin.write("\n")
            each.stdin.flush()
            assert said(each) == "here"
    assert groups_of_user() == []


def test_sandboxes_end_with_the_helper(user: User):
    """Whose ids are nobody's to give any more."""
    with user.helped() as helper, user.start(OWNER, user.state, "container") as owner:
        _, init = said(owner)
        helper.terminate()
        wait_until(lambda: find_process(init) is None)
        assert helper.wait() == 0
        assert groups_of_user() == []
        _is_the_helpers_end(told_how_it_ended(owner))


def told_how_it_ended(owner: "subprocess.Popen[str]") -> dict[str, str]:
    assert owner.stdin is not None
    owner.stdin.write("ended\n")
    owner.stdin.flush()
    return said(owner)


def _is_the_helpers_end(record: dict[str, str]) -> None:
    assert (record["reason"], record["blame"]) == ("lost", "platform")
    assert "ended with its helper (`dockyard node helper`)" in record["message"]
    assert "start the helper again" in record["hint"]


FORKED = (
    BEGIN
    + r"""
from sandbox.egress.helped import HelpedEgress
from sandbox.errors import InvalidArgument
from sandbox.helper import shared_helper
from sandbox.policy.presets import open_internet
egress = HelpedEgress(shared_helper(state))
def create():
    return Sandbox.create(policy=open_internet(), egress=egress, state_dir=state, toolkit=toolkit)
create().kill()
if (child := os.fork()) == 0:
    try:
        create()
    except InvalidArgument as error:
        os._exit("a fork of" not in str(error))
    finally:
        os._exit(2)
code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
with create() as box:
    print(json.dumps([code, box.commands.run("echo here").stdout.strip()]))
"""
)


def test_a_helped_network_of_the_parents_is_no_childs(user: User, internet: Internet):
    with user.helped(inside=internet):
        assert user.run(FORKED, inside=internet) == [0, "here"]


def test_a_helper_that_was_killed_leaves_nothing_to_the_next(user: User):
    with user.helped(ends_well=False) as helper, user.start(OWNER, user.state, "container") as owner:
        _, init = said(owner)
        helper.kill()
        helper.wait()
        assert find_process(init) is not None
        user.socket.unlink()
        with user.helped():
            wait_until(lambda: groups_of_user() == [])
            wait_until(lambda: find_process(init) is None)
        _is_the_helpers_end(told_how_it_ended(owner))


CYCLES = (
    BEGIN
    + r"""
from sandbox.policy.presets import agent
host = sys.argv[3]
def cycle():
    for options in ({"substrate": "container"}, {"policy": agent(f"{host}:80")}):
        with Sandbox.create(state_dir=state, toolkit=toolkit, **options) as box:
            assert box.commands.run(["/usr/bin/true"]).ok
def count():
    return len(os.listdir("/proc/self/fd"))
print(json.dumps(1), flush=True)
for line in sys.stdin:
    for _ in range(int(line)):
        cycle()
    print(json.dumps(count()), flush=True)
"""
)


def test_sandboxes_that_come_and_go_leave_nothing_with_the_helper(user: User, internet: Internet):
    with user.helped(inside=internet) as helper, user.start(CYCLES, HOST, inside=internet) as owner:
        assert owner.stdin is not None
        said(owner)
        seen: list[object] = []
        for count in (2, 15):
            owner.stdin.write(f"{count}\n")
            owner.stdin.flush()
            counted = said(owner)
            seen.append((counted, count_files(helper.pid), count_map_bytes(helper.pid)))
            assert list(Path("/sys/fs/cgroup").glob(f"*/dockyard/u{NOBODY}x*/*/")) == []
            assert internet.devices() == ["lo"]
        assert seen[0] == seen[1]


def count_files(pid: int) -> int:
    return len(list(Path(f"/proc/{pid}/fd").iterdir()))


def count_map_bytes(pid: int) -> int:
    """Of what its maps of the kernel's hold, which grows with each entry."""
    texts = [path.read_text() for path in Path(f"/proc/{pid}/fdinfo").iterdir()]
    held = [dict(line.split(":", 1) for line in text.splitlines()) for text in texts if "map_type" in text]
    assert held
    return sum(int(each["memlock"]) for each in held)


def test_a_paused_sandbox_goes_with_its_owner(user: User):
    """By the helper, which kills the whole of its group."""
    script = OWNER.replace("print(json.dumps([", "box.pause()\nprint(json.dumps([")
    with user.helped(), user.start(script, user.state, "container") as owner:
        _, init = said(owner)
        owner.kill()
        wait_until(lambda: find_process(init) is None)
        wait_until(lambda: groups_of_user() == [])


LOOP = (
    BEGIN
    + r"""
print(json.dumps(1), flush=True)
for line in sys.stdin:
    with Sandbox.create(state_dir=state, toolkit=toolkit) as box:
        assert box.commands.run(["/usr/bin/true"]).ok
        print(json.dumps([text.split()[0] for text in box.info.limits.degraded]), flush=True)
"""
)


def test_an_owner_goes_on_without_the_helper_and_with_the_next(user: User):
    """And is told each time what its sandboxes lack."""

    with user.start(LOOP) as owner:
        said(owner)
        for _ in range(2):
            assert asked(owner) == ["cpu", "memory"]
            with user.helped():
                assert asked(owner) == []
        assert asked(owner) == ["cpu", "memory"]


COMERS = (
    BEGIN
    + r"""
import threading
from sandbox.policy.presets import agent
host = sys.argv[3]
print(json.dumps(1), flush=True)
for line in sys.stdin:
    with Sandbox.create(policy=agent(f"{host}:80"), state_dir=state, toolkit=toolkit) as box:
        assert box.commands.run(["/usr/bin/true"]).ok
        resolvers = [each.name for each in threading.enumerate()].count("resolver")
        print(json.dumps([resolvers, len(os.listdir("/proc/self/fd"))]), flush=True)
"""
)


def test_helpers_that_come_and_go_leave_nothing_with_the_owner(user: User, internet: Internet):
    """Neither a thread nor descriptors for each that has been."""
    seen: list[object] = []
    with user.start(COMERS, HOST, inside=internet) as owner:
        said(owner)
        for _ in range(3):
            with user.helped(inside=internet):
                seen.append(asked(owner))
    assert seen[0] == seen[1] == seen[2]


TREES = (
    BEGIN
    + r"""
from sandbox.helper import shared_helper
helper = shared_helper(state)
print(json.dumps(len(helper.hierarchies())), flush=True)
for line in sys.stdin:
    print(json.dumps(len(helper.hierarchies())), flush=True)
"""
)


def test_roots_sweep_leaves_a_users_folders_to_an_owner_who_is_about_to_use_them(user: User):
    """And where it has taken some, or all, the owner has them made again."""

    def sweep_old(*places: Path) -> list[Path]:
        for each in places:
            os.utime(each, (0, 0))
        cgroups.remove_abandoned(cgroups.mount_roots(), time.time())
        return groups_of_user()

    with user.helped(), user.start(TREES) as owner:
        num_trees, all_places = said(owner), groups_of_user()
        assert sweep_old() == all_places
        for each in all_places:
            os.utime(each, (0, 0))
        assert asked(owner) == num_trees
        assert sweep_old() == all_places
        for taken in (all_places[:1], all_places):
            assert sweep_old(*taken) == all_places[len(taken) :]
            assert asked(owner) == num_trees
            assert groups_of_user() == all_places


REMOVED = (
    BEGIN
    + r"""
from sandbox import cgroups
from sandbox.errors import AuthError
import time
began = time.monotonic()
try:
    cgroups.remove_group(Path(sys.argv[3]))
except AuthError as error:
    print(json.dumps([str(error), time.monotonic() - began]))
"""
)


def test_a_group_of_roots_is_not_a_users_to_remove(user: User):
    """Which is said at once, whether a process is in it or not; none is ended."""
    group = Path("/sys/fs/cgroup/pids/dockyard-test-of-root")
    group.mkdir()
    try:
        seen = [user.run(REMOVED, group)]
        with subprocess.Popen(["sleep", "60"]) as process:
            (group / "cgroup.procs").write_text(str(process.pid))
            seen.append(user.run(REMOVED, group))
            assert process.poll() is None
            process.kill()
        for words, took_s in seen:
            assert "is another user's" in words
            assert took_s < cgroups.REMOVE_PATIENCE_S / 2
    finally:
        wait_until(lambda: not (group / "cgroup.procs").read_text())
        group.rmdir()
