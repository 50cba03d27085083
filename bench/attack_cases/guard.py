"""The outer guard of positive controls: probes run as processes of the host, and may hurt nobody there.

A guarded probe has a cgroup of its own (processes, memory, CPU time), a limit on its time, and in the end
whatever is left of it is killed. As root's it also has a mount namespace in which every file system that
keeps something is read-only, and one small tmpfs, which counts as its memory, lies over all places for
temporary files: it can write that much and no more. It is an ordinary user's unless the door in question is
root's.
"""

import itertools
import os
import shutil
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from bench.attack_cases.model import Identity
from sandbox import cgroups
from sandbox.limits import Asked, LimitName, settle

UID = 65533  # nobody's on any distribution; not the one that unmapped files seem to have
_COUNT = itertools.count()
MEMORY_MB, PIDS, CPUS = 512, 256, 2.0
ROOM_MB, ROOM_FILES, DISK_MB = 64, 4096, 32
FILE_BLOCKS = 256 << 11  # of 512 bytes: 256 MiB, for an ordinary user's guard, which has no room of its own
OPEN_FILES = 4096
_OF_THE_KERNEL = (
    "proc|sysfs|cgroup|cgroup2|devpts|bpf|securityfs|debugfs|tracefs|mqueue|configfs|fusectl|binfmt_misc|pstore"
    "|hugetlbfs|efivarfs|nsfs|rpc_pipefs|selinuxfs"
)
_LOOPS = Path("/dev/loop-control")
# Joins the groups, then takes a mount namespace: the toolkit lies where every user may go, a file system in a
# file of the room is the disk, what keeps something becomes read-only, and the room lies over places for
# temporary files. Where the folder of all that is tried is in one of those it stays in sight. File systems of
# the kernel's stay as they are: what they take is a door that is tried.
_ENTER = """
set -e
place=$1 toolkit=$2 groups=$3 disk=$4; shift 4
for group in $groups; do echo $$ > "$group/cgroup.procs"; done
ulimit -n {files} 2>/dev/null || true
export place toolkit disk
exec unshare --mount --propagation private sh -ec '
  kept=${{place%/*}} room=$place/room temporary="/tmp /var/tmp /dev/shm"
  mount --bind "$toolkit" "$place/toolkit"
  mount -t tmpfs -o mode=755,size={room}m,nr_inodes={inodes} tmpfs "$room"
  if [ -n "$disk" ]; then
    truncate -s {disk_mb}M "$room/disk"
    mke2fs -q -F -t ext4 "$room/disk"
    mount -o loop "$room/disk" "$place/disk"
    chmod 1777 "$place/disk"
  fi
  mounts=$(cat /proc/self/mounts)
  printf "%s\\n" "$mounts" | while read -r _ at kind _; do
    case $kind in {kernels}) continue;; esac
    at=$(printf %b "$at")
    case $at in "$room"|"$place/disk") ;; *) mount -o remount,bind,ro "$at";; esac
  done
  for at in $temporary; do
    mkdir -p "$room$at"
    case $kept in "$at"/*) mkdir -p "$room$kept"; mount --rbind "$kept" "$room$kept";; esac
    chmod 1777 "$room$at"
  done
  for at in $temporary; do [ ! -d $at ] || mount --rbind "$room$at" $at; done
  unset place toolkit disk kept room temporary mounts
  exec "$@"' sh "$@"
"""
# Stays as the probe's parent, so that there is one of the probe's own user to look into.
_PARENT = ("sh", "-c", '"$@"; exit $?', "sh")
_AS_USER = ("setpriv", f"--reuid={UID}", f"--regid={UID}", "--clear-groups", "--inh-caps=-all")
_SPACES = ("--user", "--map-root-user", "--mount", "--net", "--ipc", "--uts", "--cgroup", "--pid")
_IN_NAMESPACES = ("unshare", *_SPACES, "--fork", "--kill-child", "--mount-proc")


@dataclass(frozen=True, slots=True)
class Guard:
    """`place` is a folder of the guard's own that every user may enter, `state_dir` names its cgroups, so
    that an audit of that directory finds what would be left."""

    place: Path
    state_dir: Path
    toolkit: Path

    @property
    def disk(self) -> Path:
        """Where a guarded probe finds its disk."""
        return self.place / "disk"

    def run(
        self,
        words: Sequence[str],
        identity: Identity,
        *,
        timeout_s: float,
        fds: Sequence[int] = (),
        disk: bool = False,
    ) -> "subprocess.CompletedProcess[str]":
        """Runs the toolkit's interpreter with these words. Blocks, at most `timeout_s`, after which
        subprocess.TimeoutExpired is raised; nothing of it runs on then. `disk`: `disk` is a file system of
        DISK_MB, which every user may write to."""
        key = cgroups.state_key(self.state_dir)
        hierarchies = cgroups.find_hierarchies()
        groups = cgroups.Groups(cgroups.plan_groups(hierarchies, key, f"guard-{os.getpid()}-{next(_COUNT)}"))
        asked = Asked(cpu=CPUS, memory_mb=MEMORY_MB, pids=PIDS)
        names = frozenset[LimitName]({"cpu", "memory", "pids", "disk"})
        try:
            groups.create(settle(asked, names))
            return subprocess.run(
                self._command(words, identity, [str(path) for path in groups.paths], disk=disk),
                capture_output=True, text=True, check=False, timeout=timeout_s, pass_fds=tuple(fds),
                cwd=self.place, stdin=subprocess.DEVNULL,
            )  # fmt: skip
        finally:
            groups.remove()
            cgroups.remove_empty_parents([each.root for each in hierarchies], key)

    def _command(
        self, words: Sequence[str], identity: Identity, groups: Sequence[str], *, disk: bool
    ) -> list[str]:
        if os.geteuid() != 0:
            limited = ("sh", "-c", f'ulimit -f {FILE_BLOCKS}; exec "$@"', "sh")
            spaces = _IN_NAMESPACES if identity == "namespace" else ()
            return [*limited, *spaces, *_PARENT, str(self.toolkit / "bin" / "python3"), *words]
        enter = _ENTER.format(files=OPEN_FILES, room=ROOM_MB, inodes=ROOM_FILES, disk_mb=DISK_MB,
            kernels=_OF_THE_KERNEL,
        )  # fmt: skip
        for name in ("toolkit", "room", "disk"):
            (self.place / name).mkdir(exist_ok=True)
        given = (str(self.place), str(self.toolkit.resolve()), " ".join(groups), "disk" if disk else "")
        return [
            *("sh", "-c", enter, "sh", *given),
            *(() if identity == "root" else _AS_USER),
            *(_IN_NAMESPACES if identity == "namespace" else ()),
            *(*_PARENT, str(self.place / "toolkit" / "bin" / "python3"), *words),
        ]


def missing(identity: Identity, *, disk: bool = False) -> str:
    """Why nothing can be tried outside as this, empty where it can."""
    if (identity == "root" or disk) and os.geteuid() != 0:
        return "needs root"
    programs = ("unshare", "setpriv", "mount", "ip", *(("mke2fs",) if disk else ()))
    lacking = [name for name in programs if shutil.which(name) is None]
    if disk and not _LOOPS.exists():
        lacking.append(str(_LOOPS))
    return f"{' and '.join(lacking)} not there" if lacking else ""
