"""What this host can do for sandboxes, found by trying each thing rather than by looking for it."""

import os
import shutil
import socket
import subprocess
import tempfile
from collections.abc import Generator, Sequence
from contextlib import contextmanager
from pathlib import Path

from protocol.errors import DockyardError
from protocol.ids import new_id
from sandbox import cgroups
from sandbox.capability import Capability, Status, finding
from sandbox.cpu_bound import cpu_bound
from sandbox.doctor_egress import probe_egress, probe_routing
from sandbox.errors import UnsupportedError
from sandbox.guard.node import missing as missing_guard
from sandbox.guard.node import shared_guard
from sandbox.helper import asked_once, hierarchies_of, shared_helper
from sandbox.layers.choice import choose
from sandbox.limits import Asked, LimitName, Limits, settle
from sandbox.ownership import Ownership
from sandbox.places import INIT_BINARY, chosen_state_dir, default_toolkit
from sandbox.policy import apparmor, apparmor_profiles, landlock
from sandbox.programs import run_program
from sandbox.refusals import Attempt
from sandbox.sandbox import Sandbox
from sandbox.substrates import SUBSTRATES, SubstrateName
from sandbox.substrates.container import RUNTIMES
from sandbox.undisturbed import undisturbed_call

_PATIENCE_S = 20.0
_WITH_ROOT = "run as root, or have root run `dockyard node helper` for this user"
_MAKES: frozenset[Status] = frozenset({"enforced", "degraded"})
_OTHER_RUNTIMES = ("youki", "runsc", "kata-runtime")


@undisturbed_call
def probe(
    *, state_dir: Path | str | None = None, toolkit: Path | str | None = None
) -> tuple[Capability, ...]:
    """Tries everything; about half a second. Leaves nothing behind. What fails is a finding; only a state
    directory that is no path (InvalidArgument), or another user's (AuthError), is raised.

    enforced: seen to work. degraded: works, with less. missing: not there, or refused by this host.
    unverified: could not be tried, since something that it needs is missing.
    """
    state = chosen_state_dir(state_dir)
    tools = default_toolkit(state) if toolkit is None else Path(toolkit).absolute()
    needed = (_static_init(), _toolkit(tools))
    lacking = [each.name for each in needed if each.status != "enforced"]
    with asked_once(state):  # a silent helper would be waited for at each
        return (
            *needed,
            *(() if os.geteuid() == 0 else (_helper(state),)),
            _user_namespaces(),
            _overlay(),
            _disk_layer(state),
            _landlock(),
            _apparmor(),
            _guard(state),
            _bubblewrap(),
            *(_oci_runtime(name) for name in RUNTIMES),
            *(_other_runtime(name) for name in _OTHER_RUNTIMES if shutil.which(name) is not None),
            *(_cgroup(name, state) for name in cgroups.CONTROLLERS),
            _socket_memory(state),
            *(_substrate(name, state, tools, lacking) for name in SUBSTRATES),
            _pausing(state, tools, lacking),
            probe_egress(state, tools, lacking),
            probe_routing(),
        )


@finding("static init")
def _static_init() -> Capability:
    cost, fix = "no sandbox can start", "make setup, or python -m sandbox.native.build"
    if not INIT_BINARY.is_file():
        return Capability("static init", "missing", f"{INIT_BINARY} is not built", cost, fix)
    done = _run([str(INIT_BINARY)])
    if done is None or done.returncode != 125:
        return Capability("static init", "missing", f"{INIT_BINARY} does not run", cost, fix)
    return Capability("static init", "enforced", f"{INIT_BINARY.stat().st_size >> 10} KiB, runs")


@finding("toolkit")
def _toolkit(toolkit: Path) -> Capability:
    cost, fix = "no sandbox can start", f"make setup, or python -m sandbox.toolkit --into {toolkit}"
    done = _run([str(toolkit / "bin" / "python3"), "-I", "-c", "import sys, pytest; print(sys.version)"])
    if done is None or done.returncode != 0:
        return Capability("toolkit", "missing", f"no working interpreter with pytest at {toolkit}", cost, fix)
    return Capability("toolkit", "enforced", f"Python {done.stdout.split()[0]} with pytest at {toolkit}")


