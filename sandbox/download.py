"""A directory's content, as it has come out of a sandbox."""

from dataclasses import dataclass
from pathlib import Path

from sandbox.host_tree import write_tree


@dataclass(frozen=True, slots=True)
class Download:
    """A directory's content. Paths are relative to it, with `/` between their parts."""

    files: dict[str, bytes]
    links: dict[str, str]  # name to target, never followed
    directories: tuple[str, ...]
    skipped: tuple[str, ...]  # FIFOs, sockets, devices

    def write_to(self, host_dir: Path) -> None:
        """Makes `host_dir`, which must not exist yet or be empty, and writes files and directories into it.
        Links and what was skipped are left out. InvalidArgument when it holds something already or cannot
        be written to, CapacityError when the disk is full."""
        write_tree(host_dir, self.directories, self.files)
