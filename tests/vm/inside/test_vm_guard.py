"""The node's guard by a kernel that asks it: what it refuses it refuses alone, as the same sandbox without it
shows."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from sandbox import Policy, Sandbox
from sandbox.cgroups import find_hierarchies, plan_groups, state_key
from sandbox.places import default_state_dir

OTHERS = frozenset({"seccomp", "landlock", "apparmor"})
# The words of a call, and then its errno's name.
CALL = """
import ctypes, errno, sys
libc = ctypes.CDLL(None, use_errno=True)
words = [int(each) if each.lstrip("-").isdigit() else each.encode() for each in sys.argv[1:]]
done = libc.syscall(*(ctypes.c_long(each) if isinstance(each, int) else each for each in words))
print("done" if done >= 0 else errno.errorcode[ctypes.get_errno()])
"""
BPF, MOUNT, UNSHARE, SOCKET = "321", "165", "272", "41"
NEW_USER = str(0x10000000)
NO_COMMAND = "9999"
UNKNOWN_PROTOCOL = "200"  # of IPv4, so the kernel asks for a module


def call(box, *words):
    """What a call in the sandbox ended with, and what the guard says to it."""
    done = box.commands.run(["python3", "-c", CALL, *words], timeout_s=120)
    return done.stdout.strip(), [each.detail for each in done.denials if each.limit == "guard"]


def test_a_sandbox_is_under_the_guard(create):
    box = create()
    assert box.info.lacking == ()
    assert box.commands.run("sleep 100 & kill $! && ls /proc/self/fd >/dev/null; echo $?").denials == ()


@pytest.mark.parametrize(
    ("words", "detail", "without"),
    [
        ((BPF, NO_COMMAND, "0", "0"), "using BPF was refused once", "EINVAL"),
        ((MOUNT, "none", "/tmp", "tmpfs", "0", "0"), "mounting was refused once", "EPERM"),
        ((UNSHARE, NEW_USER), "making a user namespace was refused once", "done"),
    ],
    ids=["bpf", "mount", "namespace"],
)
def test_it_holds_alone(create, substrate, words, detail, without):
    """Where the kernel's own rules would say the same, the count shows that the guard did."""
    if substrate == "function" and words[0] == UNSHARE:
        without, detail = "ENOSPC", None  # none is left to it, which the kernel sees first
    alone = call(create(policy=Policy(without=OTHERS)), *words)
    assert alone == ("EPERM" if detail else without, [detail] if detail else [])
    assert call(create(policy=Policy(without=OTHERS | {"guard"})), *words) == (without, [])


def test_modules_are_not_asked_for(create):
    """Nothing else refuses a socket of an unknown protocol, for which the kernel starts modprobe as root."""
    protocol = UNKNOWN_PROTOCOL
    asked = _listen_to_modprobe()
    said, refused = call(create(), SOCKET, "2", "1", protocol)
    assert (said, refused) == ("EPROTONOSUPPORT", ["having the kernel load a module was refused 2 times"])
    assert f"-proto-{protocol}" not in asked.read_text()
    assert call(create(policy=Policy(without={"guard"})), SOCKET, "2", "1", protocol) == (said, [])
    assert f"-proto-{protocol}" in asked.read_text()


def _listen_to_modprobe():
    """The kernel's helper is now one that writes down what it is asked for."""
    asked, helper = Path("/run/modules-asked-for"), Path("/run/modprobe")
    asked.touch()
    helper.write_text(f'#!/bin/sh\necho "$@" >> {asked}\n')
    helper.chmod(0o755)
    Path("/proc/sys/kernel/modprobe").write_text(str(helper))
    return asked


# Joins the group that is named, if any, and does this to a process outside.
OUTSIDER = """
import os, sys
group, deed, pid = sys.argv[1:]
if group:
    open(group + "/cgroup.procs", "w").write(str(os.getpid()))
try:
    os.kill(int(pid), 0) if deed == "signal" else open(f"/proc/{pid}/environ").read()
    print("done")
except PermissionError:
    print("refused")
"""


@pytest.mark.parametrize("deed", ["signal", "trace"])
def test_who_breaks_out_is_still_held_by_its_group(create, deed):
    """As root, outside of every namespace of the sandbox: all that an escape leaves is the group."""
    box = create()
    group = str(_group(box))
    words = [sys.executable, "-c", OUTSIDER]
    pid = str(os.getpid())
    done = subprocess.run([*words, group, deed, pid], capture_output=True, text=True, check=True)
    assert done.stdout == "refused\n"
    assert any("not of this sandbox" in each.detail for each in box.denials)
    done = subprocess.run([*words, "", deed, pid], capture_output=True, text=True, check=True)
    assert done.stdout == "done\n"


def test_what_ends_is_forgotten(create):
    box = create()
    guard, sealed = box._ownership._guard, box._ownership._sealed
    assert guard._sealed.get(sealed.to_bytes(8, "little"), 48) is not None
    box.kill()
    assert guard._sealed.get(sealed.to_bytes(8, "little"), 48) is None


def test_the_doctor_tries_it():
    found = {each.name: each for each in Sandbox.capabilities(toolkit="/opt/toolkit")}
    for name in ("guard", "apparmor", "landlock", "egress policy", "substrate function"):
        assert found[name].status == "enforced", found[name]


def _group(box):
    (group,) = plan_groups(find_hierarchies(), state_key(default_state_dir()), box.id)
    return group.path