@finding("helper")
def _helper(state: Path) -> Capability:
    """Asks it for a state's cgroups. Root needs none."""
    cost = "no cgroups, no ids of their own and no network for this user's sandboxes"
    fix = f"as root: dockyard node helper --user {os.geteuid()}"
    try:
        found = shared_helper(state)
        detail = "" if found is None else f"it handed over {len(found.hierarchies())} trees of cgroups"
    except DockyardError as error:
        return Capability("helper", "missing", error.message, cost, fix)
    if not detail:
        return Capability("helper", "missing", "root runs none for this user", cost, fix)
    return Capability("helper", "enforced", detail)


def _hierarchies(state: Path) -> tuple[cgroups.Hierarchy, ...]:
    """Those in which this process may make groups; none where the helper refuses, which is said elsewhere."""
    try:
        return hierarchies_of(state)
    except DockyardError:
        return ()


@finding("user namespaces")
def _user_namespaces() -> Capability:
    done = _run(["unshare", "--user", "--map-root-user", "true"])
    if done is not None and done.returncode == 0:
        return Capability("user namespaces", "enforced", "root in a sandbox is an ordinary user outside")
    return Capability(
        "user namespaces",
        "missing",
        _reason(done),
        "no sandbox can start",
        "sysctl user.max_user_namespaces=15000, and kernel.unprivileged_userns_clone=1 where it exists",
    )


@finding("overlay")
def _overlay() -> Capability:
    """Has launch mount a root as it does for a sandbox, and become `true`."""
    cost, fix = (
        "no sandbox can start",
        "load the overlay module, or use Linux 5.11 or later for ordinary users",
    )
    with tempfile.TemporaryDirectory() as place, socket.socket(socket.AF_UNIX) as control:
        (Path(place) / ".dockyard" / "empty").mkdir(parents=True)
        words = [str(INIT_BINARY), "launch", "--control", str(control.fileno()), "--skeleton", place]
        words += ["--layer-bytes", "1048576", "--layer-inodes", "64"]
        words += [] if os.geteuid() == 0 else ["--userns"]
        done = _run([*words, "--", shutil.which("true") or "/bin/true"], fds=(control.fileno(),))
    if done is not None and done.returncode == 0:
        return Capability("overlay", "enforced", "writable layer on a tmpfs, bounded in bytes and inodes")
    return Capability("overlay", "missing", _reason(done), cost, fix)


@finding("layer on disk")
def _disk_layer(state: Path) -> Capability:
    """Makes one, and fills it where that shows whether it has a limit."""
    title = "layer on disk"
    try:
        kind = choose("disk", state)
    except UnsupportedError as error:
        cost = "what sandboxes write lies in memory and counts as theirs; layer='disk' is refused"
        fix = "run as root where loop devices are, or on a file system mounted with prjquota"
        return Capability(title, "missing", error.message, cost, fix)
    what = {
        "quota": "a directory under a project quota; a small one was filled until it was full",
        "image": "an ext4 in a file on a loop device; one was made and mounted",
    }
    return Capability(title, "enforced", what[kind])


@finding("landlock")
def _landlock() -> Capability:
    """Has init confine itself to a directory, as the first process of each sandbox does."""
    fix = "use Linux 5.13 or later, with `landlock` in the `lsm=` list of its command line"
    control, other = socket.socketpair()
    with control, other, tempfile.TemporaryDirectory() as place:
        other.shutdown(socket.SHUT_WR)  # upon which init ends
        done = _run(
            [str(INIT_BINARY), "init", str(control.fileno()), "doctor", "0", "0", "-", place],
            fds=(control.fileno(),),
        )
    if done is None or done.returncode != 0:
        return Capability("landlock", "missing", _reason(done), "no sandbox can start", fix)
    detail = f"version {landlock.abi()} of its interface; a process confined itself"
    if landlock.abi() < landlock.COMPLETE_ABI:
        cost = "files outside the writable directories can be cut short, if their modes allow it"
        return Capability("landlock", "degraded", detail, cost, "use Linux 6.10 or later")
    return Capability("landlock", "enforced", detail)


@finding("apparmor")
def _apparmor() -> Capability:
    """Loads a profile and removes it."""
    cost = "policies with protected or hidden places are refused, and one mechanism fewer holds the others"
    fix = "run as root on a kernel with `apparmor` in its `lsm=` list, apparmor_parser installed"
    if not apparmor_profiles.is_available():
        return Capability("apparmor", "missing", "not in this kernel, or not this user's", cost, fix)
    with tempfile.TemporaryDirectory() as place:
        profiles = apparmor_profiles.LoadedProfiles(Path(place), "doctor")
        try:
            profiles.acquire(apparmor.profile("doctor"), "doctor")
            profiles.release("doctor")
        except DockyardError as error:
            return Capability("apparmor", "missing", error.message, cost, fix)
    return Capability("apparmor", "enforced", "a profile was loaded and removed")


