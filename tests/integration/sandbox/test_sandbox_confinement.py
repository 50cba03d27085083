"""What a sandbox can see and change: its own, and nothing of the host or of others."""

import os
from pathlib import Path

import pytest
from sandbox_processes import processes, uid_of

from sandbox import Sandbox
from sandbox.audit import check_integrity
from sandbox.journal import Journal
from sandbox.root_ranges import shared_root_ranges
from sandbox.substrates.base import UIDS_A_SANDBOX


def test_what_is_not_its_own_cannot_be_written(box: Sandbox):
    targets = [
        "/usr/bin/x",
        "/opt/toolkit/x",
        "/etc/passwd",
        "/x",
        "/.dockyard/init",
        "/dev/x",
        "/proc/sys/kernel/hostname",
    ]
    for target in targets:
        result = box.commands.run(f"echo changed > {target}")
        assert result.exit_code != 0, target
    for target in ["/workspace/x", "/tmp/x", "/root/x", "/dev/shm/x"]:
        assert box.commands.run(f"echo mine > {target}").ok, target


def test_the_hosts_devices_stay_the_hosts(box: Sandbox, state_dir: Path):
    """They are the host's own inodes, so an owner inside could shut everyone out."""
    (record,) = Journal(state_dir).records()
    names = ("null", "zero", "full", "tty", "urandom")
    if os.geteuid() == 0:
        assert uid_of(record.processes[-1].pid) not in {Path("/dev", name).stat().st_uid for name in names}
    result = box.commands.run(f"for name in {' '.join(names)}; do chmod 666 /dev/$name; done")
    assert result.stderr.count("not permitted") + result.stderr.count("Read-only") == len(names)


def test_the_hosts_own_files_and_packages_are_not_there(box: Sandbox, state_dir: Path):
    hidden = ["/home", "/boot", "/srv", "/etc/shadow", str(state_dir), str(Path(__file__))]
    for path in hidden:
        assert not box.files.exists(path), path
    assert box.files.list("/usr/local") == ()
    assert box.files.list("/root") == ()


def test_there_is_no_network(box: Sandbox):
    interfaces = [
        line.split(":")[0].strip() for line in box.commands.run("cat /proc/net/dev").stdout.splitlines()[2:]
    ]
    assert interfaces == ["lo"]
    script = "import socket; socket.create_connection(('192.0.2.1', 80), 3)"
    result = box.commands.run(["python3", "-c", script])
    assert "Network is unreachable" in result.stderr


def test_it_has_no_power(box: Sandbox):
    status = dict(
        line.split(":\t", 1)
        for line in box.commands.run("cat /proc/self/status").stdout.splitlines()
        if ":\t" in line
    )
    assert {int(status[name], 16) for name in ("CapEff", "CapPrm", "CapBnd", "CapInh", "CapAmb")} == {0}
    assert status["NoNewPrivs"] == "1"
    for attempt in [
        "mount -t tmpfs x /tmp",
        "unshare -Ur true",
        "unshare -m true",
        "chroot / true",
        "mknod /tmp/n b 1 1",
    ]:
        assert box.commands.run(attempt).exit_code != 0, attempt


def test_the_uid_outside_is_nobodys(create, substrate: str, state_dir: Path):
    if os.geteuid() != 0:
        pytest.skip("an ordinary user has one uid")
    box = create(substrate=substrate)
    command = box.commands.start("sleep 1000")
    box.commands.run("true")
    (record,) = Journal(state_dir).records()
    assert uid_of(record.processes[-1].pid) >= 0x24000000
    command.kill()


def test_live_sandboxes_of_root_share_no_id(create, substrate: str):
    if os.geteuid() != 0:
        pytest.skip("an ordinary user has one uid")
    boxes = [create(substrate=substrate) for _ in range(6)]
    firsts = [box._made.first_id for box in boxes]
    assert len(set(firsts)) == len(boxes)
    assert all(first % UIDS_A_SANDBOX == 0 for first in firsts)
    boxes[0].kill()
    held = set[int]().union(*shared_root_ranges()._held)
    assert firsts[0] not in held
    assert set(firsts[1:]) <= held


def test_sandboxes_do_not_see_each_other(create, substrate: str):
    one, other = create(substrate=substrate), create(substrate=substrate)
    running = one.commands.start("sleep 1001")
    one.files.write("/tmp/mine", b"1")
    assert processes(other) == []
    assert not other.files.exists("/tmp/mine")
    running.kill()


def test_nothing_is_mounted_on_the_host(create, substrate: str, state_dir: Path):
    before = Path("/proc/self/mountinfo").read_text()
    create(substrate=substrate).commands.run("true")
    assert Path("/proc/self/mountinfo").read_text() == before
    assert check_integrity(state_dir).leftovers == ()
