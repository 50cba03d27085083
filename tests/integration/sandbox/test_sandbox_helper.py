"""An ordinary user's sandboxes with the helper that root runs for him: limits, ids, networks, and what it
refuses."""

import errno
import json
import os
import select
import signal
import subprocess
import sys
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from ordinary_user import NOBODY, User, groups_of_user, user
from sandbox_internet import HOST, NAMESERVER, OTHER, REACH, Internet, wait_until

from sandbox import Sandbox
from sandbox.helper_start import PROGRAM
from sandbox.places import helper_socket
from sandbox.processes import find_process

__all__ = ["user"]  # a fixture

pytestmark = pytest.mark.skipif(os.geteuid() != 0, reason="root runs the helper")

BEGIN = r"""
import json, os, sys
from pathlib import Path
from sandbox import Policy, Sandbox
from sandbox.audit import check_integrity
state, toolkit = Path(sys.argv[1]), sys.argv[2]
"""
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
substrate, host, other, nameserver, reach = sys.argv[3:8]
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
    wide = {"destinations": [{"to": "198.51.100.0/24", "ports": ["1-65535"]}],
            "names": [{"domains": ["there.test"], "ports": [80]}]}
    box.set_network(type(policy.network).model_validate(wide), 1)
    seen["wide"] = attempt(box, *calls[:3], f"tcp('{host}', 6379)", "tcp('there.test', 80)")
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
        seen = user.run(NETWORK, substrate, HOST, OTHER, NAMESERVER[0], REACH, inside=internet)
        wait_until(lambda: internet.devices() == ["lo"])
    assert seen["agent"] == ["hello", "EPERM", "EPERM", "EPERM"]
    assert seen["second"] == seen["agent"]
    assert seen["denials"]
    # The control plane's port is the node's to deny, whatever a user writes into his maps.
    assert seen["wide"] == ["hello", "hello", "hello", "EPERM", "hello"]
    assert seen["narrow"] == ["EPERM"]
    assert seen["entries"] > 0
    assert seen["left"] == 0


OWNER = (
    BEGIN
    + r"""
from sandbox.policy.presets import agent
options = {"state_dir": Path(sys.argv[3]), "toolkit": toolkit, "substrate": sys.argv[4]}
if len(sys.argv) > 5:
    options["policy"] = agent(f"{sys.argv[5]}:80")
box = Sandbox.create(**options)
box.commands.start("sleep 1000")
print(json.dumps([box.id, box._made.launched.init_pid]), flush=True)
for line in sys.stdin:
    print(json.dumps(box.commands.run("echo here").stdout.strip()), flush=True)
"""
)


def said(process: "subprocess.Popen[str]") -> Any:
    assert process.stdout is not None
    assert select.select([process.stdout], [], [], 30)[0], "it says nothing"
    line = process.stdout.readline()
    assert line, "it has ended"
    return json.loads(line)


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


