"""What an administrator lets a user have in all: the helper's own arguments, none of the user's requests."""

from contextlib import suppress
from pathlib import Path

from sandbox.privileged.groups import write

_BOUNDS = {  # of both versions
    "memory": (
        *(("memory.max", "{}"), ("memory.swap.max", "0")),
        *(("memory.limit_in_bytes", "{}"), ("memory.memsw.limit_in_bytes", "{}")),
    ),
    "pids": (("pids.max", "{}"),),
    "cpu": (("cpu.max", "{} 100000"), ("cpu.cfs_quota_us", "{}")),
}


def bound(places: list[Path], bounds: dict[str, str]) -> None:
    """What all below a state's folders may take together: bytes of memory, processes, microseconds of the
    processor in each tenth of a second. These files stay root's. OSError where no tree counts one of them."""
    for kind, value in bounds.items():
        num_written = 0
        for path, form in ((place / name, form) for place in places for name, form in _BOUNDS[kind]):
            with suppress(FileNotFoundError):
                write(path, form.format(value))
                num_written += 1
        if not num_written:
            raise OSError(f"no tree of cgroups counts {kind}")
