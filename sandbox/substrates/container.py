"""`container`: an OCI runtime. A user namespace with 65,536 ids, and seccomp."""

import json
import os
import shutil
from functools import lru_cache
from pathlib import Path

from sandbox.errors import UnsupportedError
from sandbox.policy.seccomp import this_machine
from sandbox.substrates.base import (
    BUNDLE_AT,
    DETACHED,
    Blueprint,
    LaunchPlan,
    init_command,
    launch_options,
)
from sandbox.substrates.oci import oci_config

RUNTIMES = ("crun", "runc")  # in order of preference: crun starts in a third of the time
_CGROUPS_AT = Path("/sys/fs/cgroup")
_STATE_AT = "/tmp/oci"  # the runtime's own state: in launch's mount namespace, gone with it


class ContainerSubstrate:
    """No capability, no new privileges, masked and read-only /proc, all namespaces its own."""

    def check(self, *, privileged: bool, runtime: str | None) -> None:
        """Raises UnsupportedError without an OCI runtime, or on a processor without a table of system
        calls."""
        del privileged
        this_machine()
        find_runtime(runtime)

    def plan(self, blueprint: Blueprint) -> LaunchPlan:
        """Launch mounts the root and becomes the runtime, which goes once the sandbox runs."""
        runtime = find_runtime(blueprint.runtime)
        name = Path(runtime).name
        options = [*launch_options(blueprint), "--ids", str(blueprint.num_ids), DETACHED]
        program = [runtime, "--root", _STATE_AT]
        if name == "crun":
            # Launch has joined the groups; crun is to leave cgroups alone, and refuses to where it sees both
            # versions, so it does not get to see the second; in a user namespace none.
            program += ["--cgroup-manager=disabled", "run"]
            if (hidden := blueprint.hide_unified if blueprint.privileged else _CGROUPS_AT) is not None:
                options += ["--hide", str(hidden)]
        else:
            program += ["run", "--detach"]
        if name in RUNTIMES:  # launch has joined a keyring without a name; the kernel looks a name up in all
            program.append("--no-new-keyring")
        program += ["--preserve-fds", "1", "--bundle", BUNDLE_AT, blueprint.id]
        cgroup = None if name == "crun" else _own_cgroup(blueprint)
        config = oci_config(
            init_command(blueprint), owner_uid=blueprint.owner_uid, num_ids=blueprint.num_ids, cgroup=cgroup,
            filtered="seccomp" in blueprint.protections, as_program=name == "crun",
            hostname=blueprint.hostname, covers=blueprint.covers,
        )  # fmt: skip
        is_crun = name == "crun"
        everywhere = not is_crun and blueprint.privileged
        return LaunchPlan(
            tuple(options), tuple(program), json.dumps(config), all_hierarchies=everywhere, is_sealed=is_crun,
            born_in=blueprint.born_in, layer=blueprint.limits.layer,
        )  # fmt: skip


def find_runtime(name: str | None) -> str:
    """Path of the runtime of that name, or of the first of RUNTIMES. UnsupportedError when not there."""
    return _find_runtime(name, os.environ.get("PATH"))


@lru_cache(maxsize=16)
def _find_runtime(name: str | None, path: str | None) -> str:
    """Kept for as long as PATH stays: twice a create, it would be a look into each of its directories."""
    for candidate in RUNTIMES if name is None else (name,):
        if (found := shutil.which(candidate, path=path)) is not None:
            return found
    if name is None:
        words, hint = f"substrate 'container' needs {' or '.join(RUNTIMES)}", "apt-get install crun"
    else:
        words = f"runtime={name!r} is no program of this host's PATH"
        hint = f"install it, or leave it out for {' or '.join(RUNTIMES)}"
    raise UnsupportedError(words, capability="substrate container", hint=hint)


def is_unverified(runtime: str | None) -> bool:
    """Whether it is none of those that the tests run with; it is taken all the same."""
    return runtime is not None and Path(runtime).name not in RUNTIMES


def _own_cgroup(blueprint: Blueprint) -> str | None:
    """Below the sandbox's group, whose limits hold for all that is in it. None without privilege: then the
    runtime makes some where it may, below those that it is in, and goes without where it may not."""
    groups = (*blueprint.cgroups, *((blueprint.born_in,) if blueprint.born_in is not None else ()))
    if not groups or not blueprint.privileged:
        return None
    state, sandbox_id = groups[0].parts[-2:]
    return f"/dockyard/{state}/{sandbox_id}/runtime"
