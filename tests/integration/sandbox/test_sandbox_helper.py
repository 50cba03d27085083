"""An ordinary user's sandboxes with the helper that root runs for him: limits, ids and networks."""

import os
import subprocess
import sys
from contextlib import suppress

import pytest
from ordinary_user import BEGIN, NOBODY, User, groups_of_user, user
from sandbox_internet import HOST, NAMESERVER, OTHER, OWN, REACH, Internet, wait_until

from sandbox import Sandbox
from sandbox.helper_start import PROGRAM
from sandbox.places import helper_socket

__all__ = ["user"]  # a fixture

pytestmark = pytest.mark.skipif(os.geteuid() != 0, reason="root runs the helper")


LIMITS = (
    BEGIN
    + r"""
BOMB = '''
import os, time
made = 0
try:
    while True:
        if os.fork() == 0: time.sleep(60)
        made += 1
except OSError as error:
    print(made, error.errno)
'''
substrate, runtime = sys.argv[3], sys.argv[4] or None
seen = {}
with Sandbox.create(
    substrate=substrate, runtime=runtime, memory_mb=64, pids=24, cpu=1, state_dir=state, toolkit=toolkit
) as box:
    seen["degraded"] = [text.split()[0] for text in box.info.limits.degraded]
    seen["ids"] = box.commands.run("cat /proc/self/uid_map /proc/self/gid_map").stdout.split()
    init = box._made.launched.init_pid
    seen["outside"] = [
        line.split()[1] for line in open(f"/proc/{init}/status") if line.startswith(("Uid:", "Gid:"))
    ]
    seen["cgroups"] = sorted(
        line.split(":", 2)[2].strip() for line in open(f"/proc/{init}/cgroup") if "dockyard" in line
    )
    eaten = box.commands.run(["python3", "-c", "bytearray(200 << 20)"])
    seen["memory"] = [eaten.reason, [each.limit for each in eaten.denials]]
    bomb = box.commands.run(["python3", "-c", BOMB], timeout_s=20)
    seen["pids"] = [bomb.stdout.split()[1], [each.limit for each in bomb.denials]]
    box.pause()
    seen["paused"] = box.is_paused
    seen["after"] = box.commands.run("echo on").stdout.strip()
    filled = "echo kept > a && chmod 600 a && mkdir -m 700 d && echo x > d/x && ln a b"
    seen["filled"] = box.commands.run(filled, cwd="/workspace").exit_code
    kept = box.snapshot("kept")
    own = [p.lstat().st_uid for p in (state / "snapshots").rglob("*")]
    seen["owners"] = sorted(set(own))
    look = "cat a d/x; stat -c '%a %h %u' a d; touch /x"
    box.commands.run("echo changed > a", cwd="/workspace")
    wishes = {"substrate": substrate, "runtime": runtime, "state_dir": state, "toolkit": toolkit}
    with Sandbox.create(snapshot=kept, **wishes) as again:
        seen["snapshot"] = again.commands.run(look, cwd="/workspace").stdout.split()
    with box.fork_fs() as fork:
        seen["fork"] = fork.commands.run("cat a; hostname", cwd="/workspace").stdout.split()
    seen["deleted"] = kept.delete()
audit = check_integrity(state)
seen["clean"] = [list(audit.live), list(audit.leftovers)]
seen["groups"] = [str(path) for path in Path("/sys/fs/cgroup").glob("*/dockyard/u*/sbx-*")]
print(json.dumps(seen))
"""
)


@pytest.mark.parametrize(
    ("substrate", "runtime"), [("container", "crun"), ("container", "runc"), ("function", "")]
)
def test_an_ordinary_users_sandbox_has_limits_and_ids_of_its_own(user: User, substrate: str, runtime: str):
    with user.helped():
        seen = user.run(LIMITS, substrate, runtime)
        assert seen["degraded"] == []
        inside = ["0", "1", "65536"] if substrate == "container" else ["0", "0", "1"]
        assert seen["ids"] == [*inside, *inside]
        first = int(seen["outside"][0])
        assert first >= 0x80000000
        assert seen["outside"] == [str(first), str(first)]
        assert len(seen["cgroups"]) >= 4
        assert seen["memory"] == ["oom", ["memory"]]
        assert seen["pids"] == ["11", ["pids"]]
        assert (seen["paused"], seen["after"]) == (True, "on")
        assert seen["owners"] == [NOBODY]
        assert seen["snapshot"] == ["kept", "x", "600", "2", "0", "700", "2", "0"]
        assert seen["fork"][0] == "changed"
        assert seen["fork"][1].startswith("dockyard-")
        assert seen["deleted"] is True
        assert seen["clean"] == [[], []]
        assert seen["groups"] == []
        wait_until(lambda: groups_of_user() == [])
    assert groups_of_user() == []


