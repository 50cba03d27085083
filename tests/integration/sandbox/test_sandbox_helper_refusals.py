"""What the helper that root runs for an ordinary user refuses, and what it is made of."""

import errno
import json
import os
import resource
import select
import signal
import socket
import subprocess
import sys
import time
from array import array
from contextlib import ExitStack, suppress
from pathlib import Path

import pytest
from lingering import lingering
from ordinary_user import NOBODY, User, groups_of_user, said, user
from sandbox_internet import wait_until

from sandbox.helper_start import PROGRAM
from sandbox.privileged import adoption
from sandbox.privileged.server import Caller
from sandbox.processes import find_process

__all__ = ["user"]  # a fixture

PLACE = Path("/run/dockyard")
pytestmark = pytest.mark.skipif(os.geteuid() != 0, reason="root runs the helper")


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
    said = json.loads(reply)
    assert said["request"] == (record[2] if isinstance(record, list) and len(record) == 3 else None), said
    return said.get("refused", "done")
def process(pid):
    return os.open(f"/proc/{pid}", os.O_PATH | os.O_DIRECTORY)
seen = {}
"""


REFUSED = (
    CALLER
    + r"""
seen["before"] = ask(["adopt", sandbox, 7], process(os.getpid()))
for name in ("u0x0123456789ab", f"u{uid}x0123", "../" + own, own + "/x", "", "u1x0123456789ab\n"):
    seen["state " + name] = ask(["open", name, 7])
seen["own"] = ask(["open", own, 7])
seen["again"] = ask(["open", own, 7])
seen["another"] = ask(["open", f"u{uid}x0123456789ac", 7])
for name in ("../../x", "sbx-1/..", "sbx-" + "a" * 40, "sbx-\u00e9", ".", "sbx-1\n"):
    seen["sandbox " + name] = ask(["adopt", name, 7], process(os.getpid()))
garbage = {
    "bytes": os.urandom(200), "text": b"hello", "list": b"[1, 2]", "number": ["open", 1, 7], "nothing": {},
    "two": {"open": own, "adopt": sandbox}, "verb": ["delete", sandbox, 7], "long": b" " * 600 + b"{}",
    "lists": [["open"], own, 7],
    "huge": b"x" * 100_000, "deep": b"[" * 500, "nul": ["open", own + "\0", 7], "null": b"null",
}
for name, record in garbage.items():
    seen[name] = ask(record)
seen["no process"] = ask(["adopt", sandbox, 7])
seen["two processes"] = ask(["adopt", sandbox, 7], process(os.getpid()), process(os.getpid()))
seen["a file"] = ask(["adopt", sandbox, 7], os.open("/etc/passwd", os.O_RDONLY))
seen["a folder"] = ask(["adopt", sandbox, 7], os.open("/etc", os.O_RDONLY))
seen["in /proc"] = ask(["adopt", sandbox, 7], os.open("/proc/sys", os.O_PATH))
seen["itself"] = ask(["adopt", sandbox, 7], process(os.getpid()))
seen["init"] = ask(["adopt", sandbox, 7], process(1))
seen["no network"] = ask(["link", sandbox, 7], os.open("/etc/passwd", os.O_RDONLY))
seen["the host's"] = ask(["link", sandbox, 7], os.open("/proc/self/ns/net", os.O_RDONLY))
seen["not a network"] = ask(["link", sandbox, 7], os.open("/proc/self/ns/mnt", os.O_RDONLY))
seen["at last"] = ask(["release", sandbox, 7])
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
    (ready, done), owner = os.pipe(), os.getpid()
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
            while os.getppid() == owner:  # with which it ends
                time.sleep(0.05)
        finally:
            os._exit(1)
    os.close(done)
    assert os.read(ready, 1) == b"1"
    return pid
ask(["open", own, 7])
for tree in os.listdir("/sys/fs/cgroup"):
    if os.path.isdir(f"/sys/fs/cgroup/{tree}/dockyard/{own}"):
        os.mkdir(f"/sys/fs/cgroup/{tree}/dockyard/{own}/{sandbox}")
