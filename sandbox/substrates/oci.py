"""config.json of a `container` sandbox. Pure."""

from collections.abc import Sequence
from typing import Any

from sandbox.substrates.base import HOSTNAME, ROOT_AT, SHM_BYTES, UIDS_A_SANDBOX

_NAMESPACES = ("pid", "mount", "ipc", "uts", "cgroup", "user", "network")
_MASKED = (
    *("acpi", "asound", "config.gz", "interrupts", "kallsyms", "kcore", "keys", "kmsg", "kpagecgroup"),
    *("kpagecount", "kpageflags", "latency_stats", "sched_debug", "scsi", "timer_list", "timer_stats"),
)
_READ_ONLY = ("bus", "fs", "irq", "sys", "sysrq-trigger")
# Denied although the kernel would refuse most of them anyway: each has a history of bugs behind it.
_DENIED_CALLS = (
    *("mount", "umount2", "pivot_root", "fsopen", "fsmount", "fsconfig", "fspick", "move_mount"),
    *("open_tree", "mount_setattr", "setns", "unshare", "open_by_handle_at", "bpf", "perf_event_open"),
    *("userfaultfd", "keyctl", "add_key", "request_key", "kexec_load", "kexec_file_load", "init_module"),
    *("finit_module", "delete_module", "io_uring_setup", "io_uring_enter", "io_uring_register", "reboot"),
    *("swapon", "swapoff", "quotactl", "acct", "syslog", "process_vm_readv", "process_vm_writev"),
)
_CLONE_NEWUSER = 0x10000000


def oci_config(init: Sequence[str], *, owner_uid: int, cgroup: str | None) -> dict[str, Any]:
    """A bundle whose first process is `init`, with uids from `owner_uid` on. `cgroup` is the runtime's to
    make; None where it is to make none."""
    ids = [{"containerID": 0, "hostID": owner_uid, "size": UIDS_A_SANDBOX}]
    linux: dict[str, Any] = {
        "namespaces": [{"type": name} for name in _NAMESPACES],
        "uidMappings": ids,
        "gidMappings": ids,
        "maskedPaths": [f"/proc/{name}" for name in _MASKED],
        "readonlyPaths": [f"/proc/{name}" for name in _READ_ONLY],
        "seccomp": _seccomp(),
    }
    if cgroup is not None:
        linux["cgroupsPath"] = cgroup
    return {
        "ociVersion": "1.0.2",
        "root": {"path": ROOT_AT, "readonly": False},
        "hostname": HOSTNAME,
        "process": {
            "terminal": False,
            "user": {"uid": 0, "gid": 0},
            "args": list(init),
            "env": [],
            "cwd": "/",
            "capabilities": {each: [] for each in ("bounding", "effective", "permitted", "inheritable")},
            "noNewPrivileges": True,
        },
        "mounts": _mounts(),
        "linux": linux,
    }


def _mounts() -> list[dict[str, Any]]:
    plain = ["nosuid", "noexec", "nodev"]
    return [
        {"destination": "/proc", "type": "proc", "source": "proc", "options": plain},
        _tmpfs("/dev", ["nosuid", "noexec", "mode=755", "size=64k", "ro"]),
        {
            "destination": "/dev/pts",
            "type": "devpts",
            "source": "devpts",
            "options": ["nosuid", "noexec", "newinstance", "ptmxmode=0666", "mode=0620"],
        },
        _tmpfs("/dev/shm", [*plain, "mode=1777", f"size={SHM_BYTES}"]),
    ]


def _tmpfs(destination: str, options: list[str]) -> dict[str, Any]:
    return {"destination": destination, "type": "tmpfs", "source": "tmpfs", "options": options}


def _seccomp() -> dict[str, Any]:
    """Everything but the calls above and new user namespaces. clone3 hides its flags behind a pointer, so it
    is "not there" (errno 38), upon which libc uses clone."""
    newuser = {"index": 0, "value": _CLONE_NEWUSER, "valueTwo": _CLONE_NEWUSER, "op": "SCMP_CMP_MASKED_EQ"}
    return {
        "defaultAction": "SCMP_ACT_ALLOW",
        "architectures": ["SCMP_ARCH_X86_64"],
        "syscalls": [
            {"names": list(_DENIED_CALLS), "action": "SCMP_ACT_ERRNO", "errnoRet": 1},
            {"names": ["clone"], "action": "SCMP_ACT_ERRNO", "errnoRet": 1, "args": [newuser]},
            {"names": ["clone3"], "action": "SCMP_ACT_ERRNO", "errnoRet": 38},
        ],
    }
