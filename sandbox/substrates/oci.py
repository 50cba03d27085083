"""config.json of a `container` sandbox. Pure."""

from base64 import b64encode
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from sandbox.covers import Covers
from sandbox.policy.seccomp import filter_program, oci_beside_program, oci_seccomp, this_machine
from sandbox.substrates.base import HOSTNAME, ROOT_AT, SHM_BYTES, TERMINALS, UIDS_A_SANDBOX, USER_NAMESPACE_AT

# The network namespace is that of whoever starts the runtime: launch has made it.
_PROGRAM = "run.oci.seccomp_bpf_data"  # crun(1)
_NAMESPACES = ("pid", "mount", "ipc", "uts", "cgroup")
_MASKED = (
    *("config.gz", "interrupts", "kallsyms", "kcore", "keys", "kmsg", "kpagecgroup", "kpagecount"),
    *("kpageflags", "latency_stats", "sched_debug", "timer_list", "timer_stats"),
)
_MASKED_FOLDERS = ("acpi", "asound", "scsi")
_READ_ONLY = ("bus", "fs", "irq", "sys", "sysrq-trigger")


def oci_config(
    init: Sequence[str],
    *,
    owner_uid: int,
    cgroup: str | None,
    num_ids: int = UIDS_A_SANDBOX,
    filtered: bool = True,
    as_program: bool = False,
    hostname: str = HOSTNAME,
    covers: Covers | None = None,
) -> dict[str, Any]:
    """A bundle whose first process is `init`, with `num_ids` uids from `owner_uid` on. `cgroup` is the
    runtime's to make; None where it is to make none. `as_program` gives the table of system calls as
    instructions, for a runtime that takes them (crun), in place of the table, of which it would make them
    each time."""
    emptied = [name for name in _MASKED_FOLDERS if Path("/proc", name).is_dir()] if as_program else []
    masked = (*_MASKED, *(() if as_program else _MASKED_FOLDERS))
    ids = [{"containerID": 0, "hostID": owner_uid, "size": num_ids}]
    linux: dict[str, Any] = {
        "namespaces": [
            {"type": "user", "path": USER_NAMESPACE_AT},
            *({"type": name} for name in _NAMESPACES),
        ],
        "uidMappings": ids,
        "gidMappings": ids,
        "maskedPaths": [*(f"/proc/{name}" for name in masked), *_masked(covers or Covers())],
        # Outer ones first: a mount over inner ones would have these writable again.
        "readonlyPaths": sorted({*(f"/proc/{name}" for name in _READ_ONLY), *(covers or Covers()).read_only}),
    }
    if filtered:
        linux["seccomp"] = oci_beside_program() if as_program else oci_seccomp(this_machine())
    as_program = as_program and filtered
    if cgroup is not None:
        linux["cgroupsPath"] = cgroup
    return {
        "ociVersion": "1.0.2",
        "annotations": {_PROGRAM: b64encode(filter_program(this_machine())).decode()} if as_program else {},
        "root": {"path": ROOT_AT, "readonly": False},
        "hostname": hostname,
        "process": {
            "terminal": False,
            "user": {"uid": 0, "gid": 0},
            "args": list(init),
            "env": [],
            "cwd": "/",
            "capabilities": {each: [] for each in ("bounding", "effective", "permitted", "inheritable")},
            "noNewPrivileges": True,
        },
        "mounts": [*_mounts(), *(_empty(f"/proc/{name}") for name in emptied)],
        "linux": linux,
    }


def _masked(covers: Covers) -> list[str]:
    """A directory is then an empty one, a file and a device are the null device."""
    devices = ["/dev/pts/ptmx" if name == "ptmx" else f"/dev/{name}" for name in covers.devices]
    return [*covers.masked_directories, *covers.masked_files, *devices]


def _mounts() -> list[dict[str, Any]]:
    plain = ["nosuid", "noexec", "nodev"]
    return [
        {"destination": "/proc", "type": "proc", "source": "proc", "options": plain},
        _tmpfs("/dev", ["nosuid", "noexec", "mode=755", "size=64k", "ro"]),
        {
            "destination": "/dev/pts",
            "type": "devpts",
            "source": "devpts",
            "options": ["nosuid", "noexec", "newinstance", "ptmxmode=0666", "mode=0620", f"max={TERMINALS}"],
        },
        _tmpfs("/dev/shm", [*plain, "mode=1777", f"size={SHM_BYTES}"]),
    ]


def _empty(destination: str) -> dict[str, Any]:
    """The image's empty folder in its place: a runtime would mount a file system for each."""
    options = ["bind", "ro", "nosuid", "nodev", "noexec"]
    return {
        "destination": destination,
        "type": "bind",
        "source": f"{ROOT_AT}/.dockyard/empty",
        "options": options,
    }


def _tmpfs(destination: str, options: list[str]) -> dict[str, Any]:
    return {"destination": destination, "type": "tmpfs", "source": "tmpfs", "options": options}
