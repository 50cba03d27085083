"""One sandbox, from `create` to `kill`."""

import os
import secrets
from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType, TracebackType
from typing import TYPE_CHECKING, Literal, Self

from protocol.clock import Clock, SystemClock
from protocol.ids import new_id
from sandbox import cgroups
from sandbox.channel import Channel
from sandbox.commands import Commands
from sandbox.egress.service import Egress, shared_egress
from sandbox.errors import InvalidArgument, SandboxError, UnsupportedError, translated
from sandbox.files import Files
from sandbox.images import Image, prepare_image
from sandbox.launcher import Launched, launch
from sandbox.life import Life
from sandbox.limits import Asked, LimitName, Limits, settle
from sandbox.ownership import Ownership
from sandbox.places import INIT_BINARY, default_state_dir, default_toolkit
from sandbox.policy import Network, Policy, Protection, apparmor, apparmor_profiles, landlock
from sandbox.policy.apparmor import Profile
from sandbox.refusals import denials_since
from sandbox.results import Denial
from sandbox.sessions import Sessions
from sandbox.substrates import find_substrate
from sandbox.substrates.base import UIDS_A_SANDBOX, Blueprint, LaunchPlan

if TYPE_CHECKING:
    from sandbox.doctor import Capability

# Uids that no distribution hands out to people or services, and that nspawn uses for the same purpose.
_FIRST_UID, _LAST_UID = 0x00080000, 0x6FFF0000
_LIMITED_WITHOUT_CGROUPS: frozenset[LimitName] = frozenset({"pids", "disk"})  # by rlimit, by tmpfs


@dataclass(frozen=True, slots=True)
class SandboxInfo:
    """What a sandbox really is: effective values, after defaults and what the host can do."""

    id: str
    image: str
    substrate: str
    limits: Limits
    policy: Policy
    labels: Mapping[str, str]
    profile: str | None = None  # of AppArmor
    lacking: tuple[Protection, ...] = ()  # what this host does not have of what sandboxes get elsewhere