CALLER = r"""
import json, os, socket, sys
one = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
one.connect(os.environ["DOCKYARD_HELPER"])
uid = os.getuid()
own, sandbox = f"u{uid}x0123456789ab", "sbx-1"
def ask(record, *fds):
    data = record if isinstance(record, bytes) else json.dumps(record).encode()
    socket.send_fds(one, [data], list(fds))
    reply, given, _, _ = socket.recv_fds(one, 4096, 8)
    for fd in given:
        os.close(fd)
    return json.loads(reply).get("refused", "done")
def process(pid):
    return os.open(f"/proc/{pid}", os.O_PATH | os.O_DIRECTORY)
seen = {}
"""
REFUSED = (
    CALLER
    + r"""
seen["before"] = ask({"adopt": sandbox}, process(os.getpid()))
for name in ("u0x0123456789ab", f"u{uid}x0123", "../" + own, own + "/x", "", "u1x0123456789ab\n"):
    seen["state " + name] = ask({"open": name})
seen["own"] = ask({"open": own})
seen["again"] = ask({"open": own})
seen["another"] = ask({"open": f"u{uid}x0123456789ac"})
for name in ("../../x", "sbx-1/..", "sbx-" + "a" * 40, "sbx-\u00e9", ".", "sbx-1\n"):
    seen["sandbox " + name] = ask({"adopt": name}, process(os.getpid()))
garbage = {
    "bytes": os.urandom(200), "text": b"hello", "list": b"[1, 2]", "number": {"open": 1}, "nothing": {},
    "two": {"open": own, "adopt": sandbox}, "verb": {"delete": sandbox}, "long": b" " * 600 + b"{}",
    "huge": {"open": "x" * 100_000}, "deep": b"[" * 500, "nul": {"open": own + "\0"}, "null": b"null",
}
for name, record in garbage.items():
    seen[name] = ask(record)
seen["no process"] = ask({"adopt": sandbox})
seen["two processes"] = ask({"adopt": sandbox}, process(os.getpid()), process(os.getpid()))
seen["a file"] = ask({"adopt": sandbox}, os.open("/etc/passwd", os.O_RDONLY))
seen["a folder"] = ask({"adopt": sandbox}, os.open("/etc", os.O_RDONLY))
seen["in /proc"] = ask({"adopt": sandbox}, os.open("/proc/sys", os.O_PATH))
seen["itself"] = ask({"adopt": sandbox}, process(os.getpid()))
seen["init"] = ask({"adopt": sandbox}, process(1))
seen["no network"] = ask({"link": sandbox}, os.open("/etc/passwd", os.O_RDONLY))
seen["the host's"] = ask({"link": sandbox}, os.open("/proc/self/ns/net", os.O_RDONLY))
seen["not a network"] = ask({"link": sandbox}, os.open("/proc/self/ns/mnt", os.O_RDONLY))
seen["at last"] = ask({"release": sandbox})
os.mkdir(f"/sys/fs/cgroup/pids/dockyard/{own}/{sandbox}")
try:
    os.mkdir("/sys/fs/cgroup/pids/dockyard/u1x0123456789ab")
except OSError as error:
    seen["mkdir"] = error.errno
print(json.dumps(seen))
"""
)


# Beside states and sandboxes that are not his, and records that are none.
EXPECTED = {
    **{"own": "done", "again": "done", "at last": "done", "mkdir": errno.EACCES},
    **{"another": "not-yours", "before": "not-yours", "itself": "not-yours", "the host's": "not-yours"},
    **{"nul": "not-yours", "in /proc": "failed", "no network": "failed"},
}


def test_what_is_not_a_users_own_is_refused_by_name_and_the_helper_lives_on(user: User):
    with user.helped() as helper:
        seen = user.run(REFUSED)
        assert helper.poll() is None
        assert seen.pop("init") in ("not-yours", "failed")  # the kernel may not show it even to root
        for name, refusal in seen.items():
            is_name = name.startswith(("state ", "sandbox "))
            assert refusal == EXPECTED.get(name, "not-yours" if is_name else "bad-record"), name
        wait_until(lambda: groups_of_user() == [])


NESTED = (
    CALLER
    + r"""
import ctypes, time
libc = ctypes.CDLL(None, use_errno=True)
NEWUSER, NEWNET = 0x10000000, 0x40000000
def fork(*flags):
    '''A process that has unshared these, one after the other.'''
    ready, done = os.pipe()
    pid = os.fork()
    if pid == 0:
        try:
            one.close()
            for at, flag in enumerate(flags):
                assert libc.unshare(flag) == 0, ctypes.get_errno()
                if at == 0 and len(flags) > 1:
                    open("/proc/self/setgroups", "w").write("deny")
                    open("/proc/self/uid_map", "w").write(f"0 {uid} 1")
                    open("/proc/self/gid_map", "w").write(f"0 {os.getgid()} 1")
            os.write(done, b"1")
            time.sleep(1000)
        finally:
            os._exit(1)
    os.close(done)
    assert os.read(ready, 1) == b"1"
    return pid
ask({"open": own})
for tree in os.listdir("/sys/fs/cgroup"):
    if os.path.isdir(f"/sys/fs/cgroup/{tree}/dockyard/{own}"):
        os.mkdir(f"/sys/fs/cgroup/{tree}/dockyard/{own}/{sandbox}")
plain, nested, mapped = fork(NEWUSER | NEWNET), fork(NEWUSER, NEWUSER), fork(NEWUSER, 0)
seen["nested"] = ask({"adopt": "sbx-2"}, process(nested))
seen["mapped"] = ask({"adopt": "sbx-3"}, process(mapped))
seen["plain"] = ask({"adopt": sandbox}, process(plain))
seen["joins"] = [ask({"join": sandbox}, process(pid)) for pid in (plain, nested, os.getpid())]
seen["twice"] = ask({"adopt": sandbox}, process(plain))
seen["map"] = open(f"/proc/{plain}/uid_map").read().split()
seen["groups"] = open(f"/proc/{plain}/cgroup").read().count(f"/dockyard/{own}/{sandbox}")
seen["group of mapped"] = open(f"/proc/{mapped}/cgroup").read().count("dockyard")
gone = fork(NEWUSER)
folder = process(gone)
os.kill(gone, 9)
os.waitpid(gone, 0)
seen["gone"] = ask({"adopt": "sbx-4"}, folder)
print(json.dumps([seen, plain, nested, mapped]), flush=True)
sys.stdin.read()
"""
)


