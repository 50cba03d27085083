"""What this kernel has, that other tests rely on."""

from pathlib import Path


def test_the_security_modules_are_on():
    names = Path("/sys/kernel/security/lsm").read_text().strip().split(",")
    assert {"landlock", "apparmor", "bpf", "yama"} <= set(names)


def test_cgroups_are_unified():
    controllers = Path("/sys/fs/cgroup/cgroup.controllers").read_text().split()
    assert {"cpu", "memory", "pids"} <= set(controllers)