NETWORK = (
    BEGIN
    + r"""
from sandbox.egress.helped import HelpedEgress
from sandbox.helper import shared_helper
from sandbox.policy.presets import agent
substrate, host, other, own, nameserver, reach = sys.argv[3:9]
egress = HelpedEgress(shared_helper(state), nameserver=(nameserver, 53))
def attempt(box, *calls):
    done = box.commands.run(["python3", "-c", reach, *calls], timeout_s=60)
    return done.stdout.split() or done.stderr
policy = agent(f"{host}:80")
seen = {}
with Sandbox.create(
    substrate=substrate, policy=policy, egress=egress, state_dir=state, toolkit=toolkit
) as box, Sandbox.create(policy=policy, egress=egress, state_dir=state, toolkit=toolkit) as second:
    calls = (f"tcp('{host}', 80)", f"tcp('{host}', 81)", f"tcp('{other}', 80)", "udp('%s', 5000)" % host)
    seen["agent"] = attempt(box, *calls)
    seen["second"] = attempt(second, *calls)
    seen["denials"] = sorted({each.detail for each in box.denials})
    every = [{"to": to, "ports": ["1-65535"]} for to in ("198.51.100.0/24", own)]
    wide = {"destinations": every,
            "names": [{"domains": ["there.test"], "ports": [80]}]}
    box.set_network(type(policy.network).model_validate(wide), 1)
    calls += (f"tcp('{own}', 6379)", f"tcp('{own}', 80)", "tcp('there.test', 80)")
    seen["wide"] = attempt(box, *calls[:3], *calls[4:])
    seen["narrow"] = attempt(second, calls[2])
    ends = [name for name in os.listdir("/sys/class/net") if name.startswith("dky")]
    seen["entries"] = egress.fence.num_entries()
seen["left"] = egress.fence.num_entries()
egress.close()
print(json.dumps(seen))
"""
)


@pytest.mark.parametrize("substrate", ["container", "function"])
def test_an_ordinary_users_sandbox_reaches_what_its_policy_names(
    user: User, internet: Internet, substrate: str
):
    internet.forget()
    internet.names["there.test"] = ["198.51.100.7"]
    with user.helped(inside=internet):
        seen = user.run(NETWORK, substrate, HOST, OTHER, OWN, NAMESERVER[0], REACH, inside=internet)
        wait_until(lambda: internet.devices() == ["lo"])
    assert seen["agent"] == ["hello", "EPERM", "EPERM", "EPERM"]
    assert seen["second"] == seen["agent"]
    assert seen["denials"]
    # The control plane's port is the node's to deny, whatever a user writes into his maps.
    assert seen["wide"] == ["hello", "hello", "hello", "EPERM", "hello", "hello"]
    assert seen["narrow"] == ["EPERM"]
    assert seen["entries"] > 0
    assert seen["left"] == 0


CAPABILITIES = (
    BEGIN
    + r"""
found = Sandbox.capabilities(state_dir=state, toolkit=toolkit)
print(json.dumps({each.name: [each.status, each.detail] for each in found}))
"""
)


def test_the_doctor_finds_what_the_helper_gives(user: User, internet: Internet):
    with user.helped(inside=internet):
        found = user.run(CAPABILITIES, inside=internet)
    names = ("memory", "pids", "cpu")
    for name in (
        "helper",
        "substrate container",
        "substrate function",
        *(f"cgroup {each}" for each in names),
    ):
        assert found[name][0] == "enforced", found[name]
    assert found["egress policy"][0] == "enforced", found["egress policy"]
    assert found["socket memory"][0] == "degraded"
    assert found["layer on disk"][0] == "missing"
    assert "helper" not in {each.name for each in Sandbox.capabilities(toolkit=user.root / "toolkit")}


def test_the_command_runs_one_helper_for_a_user(user: User):
    place = user.root / "by-command.sock"
    words = [
        sys.executable,
        "-m",
        "cli.main",
        "node",
        "helper",
        "--user",
        str(NOBODY),
        "--socket",
        str(place),
    ]
    with subprocess.Popen(words) as helper:
        wait_until(lambda: place.exists() or helper.poll() is not None)
        assert (place.stat().st_uid, place.stat().st_mode & 0o777) == (NOBODY, 0o600)
        elsewhere = [
            *words[:-1],
            str(user.root / "another.sock"),
        ]  # which would take the first one's for leftovers
        again = subprocess.run(elsewhere, capture_output=True, text=True, check=False)
        assert (again.returncode, "end it first" in again.stderr) == (2, True)
        helper.terminate()
    assert helper.returncode == 0
    assert not place.exists()
    lock = helper_socket(NOBODY).with_suffix(".lock")
    lock.unlink()
    with suppress(OSError):  # the machine's own helpers have theirs there
        lock.parent.rmdir()
    printed = subprocess.run([*words[:5], "--unit"], capture_output=True, text=True, check=True).stdout
    assert "ExecStart=" in printed
    assert " -I -S " in printed
    assert f"{PROGRAM} %i\n" in printed