class Sandbox:
    """A sandbox of this process. Thread-safe. Made by `create`; ends with `kill`, the end of the `with`
    block, its lifetime, its idle time, or its owner's process, whichever is first."""

    commands: Commands
    files: Files
    sessions: Sessions

    def __init__(
        self, info: SandboxInfo, image: Image, ownership: Ownership, launched: Launched, clock: Clock
    ) -> None:
        """For `create`; takes over the ownership and what was launched."""
        self._info = info
        self._ownership = ownership
        self._process = launched.process
        self._release_error: SandboxError | None = None
        self._life = Life(info.id, launched.init_pid, info.limits, ownership, clock)
        with ExitStack() as on_failure:
            on_failure.callback(self._life.close)
            self._channel = Channel(launched.control, clock, name=info.id)
            self._life.wake = self._channel.wake
            self._channel.start(self._life, self._release)
            on_failure.pop_all()
        self.commands = Commands(
            self._channel, self._life, clock, policy=info.policy, shell=image.shell, base_env=image.env
        )
        self.files = Files(self._channel, self._life)
        self.sessions = Sessions(self.commands, self.files)

    @classmethod
    @translated("making a sandbox")
    def create(
        cls,
        image: str = "host",
        substrate: str = "function",
        policy: Policy | None = None,
        *,
        cpu: float | None = None,
        memory_mb: int | None = None,
        pids: int | None = None,
        disk_mb: int | None = None,
        lifetime_s: float = 3600.0,
        idle_s: float | None = None,
        labels: Mapping[str, str] | None = None,
        state_dir: Path | str | None = None,
        toolkit: Path | str | None = None,
        runtime: str | None = None,
        egress: Egress | None = None,
    ) -> "Sandbox":
        """Makes a sandbox and waits until it takes commands; some ten milliseconds.

        `cpu` is in cores, `memory_mb` and `disk_mb` in mebibytes. The writable layer lies in memory and
        counts as such, so `memory_mb` bounds both. A limit that is left out gets a default, and is dropped
        (see `info.limits.degraded`) where the host cannot enforce it; one that is written and cannot be
        enforced is refused. `state_dir` holds image skeletons and the journal, by default where
        `dockyard down` sweeps; `toolkit` was made by `sandbox.toolkit` and lies beside `state_dir` by
        default; `runtime` names the OCI runtime of substrate `container`; `egress` is what a networked
        sandbox is connected to, by default this process's own network. A policy with a network that this host
        cannot enforce is refused.

        Raises InvalidArgument, UnsupportedError, CapacityError or StartError, and then leaves nothing behind.
        """
        state = Path(state_dir).absolute() if state_dir is not None else default_state_dir()
        tools = Path(toolkit).absolute() if toolkit is not None else default_toolkit(state)
        rules = policy or Policy()
        find_substrate(substrate).check(privileged=_is_privileged(), runtime=runtime)
        if "landlock" in rules.protections:
            landlock.check()
        network = rules.first_network
        uplink = None if network is None else egress or shared_egress(state)
        hierarchies = cgroups.find_hierarchies()
        asked = Asked(cpu, memory_mb, pids, disk_mb, lifetime_s, idle_s)
        profile = _profile(rules, state)
        info = SandboxInfo(
            id=new_id("sbx"),
            image=image,
            substrate=substrate,
            limits=settle(
                asked,
                cgroups.enforceable(hierarchies) | _LIMITED_WITHOUT_CGROUPS,
                (*cgroups.gaps(hierarchies), *(f"{name} is off, as asked" for name in sorted(rules.without))),
            ),
            policy=rules,
            labels=MappingProxyType(_checked_labels(labels or {})),
            profile=profile.name if profile is not None else None,
            lacking=("apparmor",) if "apparmor" in rules.protections and profile is None else (),
        )
        prepared = prepare_image(image, state_dir=state, init=INIT_BINARY, toolkit=tools)
        plan = _plan(info, prepared, state, hierarchies, runtime)
        ownership = Ownership(
            info.id,
            state_dir=state,
            substrate=substrate,
            groups=cgroups.plan_groups(hierarchies, cgroups.state_key(state), info.id),
            all_hierarchies=plan.all_hierarchies,
            profile=profile,
        )
        launched: Launched | None = None
        try:
            ownership.create(info.limits)
            namespace = ownership.connect(uplink, network) if uplink and network else None
            launched = launch(INIT_BINARY, plan, sandbox_id=info.id, network=namespace)
            ownership.note_processes(launched)
            return cls(info, prepared, ownership, launched, SystemClock())
        except BaseException:
            if launched is not None:
                launched.control.close()  # upon which init ends, and the launcher with it
            ownership.release(launched.process if launched is not None else None)
            raise

    @staticmethod
    def capabilities(
        *, state_dir: Path | str | None = None, toolkit: Path | str | None = None
    ) -> "tuple[Capability, ...]":
        """What this host enforces, found by trying each; some hundred milliseconds."""
        from sandbox.doctor import probe  # which tries things by making sandboxes

        return probe(
            state_dir=Path(state_dir) if state_dir is not None else None,
            toolkit=Path(toolkit) if toolkit is not None else None,
        )

    @property
    def id(self) -> str:
        """Unique, such as `sbx-3f9a61c04be2d17`."""
        return self._info.id

    @property
    def info(self) -> SandboxInfo:
        """Effective values."""
        return self._info

    @property
    def is_running(self) -> bool:
        """False once it has ended, for whatever reason."""
        return self._life.gone() is None

    @property
    def denials(self) -> tuple[Denial, ...]:
        """What its network policy has refused so far, each kind of attempt counted."""
        return denials_since({}, self._ownership.counters().refused)

    @property
    def network_version(self) -> int:
        """Of the network policy that holds: 1 at first. 0 for a sandbox without a network."""
        connection = self._ownership.connection
        return 0 if connection is None else connection.version

    def set_network(self, network: Network | Literal["none"], expected_version: int) -> int:
        """Puts a network policy in the place of the one that holds, as a whole, and returns its version.
        Connections that it does not allow are cut. Blocks for milliseconds.

        Raises VersionConflict when another version than `expected_version` holds, UnsupportedError for a
        sandbox that was made without a network, SandboxGone.
        """
        if (gone := self._life.gone()) is not None:
            raise gone
        connection = self._ownership.connection
        if connection is None:
            raise UnsupportedError(
                f"sandbox {self.id} was made without a network",
                hint="create it with `Policy(network=Network())`, which allows nothing, and change that",
                sandbox_id=self.id,
            )
        with translated("changing the network policy", sandbox_id=self.id):
            return connection.replace(Network() if network == "none" else network, expected_version)

    def pause(self) -> None:
        """Stops all that runs in it, memory kept, until `resume` or until anything is asked of it: a command,
        a file, input. Blocks for milliseconds. Commands' time stands still meanwhile, and so does the idle
        time; the lifetime goes on. Idempotent. Raises SandboxGone, UnsupportedError without cgroup version 2,
        SandboxError where a process does not stop.

        An owner that dies leaves a paused sandbox behind, which cannot notice: `sandbox.audit.sweep` ends it.
        """
        if (gone := self._life.gone()) is not None:
            raise gone
        self._life.freezer.pause()

    def resume(self) -> None:
        """Lets a paused sandbox go on. Nothing happens to one that runs. Raises SandboxGone."""
        if (gone := self._life.gone()) is not None:
            raise gone
        self._life.freezer.resume()

    @property
    def is_paused(self) -> bool:
        """True between `pause` and whatever ends the pause."""
        return self._life.freezer.is_paused

    def enter_phase(self, name: str, expected_version: int) -> int:
        """`set_network` with the policy's phase of that name. InvalidArgument where it has none."""
        phases = self._info.policy.phases
        if name not in phases:
            known = ", ".join(sorted(phases)) or "none"
            raise InvalidArgument(
                f"phase={name!r} is not in the policy's phases",
                hint=f"there are: {known}",
                sandbox_id=self.id,
            )
        return self.set_network(phases[name], expected_version)

    def kill(self) -> None:
        """Ends the sandbox and frees all that it owns. Idempotent, from any thread and in any state; blocks
        until nothing is left (milliseconds). Commands that still run end with reason `killed`. CapacityError
        when the kernel holds on to a cgroup; `sandbox.audit.sweep` can try again later."""
        self._life.end("killed")
        self._channel.close()
        if self._release_error is not None:
            raise self._release_error

    def _release(self) -> None:
        """Channel thread, its last act: however the sandbox ended, it leaves nothing behind."""
        try:
            with translated(f"removing sandbox {self.id}", sandbox_id=self.id):
                self._ownership.release(self._process)
        except SandboxError as error:
            self._release_error = error
        finally:
            self._life.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.kill()