def test_only_a_users_own_namespaces_get_ids_and_only_once(user: User):
    with user.helped():
        with user.start(NESTED) as caller:
            seen, plain, nested, mapped = said(caller)
            assert seen["nested"] == "not-yours"  # its maker is a user of that namespace
            assert seen["mapped"] == "failed"  # it has ids, and a map is written once
            assert seen["plain"] == "done"
            assert seen["joins"] == ["done", "not-yours", "not-yours"]
            assert seen["twice"] == "full"
            assert seen["map"][:3] == ["0", str(NOBODY), "1"]
            assert seen["map"][3] == "1"
            assert int(seen["map"][4]) >= 0x80000000
            assert seen["map"][5] == "65536"
            assert seen["groups"] == 1  # of version 2; a user joins the others by himself
            assert seen["gone"] in ("failed", "not-yours")
        wait_until(lambda: find_process(plain) is None)  # with the connection
        for pid in (nested, mapped):
            if (key := find_process(pid)) is not None:
                key.kill()
        wait_until(lambda: groups_of_user() == [])


def test_another_user_is_refused_even_where_he_can_open_the_socket(user: User):
    with user.helped():
        words = {**user.words(CALLER + "print(json.dumps(ask({'open': own})))"), "user": 1, "group": 1}
        words["cwd"] = "/"
        done = subprocess.run(**words, capture_output=True, check=False)
        assert "PermissionError" in done.stderr
        user.socket.chmod(0o666)
        done = subprocess.run(**words, capture_output=True, check=False)
        assert json.loads(done.stdout) == "foreign"


def test_what_root_runs_for_users_is_short_and_loads_nothing_else():
    serving = {"__init__", "server", "adoption", "groups", "networks"}
    others = {"__main__", "trust", "ranges", "addresses", "denials", "bounds"}
    lines = {path.stem: len(path.read_text().splitlines()) for path in PROGRAM.glob("*") if path.is_file()}
    assert lines.keys() == serving | others, "say which a new file is of"
    assert sum(lines[name] for name in serving) < 400
    assert sum(lines.values()) < 770
    script = f"""
import runpy, sys
sys.argv = [{str(PROGRAM)!r}, "65534", "socket=/nowhere/at/all"]
try:
    runpy.run_path(sys.argv[0], run_name="__main__")
except OSError:
    print(*(name for name in sys.modules if name.split(".")[0] in ("sandbox", "protocol")))
"""
    words = [sys.executable, "-I", "-S", "-c", script]
    done = subprocess.run(words, capture_output=True, text=True, check=True)
    ours = {name for name in done.stdout.split() if name != "sandbox"}
    assert ours == {
        "sandbox.privileged",
        *(f"sandbox.privileged.{name}" for name in lines if name[0] != "_"),
    }


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
            files = len(list(Path(f"/proc/{helper.pid}/fd").iterdir()))
            seen.append((counted, files))
            assert list(Path("/sys/fs/cgroup").glob(f"*/dockyard/u{NOBODY}x*/*/")) == []
            assert internet.devices() == ["lo"]
        assert seen[0] == seen[1]


def test_a_paused_sandbox_goes_with_its_owner(user: User):
    """Which a paused one of root's does not before a sweep: it cannot notice."""
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

    def degraded() -> Any:
        assert owner.stdin is not None
        owner.stdin.write("\n")
        owner.stdin.flush()
        return said(owner)

    with user.start(LOOP) as owner:
        said(owner)
        for _ in range(2):
            assert degraded() == ["cpu", "memory"]
            with user.helped():
                assert degraded() == []
        assert degraded() == ["cpu", "memory"]


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
        assert owner.stdin is not None
        for _ in range(3):
            with user.helped(inside=internet):
                owner.stdin.write("\n")
                owner.stdin.flush()
                seen.append(said(owner))
    assert seen[0] == seen[1] == seen[2]