@finding("guard")
def _guard(state: Path) -> Capability:
    """Has a program in a sealed cgroup signal this process, which is outside of it."""
    cost = "one mechanism fewer; nothing else refuses what has the kernel load modules"
    fix = "boot with `bpf` in the kernel's `lsm=` list; apt-get install clang libbpf-dev, and set up again"
    unified = next((each for each in cgroups.find_hierarchies() if each.version == 2), None)
    if (guard := shared_guard()) is None or unified is None:
        reason = missing_guard() or "no cgroups of version 2 that this process may make groups of"
        return Capability("guard", "missing", reason, cost, fix)
    try:
        with _owned_groups(state, [unified]) as (groups, _):
            (group,) = groups.paths
            sealed = guard.seal(group)
            try:
                _run(["sh", "-c", f"echo $$ > {group}/cgroup.procs && kill -0 {os.getpid()}"])
                refused = guard.refused(sealed).get(Attempt("signal"), 0)
            finally:
                guard.forget(sealed)
    except (DockyardError, OSError) as error:
        return Capability("guard", "missing", str(error), cost, fix)
    if not refused:
        return Capability("guard", "missing", "the kernel did not ask it", cost, fix)
    return Capability("guard", "enforced", "a signal out of a sealed cgroup was refused by the kernel")


@finding("bubblewrap")
def _bubblewrap() -> Capability:
    done = _run(["bwrap", "--unshare-user", "--unshare-pid", "--ro-bind", "/", "/", "true"])
    if done is not None and done.returncode == 0:
        return Capability("bubblewrap", "enforced", "runs with a user namespace")
    return Capability(
        "bubblewrap",
        "missing",
        _reason(done),
        "no substrate 'function', the one with the fewest needs",
        "apt-get install bubblewrap",
    )


@finding("{}")
def _oci_runtime(name: str) -> Capability:
    done = _run([name, "--version"])
    if done is not None and done.returncode == 0:
        return Capability(name, "enforced", done.stdout.splitlines()[0])
    other = "runc, which starts slower" if name == "crun" else "crun"
    return Capability(
        name,
        "missing",
        _reason(done),
        f"'container' sandboxes run by {other}, if that is there",
        f"apt-get install {name}",
    )


def _other_runtime(name: str) -> Capability:
    return Capability(
        name,
        "unverified",
        f"is there, and runtime={name!r} is taken; no test of this project has run with it",
        "what is said of substrate 'container' is not known to hold",
        "leave `runtime` out, or try the tests of tests/attacks with it",
    )


@finding("cgroup {}")
def _cgroup(name: cgroups.Controller, state: Path) -> Capability:
    """Makes a group with a limit and reads the limit back."""
    cost = {
        "memory": "one sandbox can use up the host's memory",
        "pids": "fork bombs are bounded by RLIMIT_NPROC, which leaves no count of refusals",
        "cpu": "one sandbox can take every core",
    }[name]
    status: Status = "degraded" if name == "pids" else "missing"
    fix = _WITH_ROOT
    hierarchy = next((each for each in _hierarchies(state) if name in each.controllers), None)
    if hierarchy is None:
        return Capability(f"cgroup {name}", status, "no writable hierarchy has this controller", cost, fix)
    try:
        with _owned_groups(state, [hierarchy]) as (groups, limits):
            (group,) = groups.paths
            settings = cgroups.settings(hierarchy, limits)
            wrong = [file for file, value in settings if not _holds(group / file, value)]
    except DockyardError as error:
        return Capability(f"cgroup {name}", status, str(error), cost, fix)
    if wrong:
        return Capability(f"cgroup {name}", status, f"the kernel did not take {', '.join(wrong)}", cost, fix)
    return Capability(f"cgroup {name}", "enforced", f"version {hierarchy.version} at {hierarchy.root}")


