"""The outer guard of positive controls: probes run as processes of the host, and may hurt nobody there.

A guarded probe has a cgroup of its own (processes, memory, CPU time), a mount namespace of its own,
a limit on
file sizes and on its time, and in the end whatever is left of it is killed. It is an ordinary user's unless
the door in question is root's.
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
FILE_BLOCKS = 256 << 11  # of 512 bytes: 256 MiB
OPEN_FILES = 4096
# Joins the groups, then takes a mount namespace in which the toolkit lies where every user may go.
_ENTER = """
set -e
place=$1 toolkit=$2 groups=$3; shift 3
for group in $groups; do echo $$ > "$group/cgroup.procs"; done
ulimit -f {blocks}; ulimit -n {files} 2>/dev/null || true
exec unshare --mount --propagation private sh -c '
  mount --bind "$1" "$2/toolkit"; shift 2; exec "$@"' sh "$toolkit" "$place" "$@"
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

    def run(
        self, words: Sequence[str], identity: Identity, *, timeout_s: float, fds: Sequence[int] = ()
    ) -> "subprocess.CompletedProcess[str]":
        """Runs the toolkit's interpreter with these words. Blocks, at most `timeout_s`, after which
        subprocess.TimeoutExpired is raised; nothing of it runs on then."""
        key = cgroups.state_key(self.state_dir)
        hierarchies = cgroups.find_hierarchies()
        groups = cgroups.Groups(cgroups.plan_groups(hierarchies, key, f"guard-{os.getpid()}-{next(_COUNT)}"))
        asked = Asked(cpu=CPUS, memory_mb=MEMORY_MB, pids=PIDS)
        names = frozenset[LimitName]({"cpu", "memory", "pids", "disk"})
        try:
            groups.create(settle(asked, names))
            return subprocess.run(
                self._command(words, identity, [str(path) for path in groups.paths]),
                capture_output=True, text=True, check=False, timeout=timeout_s, pass_fds=tuple(fds),
                cwd=self.place, stdin=subprocess.DEVNULL,
            )  # fmt: skip
        finally:
            groups.remove()
            cgroups.remove_empty_parents([each.root for each in hierarchies], key)

    def _command(self, words: Sequence[str], identity: Identity, groups: Sequence[str]) -> list[str]:
        if os.geteuid() != 0:
            spaces = _IN_NAMESPACES if identity == "namespace" else ()
            return [*spaces, *_PARENT, str(self.toolkit / "bin" / "python3"), *words]
        enter = _ENTER.format(blocks=FILE_BLOCKS, files=OPEN_FILES)
        (self.place / "toolkit").mkdir(exist_ok=True)
        return [
            *("sh", "-c", enter, "sh", str(self.place), str(self.toolkit.resolve()), " ".join(groups)),
            *(() if identity == "root" else _AS_USER),
            *(_IN_NAMESPACES if identity == "namespace" else ()),
            *(*_PARENT, str(self.place / "toolkit" / "bin" / "python3"), *words),
        ]


def missing(identity: Identity) -> str:
    """Why nothing can be tried outside as this, empty where it can."""
    if identity == "root" and os.geteuid() != 0:
        return "needs root"
    lacking = [name for name in ("unshare", "setpriv", "mount", "ip") if shutil.which(name) is None]
    return f"{' and '.join(lacking)} not there" if lacking else ""
