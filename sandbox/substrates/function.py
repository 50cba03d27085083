"""`function`: bubblewrap, for many short-lived sandboxes. Works for an ordinary user."""

import shutil

from sandbox.covers import Covers
from sandbox.errors import UnsupportedError
from sandbox.policy.seccomp import filter_program, this_machine
from sandbox.substrates.base import (
    FILTER_FD,
    ROOT_AT,
    SHM_BYTES,
    TERMINALS,
    TERMINALS_AT,
    Blueprint,
    LaunchPlan,
    init_command,
    launch_options,
)

# Our own flags instead of --unshare-all, which quietly goes without a user or cgroup namespace. There is no
# --die-with-parent: it follows the thread that started the sandbox, not the process. Init ends when the
# control socket closes, which holds for every way in which an owner can go.
# The network namespace is launch's.
_NAMESPACES = ("user", "ipc", "pid", "uts", "cgroup")


class FunctionSubstrate:
    """One user id inside (0), no capability, no further user namespace, all namespaces its own."""

    def check(self, *, privileged: bool, runtime: str | None) -> None:
        """Raises UnsupportedError without bubblewrap, or on a processor without a table of system calls."""
        del privileged
        if runtime is not None:
            raise UnsupportedError(f"runtime={runtime!r} is for substrate 'container'", hint="leave it out")
        this_machine()
        _bubblewrap()

    def plan(self, blueprint: Blueprint) -> LaunchPlan:
        """Launch mounts the root, becomes the sandbox's uid, and runs bubblewrap as that."""
        options = [*launch_options(blueprint), "--terminals", str(TERMINALS)]
        if blueprint.privileged or blueprint.is_adopted:
            options.append("--drop")
        filtered = "seccomp" in blueprint.protections
        isolation = _isolation(filtered, blueprint.hostname, blueprint.covers)
        program = (*isolation, "--", *init_command(blueprint))
        return LaunchPlan(
            tuple(options), program, filter_program=filter_program(this_machine()) if filtered else None,
            born_in=blueprint.born_in, layer=blueprint.limits.layer,
        )  # fmt: skip


def _isolation(filtered: bool, hostname: str, covers: Covers) -> list[str]:
    words = [_bubblewrap(), *(f"--unshare-{name}" for name in _NAMESPACES)]
    words += ["--disable-userns", "--as-pid-1", "--clearenv", "--cap-drop", "ALL"]
    words += ["--seccomp", str(FILTER_FD)] if filtered else []
    words += ["--uid", "0", "--gid", "0", "--hostname", hostname]
    words += ["--bind", ROOT_AT, "/", "--proc", "/proc", "--dev", "/dev"]
    words += ["--dev-bind", TERMINALS_AT, "/dev/pts"]
    for device in covers.devices:
        words += ["--dev-bind", "/dev/null", "/dev/pts/ptmx" if device == "ptmx" else f"/dev/{device}"]
    # /dev is a tmpfs without a size: only its shm is for writing, and that has one.
    words += ["--perms", "1777", "--size", str(SHM_BYTES), "--tmpfs", "/dev/shm", "--remount-ro", "/dev"]
    return [*words, *_covered(covers), "--chdir", "/"]


def _covered(covers: Covers) -> list[str]:
    """Files show the null device on a mount without devices, so they cannot be opened. What is below /proc
    needs no mount to be read-only: Landlock lets nothing write there."""
    words: list[str] = []
    for place in covers.read_only:
        words += [] if place.startswith("/proc") else ["--ro-bind", f"{ROOT_AT}{place}", place]
    for place in covers.masked_directories:
        words += ["--perms", "0555", "--size", "4096", "--tmpfs", place, "--remount-ro", place]
    for place in covers.masked_files:
        words += ["--ro-bind", "/dev/null", place]
    return words


def _bubblewrap() -> str:
    found = shutil.which("bwrap")
    if found is None:
        words, hint = "substrate 'function' needs bubblewrap", "apt-get install bubblewrap"
        raise UnsupportedError(words, capability="substrate function", hint=hint)
    return found