plain, nested, mapped = fork(NEWUSER | NEWNET), fork(NEWUSER, NEWUSER), fork(NEWUSER, 0)
seen["nested"] = ask(["adopt", "sbx-2", 7], process(nested))
seen["mapped"] = ask(["adopt", "sbx-3", 7], process(mapped))
seen["plain"] = ask(["adopt", sandbox, 7], process(plain))
seen["joins"] = [ask(["join", sandbox, 7], process(pid)) for pid in (plain, nested, os.getpid())]
seen["twice"] = ask(["adopt", sandbox, 7], process(plain))
seen["map"] = open(f"/proc/{plain}/uid_map").read().split()
seen["groups"] = open(f"/proc/{plain}/cgroup").read().count(f"/dockyard/{own}/{sandbox}")
seen["group of mapped"] = open(f"/proc/{mapped}/cgroup").read().count("dockyard")
gone = fork(NEWUSER)
folder = process(gone)
os.kill(gone, 9)
os.waitpid(gone, 0)
seen["gone"] = ask(["adopt", "sbx-4", 7], folder)
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


RELEASED = (
    NESTED.partition('ask(["open"')[0]
    + r"""
ask(["open", own, 7])
os.mkdir(f"/sys/fs/cgroup/pids/dockyard/{own}/{sandbox}")
def first(name):
    pid = fork(NEWUSER)
    assert ask(["adopt", name, 7], process(pid)) == "done"
    return int(open(f"/proc/{pid}/uid_map").read().split()[4])
firsts = [first(sandbox)]
print(json.dumps("made"), flush=True)
for _ in range(int(sys.stdin.readline())):
    assert ask(["release", f"sbx-{len(firsts)}", 7]) == "done"
    firsts.append(first(f"sbx-{len(firsts) + 1}"))
print(json.dumps(firsts), flush=True)
sys.stdin.read()
"""
)


def test_ids_rest_until_a_sandboxs_groups_are_gone(user: User):
    """Whatever its owner says: a process that he cannot end is in one of them."""
    with user.helped(), user.start(RELEASED) as caller, subprocess.Popen(["sleep", "60"]) as root:
        try:
            assert said(caller) == "made"
            (group,) = Path("/sys/fs/cgroup/pids/dockyard").glob(f"u{NOBODY}x*/sbx-1")
            (group / "cgroup.procs").write_text(str(root.pid))
            num_own = array("I", (PLACE / "ids").read_bytes()).count(NOBODY)  # each is drawn in its turn
            assert caller.stdin is not None
            caller.stdin.write(f"{num_own + 2}\n")
            caller.stdin.flush()
            first, *later = said(caller)
            assert first not in later
            assert len({*later}) < len(later)  # those whose groups were never there
        finally:
            root.kill()
    wait_until(lambda: groups_of_user() == [])


STAYS = (
    CALLER
    + r"""
import subprocess, time
ask(["open", own, 7])
mine = f"/sys/fs/cgroup/pids/dockyard/{own}/mine"
os.mkdir(mine)
stays = subprocess.Popen(["sleep", "60"])
open(f"{mine}/cgroup.procs", "w").write(str(stays.pid))
one.close()
one = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
one.connect(os.environ["DOCKYARD_HELPER"])
began = time.monotonic()
seen["meanwhile"] = [ask(["open", own, 7]) for _ in range(5)]
seen["took_s"] = time.monotonic() - began
stays.kill()
while ask(["open", own, 7]) == "busy":
    time.sleep(0.01)
seen["is there"] = os.path.isdir(os.path.dirname(mine)) and not os.path.isdir(mine)
print(json.dumps(seen))
"""
)


def test_nobody_waits_behind_what_an_owner_has_left_in_his_state(user: User):
    """A process of his own there, which no tree of version 1 lets the helper end."""
    with user.helped():
        seen = user.run(STAYS)
        wait_until(lambda: groups_of_user() == [])
    assert seen["meanwhile"] == ["busy"] * 5
    assert seen["took_s"] < 2
    assert seen["is there"]


def test_another_user_is_refused_even_where_he_can_open_the_socket(user: User):
    with user.helped():
        words = {**user.words(CALLER + "print(json.dumps(ask({'open': own})))"), "user": 1, "group": 1}
        words["cwd"] = "/"
        done = subprocess.run(**words, capture_output=True, check=False)
        assert "PermissionError" in done.stderr
        user.socket.chmod(0o666)
        done = subprocess.run(**words, capture_output=True, check=False)
        assert json.loads(done.stdout) == "foreign"