@contextmanager
def _owned_groups(
    state: Path, hierarchies: Sequence[cgroups.Hierarchy]
) -> Generator[tuple[cgroups.Groups, Limits]]:
    """Groups with the default limits, in the journal as a sandbox's are: a sweep beside this would take them
    for leftovers. Raises CapacityError, OSError."""
    name, key = new_id("sbx"), cgroups.state_key(state)
    everything = frozenset[LimitName]({"cpu", "memory", "pids", "disk"})
    limits = settle(Asked(), everything, most_cpus=cpu_bound(hierarchies, key))
    planned = cgroups.plan_groups(hierarchies, key, name)
    owned = Ownership(name, state_dir=state, substrate="doctor", groups=planned, all_hierarchies=False)
    try:
        owned.create(limits)
        owned.limit(limits)
        yield owned.groups, limits
    finally:
        owned.release(None)


@finding("socket memory")
def _socket_memory(state: Path) -> Capability:
    """Never whole: the kernel counts buffers of data, but not every queue of a socket."""
    title, hierarchies = "socket memory", _hierarchies(state)
    cost = "what a sandbox sends and nobody reads counts as nobody's memory"
    if "memory" not in cgroups.enforceable(hierarchies):
        fix = _WITH_ROOT
        return Capability(title, "missing", "no writable hierarchy counts memory", cost, fix)
    if cgroups.gaps(hierarchies):
        detail = "version 1 without memory.kmem.tcp.limit_in_bytes"
        return Capability(title, "missing", detail, cost, "use version 2, which counts it")
    queue_bytes = int(Path("/proc/sys/net/core/rmem_default").read_text())
    return Capability(
        title,
        "degraded",
        "data of TCP, UDP and unix sockets is bounded; errors and netlink's answers are not counted",
        f"a hostile sandbox may hold up to {queue_bytes >> 10} KiB a socket beyond its limit",
        "lower pids, a thousand sockets each, or net.core.rmem_default",
    )


def _holds(path: Path, value: str) -> bool:
    return not path.exists() or path.read_text().strip() == value


@finding("substrate {}")
def _substrate(name: SubstrateName, state: Path, toolkit: Path, lacking: Sequence[str]) -> Capability:
    """Makes a sandbox and runs a command in it."""
    title, cost = f"substrate {name}", f"no sandboxes with substrate='{name}'"
    if lacking:
        return Capability(title, "unverified", f"needs {' and '.join(lacking)}", cost)
    try:
        with Sandbox.create(substrate=name, state_dir=state, toolkit=toolkit) as sandbox:
            result = sandbox.commands.run(["/usr/bin/true"], timeout_s=_PATIENCE_S)
            degraded = "; ".join(sandbox.info.limits.degraded)
    except DockyardError as error:
        return Capability(title, "missing", error.message, cost, error.hint)
    if not result.ok:
        return Capability(title, "missing", f"a command ended with {result.reason}", cost)
    if degraded:
        return Capability(title, "degraded", degraded, "", _WITH_ROOT)
    return Capability(title, "enforced", "a sandbox was made, ran a command and was removed")


@finding("pause and snapshots")
def _pausing(state: Path, toolkit: Path, lacking: Sequence[str]) -> Capability:
    """Pauses a sandbox, and keeps what it has written."""
    title, cost = "pause and snapshots", "pause, snapshot and fork_fs are refused"
    if lacking:
        return Capability(title, "unverified", f"needs {' and '.join(lacking)}", cost)
    try:
        with Sandbox.create(state_dir=state, toolkit=toolkit) as sandbox:
            sandbox.pause()
            sandbox.resume()
            sandbox.snapshot().delete()
    except DockyardError as error:
        return Capability(title, "missing", error.message, cost, error.hint)
    return Capability(title, "enforced", "a sandbox was stopped and went on, what it had written was kept")


def can_make_sandboxes(found: Sequence[Capability]) -> bool:
    """Of what `probe` has found: whether any substrate makes a sandbox."""
    return any(each.name.startswith("substrate ") and each.status in _MAKES for each in found)


def _run(words: Sequence[str], fds: Sequence[int] = ()) -> "subprocess.CompletedProcess[str] | None":
    """None when there is no such program, or it hangs."""
    try:
        return run_program(words, fds=fds, patience_s=_PATIENCE_S)
    except (FileNotFoundError, PermissionError, TimeoutError):
        return None


def _reason(done: "subprocess.CompletedProcess[str] | None") -> str:
    if done is None:
        return "not there"
    return (done.stderr.strip().splitlines() or [f"exit code {done.returncode}"])[-1]
