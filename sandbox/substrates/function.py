"""`function`: bubblewrap, for many short-lived sandboxes. Works for an ordinary user."""

import shutil

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
        if blueprint.privileged:
            options.append("--drop")
        filtered = "seccomp" in blueprint.protections
        program = (*_isolation(filtered, blueprint.hostname), "--", *init_command(blueprint))
        return LaunchPlan(
            tuple(options), program, filter_program=filter_program(this_machine()) if filtered else None
        )


def _isolation(filtered: bool, hostname: str) -> list[str]:
    words = [_bubblewrap(), *(f"--unshare-{name}" for name in _NAMESPACES)]
    words += ["--disable-userns", "--as-pid-1", "--clearenv", "--cap-drop", "ALL"]
    words += ["--seccomp", str(FILTER_FD)] if filtered else []
    words += ["--uid", "0", "--gid", "0", "--hostname", hostname]
    words += ["--bind", ROOT_AT, "/", "--proc", "/proc", "--dev", "/dev"]
    words += ["--dev-bind", TERMINALS_AT, "/dev/pts"]
    # /dev is a tmpfs without a size: only its shm is for writing, and that has one.
    words += ["--perms", "1777", "--size", str(SHM_BYTES), "--tmpfs", "/dev/shm", "--remount-ro", "/dev"]
    return [*words, "--chdir", "/"]


def _bubblewrap() -> str:
    found = shutil.which("bwrap")
    if found is None:
        raise UnsupportedError("substrate 'function' needs bubblewrap", hint="apt-get install bubblewrap")
    return found