def _plan(
    info: SandboxInfo,
    image: Image,
    state_dir: Path,
    hierarchies: tuple[cgroups.Hierarchy, ...],
    runtime: str | None,
) -> LaunchPlan:
    groups = cgroups.plan_groups(hierarchies, cgroups.state_key(state_dir), info.id)
    blueprint = Blueprint(
        id=info.id,
        image=image,
        limits=info.limits,
        owner_uid=_fresh_uid() if _is_privileged() else 0,
        privileged=_is_privileged(),
        cgroups=tuple(group.path for group in groups),
        pids_by_rlimit="pids" not in cgroups.enforceable(hierarchies),
        protections=info.policy.protections,
        profile=info.profile,
        hide_unified=_second_version(hierarchies),
        runtime=runtime,
    )
    return find_substrate(info.substrate).plan(blueprint)


def _profile(rules: Policy, state_dir: Path) -> Profile | None:
    """None without AppArmor. Raises UnsupportedError where the policy needs it."""
    if "apparmor" not in rules.protections:
        return None
    if apparmor_profiles.is_available():
        scope = cgroups.state_key(state_dir)
        return apparmor.profile(scope, protected=rules.protected, hidden=rules.hidden)
    if rules.protected or rules.hidden:
        raise UnsupportedError(
            "protected and hidden places need AppArmor, which this host or user does not have",
            hint="run as root on a kernel with `apparmor` in its `lsm=` list and apparmor_parser installed",
        )
    return None


def _is_privileged() -> bool:
    return os.geteuid() == 0


def _fresh_uid() -> int:
    """A range of its own for each sandbox, so that one cannot signal or trace another from outside. Drawn,
    not booked: beside 999 live sandboxes, one more meets the range of another with a chance of 1 in 29."""
    num_ranges = (_LAST_UID - _FIRST_UID) // UIDS_A_SANDBOX
    return _FIRST_UID + UIDS_A_SANDBOX * secrets.randbelow(num_ranges)


def _second_version(hierarchies: tuple[cgroups.Hierarchy, ...]) -> Path | None:
    """Root of the version 2 tree where there are version 1 trees too."""
    if all(each.version == 2 for each in hierarchies):
        return None
    return next((each.root for each in hierarchies if each.version == 2), None)


def _checked_labels(labels: Mapping[str, str]) -> dict[str, str]:
    for name, value in labels.items():
        if not isinstance(name, str) or not isinstance(value, str):  # pyright: ignore[reportUnnecessaryIsInstance]
            raise InvalidArgument(f"labels: {name!r}={value!r} is not text")
    return dict(labels)
