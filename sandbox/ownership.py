"""What a sandbox has on the host: entered in the journal before it is made, and given back in full."""

import subprocess
from pathlib import Path

from sandbox import cgroups
from sandbox.journal import Journal, Record
from sandbox.launcher import Launched
from sandbox.limits import Limits
from sandbox.processes import boot_id, find_process, this_process

_END_PATIENCE_S = 5.0


class Ownership:
    """One sandbox's cgroups and journal entry. Its owner calls `create`, `note_processes` and `release`, in
    this order, from any one thread at a time; `release` is right after any of them."""

    def __init__(
        self,
        sandbox_id: str,
        *,
        state_dir: Path,
        substrate: str,
        groups: tuple[cgroups.Group, ...],
        all_hierarchies: bool,
    ) -> None:
        self.groups = cgroups.Groups(groups)
        self._journal = Journal(state_dir)
        self._state = cgroups.state_key(state_dir)
        self._roots = tuple(group.hierarchy.root for group in groups)
        roots = cgroups.mount_roots() if all_hierarchies else ()
        by_runtime = {root / cgroups.TOP / self._state / sandbox_id for root in roots}
        self._by_runtime = sorted(by_runtime - set(self.groups.paths))
        self._record = Record(
            id=sandbox_id,
            owner=this_process(),
            boot=boot_id(),
            substrate=substrate,
            cgroups=tuple(str(path) for path in (*self.groups.paths, *self._by_runtime)),
        )

    def create(self, limits: Limits) -> None:
        """Makes the cgroups. Raises CapacityError."""
        self._journal.write(self._record)
        self.groups.create(limits)

    def note_processes(self, launched: Launched) -> None:
        """Enters the processes, now that they run."""
        keys = (find_process(launched.process.pid), find_process(launched.init_pid))
        self._journal.write(self._record.with_processes(tuple(key for key in keys if key is not None)))

    def release(self, process: "subprocess.Popen[bytes] | None") -> None:
        """Waits for the launcher, removes cgroups and entry. Blocks for milliseconds; idempotent.
        CapacityError when the kernel does not let go; the entry then stays for a later sweep."""
        if process is not None:
            try:
                process.wait(_END_PATIENCE_S)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
        self.groups.remove()
        for path in self._by_runtime:
            cgroups.remove_group(path)
            cgroups.remove_empty_parents([path.parents[2]], self._state)
        self._journal.remove(self._record.id)
        cgroups.remove_empty_parents(self._roots, self._state)