def test_who_comes_while_no_descriptor_is_free_waits_and_others_are_served(user: User):
    """Nor do sandboxes of theirs end for it."""
    with user.helped() as helper, connected(user) as early:
        assert answered(early) == "foreign"
        resource.prlimit(helper.pid, resource.RLIMIT_NOFILE, (first_free(helper.pid), 1024))
        with connected(user) as late:
            late.send(b"{}")
            assert answered(early) == "foreign"
            assert not select.select([late], [], [], 0.1)[0]
            resource.prlimit(helper.pid, resource.RLIMIT_NOFILE, (1024, 1024))
            assert json.loads(late.recv(4096))["refused"] == "foreign"


def test_a_socket_that_waits_for_its_content_when_it_is_closed_holds_up_nobody(user: User):
    """Of those that a record brings, the helper is the last owner."""
    with ExitStack() as kept:
        helper = kept.enter_context(user.helped())
        one, other = (kept.enter_context(connected(user)) for _ in range(2))
        listener = kept.enter_context(socket.create_server(("127.0.0.1", 0)))
        helper.send_signal(signal.SIGSTOP)
        try:
            for _ in range(3):
                with lingering(listener) as slow:
                    socket.send_fds(one, [b"{}"], [slow.fileno()])
        finally:
            helper.send_signal(signal.SIGCONT)
        assert [answered(other), answered(one)] == ["foreign"] * 2


def test_its_end_is_not_cut_short_by_its_own_alarm(user: User):
    with user.helped() as helper:
        helper.terminate()
        while helper.poll() is None:
            helper.send_signal(signal.SIGALRM)
            time.sleep(0.0002)


def test_a_want_of_descriptors_makes_nobody_a_strangers():
    """It is told as what it is."""
    with subprocess.Popen(["unshare", "--user", "sleep", "600"]) as process:
        try:
            wait_until(lambda: Path(f"/proc/{process.pid}/comm").read_text() == "sleep\n")
            folder = os.open(f"/proc/{process.pid}", os.O_PATH | os.O_DIRECTORY)
            assert adoption.checked_pid(folder, 0) == process.pid
            before = resource.getrlimit(resource.RLIMIT_NOFILE)
            resource.setrlimit(resource.RLIMIT_NOFILE, (first_free(os.getpid()), before[1]))
            try:
                with pytest.raises(OSError, match="Too many open files"):
                    adoption.checked_pid(folder, 0)
            finally:
                resource.setrlimit(resource.RLIMIT_NOFILE, before)
            os.close(folder)
        finally:
            process.kill()


def test_one_connection_too_many_is_closed_and_those_before_it_are_served(user: User):
    with user.helped(), ExitStack() as kept:
        first, *others = [kept.enter_context(connected(user)) for _ in range(8)]
        assert [answered(each) for each in (first, *others)] == ["foreign"] * 8
        with connected(user) as one_too_many:
            assert one_too_many.recv(100) == b""
        assert answered(first) == "foreign"
        first.close()
        wait_until(lambda: serves_another(user))


def connected(user: User) -> socket.socket:
    caller = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    caller.settimeout(30)
    caller.connect(str(user.socket))
    return caller


def answered(caller: socket.socket) -> str:
    """To whom the helper does not serve."""
    caller.send(b"{}")
    return json.loads(caller.recv(4096))["refused"]


def serves_another(user: User) -> bool:
    with connected(user) as caller, suppress(OSError, ValueError):
        return answered(caller) == "foreign"
    return False


def first_free(pid: int) -> int:
    taken = {int(each.name) for each in Path(f"/proc/{pid}/fd").iterdir()}
    return min(set(range(len(taken) + 1)) - taken)


def test_what_root_runs_for_users_is_short_and_loads_nothing_else():
    serving = {"__init__", "server", "adoption", "groups", "networks"}
    others = {"__main__", "trust", "ranges", "addresses", "denials", "bounds"}
    lines = {path.stem: len(path.read_text().splitlines()) for path in PROGRAM.glob("*") if path.is_file()}
    assert lines.keys() == serving | others, "say which a new file is of"
    assert sum(lines[name] for name in serving) < 400
    assert sum(lines.values()) < 790
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


def test_a_signal_behind_the_end_of_programs_ends_them_no_second_time():
    """Or memory of the helper's would be freed twice."""
    ends: list[int] = []

    class Programs:
        def close(self) -> None:
            ends.append(1)
            raise SystemExit

    caller = Caller.__new__(Caller)
    caller._links, caller.programs = {}, Programs()
    with pytest.raises(SystemExit):
        caller.cut()
    assert not caller.cut()
    assert ends == [1]
