"""The seam between "a sandbox" and "how this host makes one".

A substrate is a pure function from a Blueprint to a LaunchPlan, and a check that its tools are there. The
launcher carries the plan out; everything after that (commands, files, kill) goes through the control socket
and is the same for all. To add a substrate: write one module with these two functions and name it in
`substrates.SUBSTRATES`.
"""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

from sandbox.covers import Covers
from sandbox.images import INIT_AT, Image
from sandbox.layers import LayerKind
from sandbox.limits import Limits
from sandbox.policy import Protection

CONTROL_FD = 3  # where launch puts the control socket; what init is told to serve
FILTER_FD = 4  # where launch puts the filter of system calls, for bubblewrap
LAYER_FD = 5  # where launch keeps the layer's content, if it stays
DETACHED = "--detached"  # the program goes once the sandbox runs
WITHOUT_PRIVILEGE = "--userns"  # in a user namespace of its own
ROOT_AT = "/tmp/root"  # where launch mounts the sandbox's root, in its own mount namespace
BUNDLE_AT = "/tmp/bundle"
USER_NAMESPACE_AT = "/tmp/user"  # where launch puts one, for an OCI runtime to join
TERMINALS_AT = "/tmp/pts"  # where launch mounts them, for bubblewrap
SHM_AT, SHM_BYTES = "/dev/shm", 64 << 20
TERMINALS = 64  # at a time; the machine as a whole has some 4,000
HOSTNAME = "dockyard"
UIDS_A_SANDBOX = 65536
# Of the tmpfs that launch stages everything in, where the writable layer is not on it.
_STAGE_BYTES, _STAGE_INODES = 1 << 20, 64


@dataclass(frozen=True, slots=True)
class Blueprint:
    """Everything that a substrate may build from."""

    id: str
    image: Image
    limits: Limits
    owner_uid: int  # first of the sandbox's own uids, as the launcher sees it; 0 inside
    privileged: bool  # this process may mount and use other uids
    cgroups: tuple[Path, ...]  # of version 1, to be joined before anything else happens
    born_in: Path | None  # of version 2, which is joined so: moving there takes milliseconds
    pids_by_rlimit: bool  # no cgroup limits pids here
    protections: frozenset[Protection]
    profile: str | None  # of AppArmor, loaded
    hide_unified: Path | None  # version 2 tree beside version 1, which crun does not take
    runtime: str | None = None  # OCI runtime by name, None = the best that is there
    hostname: str = HOSTNAME
    is_filled: bool = False  # its layer has content at first, in which another name may be written
    covers: Covers = field(default_factory=Covers)  # of the image
    num_ids: int = UIDS_A_SANDBOX  # inside
    is_adopted: bool = False  # without privilege, but somebody with it gives ids and joins the cgroups


@dataclass(frozen=True, slots=True)
class LaunchPlan:
    """Arguments for `dockyard-init launch`, which becomes `program`."""

    options: tuple[str, ...]
    program: tuple[str, ...]
    oci_config: str | None = None
    filter_program: bytes | None = None  # of system calls, to be at FILTER_FD
    is_sealed: bool = False  # the program is run from a copy in memory, see `sandbox.sealed`
    all_hierarchies: bool = False  # it makes cgroups of its own, in every hierarchy
    born_in: Path | None = None  # a cgroup
    layer: LayerKind = "memory"

    @property
    def is_detached(self) -> bool:
        """Whether the program has nothing more to do once the sandbox runs."""
        return DETACHED in self.options

    @property
    def stays(self) -> bool:
        """Whether a process is between the nursery and the sandbox's first one for as long as that lives."""
        return not self.is_detached or WITHOUT_PRIVILEGE in self.options

    @property
    def layer_at(self) -> str:
        """Where the content of the layer is, below /proc/PID of what stays."""
        if self.is_detached:
            return f"fd/{LAYER_FD}"
        return "root/tmp/upper" if self.layer == "memory" else "root/tmp/layer/upper"


class Substrate(Protocol):
    """Stateless, so thread-safe. Neither method starts anything."""

    def check(self, *, privileged: bool, runtime: str | None) -> None:
        """Raises UnsupportedError when this host lacks a tool that it needs. Microseconds."""
        ...

    def plan(self, blueprint: Blueprint) -> LaunchPlan:
        """How to launch this sandbox. Pure but for looking up programs."""
        ...


def init_command(blueprint: Blueprint) -> tuple[str, ...]:
    """The sandbox's pid 1. RLIMIT_NPROC counts the sandbox's own user namespace (Linux 5.14), so where
    there is no pids cgroup it is as good a limit."""
    processes = blueprint.limits.pids if blueprint.pids_by_rlimit else None
    data_bytes = blueprint.limits.process_bytes
    writable = blueprint.covers.writable(blueprint.image.writable)
    places = (*writable, SHM_AT) if "landlock" in blueprint.protections else ()
    limits = (str(processes or 0), str(data_bytes or 0))
    return (INIT_AT, "init", str(CONTROL_FD), blueprint.id, *limits, blueprint.profile or "-", *places)


def launch_options(blueprint: Blueprint) -> list[str]:
    """What every substrate needs of launch: cgroups, writable layer, image. The launcher adds the network,
    and the layer itself where that is not in memory."""
    image, limits = blueprint.image, blueprint.limits
    options = ["--skeleton", str(image.skeleton), "--owner", str(blueprint.owner_uid)]
    in_memory = limits.layer == "memory"
    options += ["--layer-bytes", str(limits.disk_bytes if in_memory else _STAGE_BYTES)]
    options += ["--layer-inodes", str(limits.disk_inodes if in_memory else _STAGE_INODES)]
    if blueprint.hostname != HOSTNAME or blueprint.is_filled:
        options += ["--host", blueprint.hostname]
    for cgroup in blueprint.cgroups:
        options += ["--cgroup", str(cgroup)]
    for bind in image.binds:
        options += ["--bind", str(bind.source), bind.target]
    for mask in image.masks:
        options += ["--mask", mask]
    for directory in image.writable:
        options += ["--writable", directory]
    if not blueprint.privileged:
        options.append(WITHOUT_PRIVILEGE)
    return options
