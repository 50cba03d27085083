"""From an order to a sandbox that runs: what holds, what it owns, how it is launched."""

import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType

from protocol.ids import new_id
from sandbox import cgroups
from sandbox.audit_log import SandboxLog, of_limits, policy_digest
from sandbox.covers import Covers, covers_of
from sandbox.cpu_bound import cpu_bound
from sandbox.egress.helped import HelpedEgress, Uplink, shared_uplink
from sandbox.egress.service import Egress
from sandbox.errors import InvalidArgument, UnsupportedError
from sandbox.guard.node import Guard, shared_guard
from sandbox.helper import Helper, shared_helper
from sandbox.images import Image, prepare_image
from sandbox.launcher import HELLO_PATIENCE_S, Handed, Launched, launch
from sandbox.layers.choice import choose
from sandbox.limits import LAYER_IN_MEMORY, LimitName, Limits, settle
from sandbox.orders import Order
from sandbox.ownership import Ownership
from sandbox.places import INIT_BINARY
from sandbox.policy import Policy, Protection, apparmor, apparmor_profiles, landlock
from sandbox.policy.apparmor import Profile
from sandbox.processes import ProcessKey
from sandbox.refusal_log import RefusalLog
from sandbox.root_ranges import shared_root_ranges
from sandbox.shortfalls import tell_once
from sandbox.snapshots import Content, Snapshot
from sandbox.substrates import find_substrate
from sandbox.substrates.base import HOSTNAME, UIDS_A_SANDBOX, Blueprint, LaunchPlan
from sandbox.substrates.container import is_unverified
from sandbox.turns import turns_to_make

_FIRST_ADOPTED = 1  # in the launcher's user namespace, to which a helper has given ids
_SLOW_BYTES_A_S, _SLOW_FILES_A_S = 10 << 20, 1000
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
    hostname: str = HOSTNAME
    made_from: str = ""  # name of a snapshot, or id of the sandbox that it is a fork of
    unverified: tuple[str, ...] = ()  # what takes part in making it and has not been tried by this project

    @property
    def shortfalls(self) -> tuple[str, ...]:
        """What a sandbox gets by default elsewhere and this one does not have, since this host does not. What
        a report should say beside figures and verdicts."""
        chosen = tuple(f"{name} is off, as asked" for name in self.policy.without)
        layer = (LAYER_IN_MEMORY,) if self.limits.layer_is_default else ()
        return (*self.lacking, *(each for each in self.limits.degraded if each not in chosen), *layer)


@dataclass(frozen=True, slots=True)
class Made:
    """A sandbox that runs. The receiver owns all of it."""

    order: Order
    info: SandboxInfo
    image: Image
    ownership: Ownership
    launched: Launched
    first_id: int  # of its ids on the host, or within the user namespace of the process `within`
    within: ProcessKey | None
    log: SandboxLog
    refusals: RefusalLog

    def give_back(self) -> None:
        """Ends it where nobody has taken it over."""
        self.log.note("end", reason="not taken over")
        self.launched.control.close()  # upon which init ends, and the launcher with it
        self.ownership.release(self.launched.launcher)


def make(order: Order, content: Content | None) -> Made:
    """Blocks until its init has said hello, some ten milliseconds. `content` is what its layer has in it at
    first. Raises InvalidArgument, UnsupportedError, CapacityError, StartError or OSError, and then leaves
    nothing behind."""
    if content is not None:  # whose copy waits for a disk, not for a core
        return _make(order, content)
    with turns_to_make().one():
        return _make(order, None)


def _make(order: Order, content: Content | None) -> Made:
    state, rules = order.state_dir, order.policy
    find_substrate(order.substrate).check(privileged=_is_privileged(), runtime=order.runtime)
    if "landlock" in rules.protections:
        landlock.check()
    network = rules.first_network
    helper = shared_helper(state)
    uplink = None if network is None else order.egress or shared_uplink(state, helper)
    hierarchies = cgroups.find_hierarchies() if helper is None else helper.hierarchies()
    profile = _profile(rules, state)
    guard = _guard(rules, hierarchies)
    info = SandboxInfo(
        id=new_id("sbx"),
        image=order.image,
        substrate=order.substrate,
        limits=settle(
            order.limits,
            cgroups.enforceable(hierarchies) | _LIMITED_WITHOUT_CGROUPS,
            (
                *cgroups.gaps(hierarchies),
                *_gaps(order, helper),
                *_lacking_ways(rules, uplink),
                *(f"{name} is off, as asked" for name in sorted(rules.without)),
            ),
            choose(order.limits.layer, state),
            most_cpus=cpu_bound(hierarchies, cgroups.state_key(state)),
        ),
        policy=rules,
        labels=MappingProxyType(dict(order.labels)),
        profile=profile.name if profile is not None else None,
        lacking=_lacking(rules, profile, guard),
        hostname=order.hostname,
        made_from="" if content is None else content.of,
        unverified=(f"runtime {order.runtime}",) if is_unverified(order.runtime) else (),
    )
    if content is not None and content.snapshot is not None:
        _check_fit(content.snapshot, info)
    prepared = prepare_image(order.image, state_dir=state, init=INIT_BINARY, toolkit=order.toolkit)
    groups = cgroups.plan_groups(hierarchies, cgroups.state_key(state), info.id)
    covers = covers_of(rules, prepared)
    booked = shared_root_ranges().draw() if _is_privileged() else None
    try:
        first_id = booked or (_FIRST_ADOPTED if helper is not None else 0)
        plan = _plan(order, info, prepared, hierarchies, first_id, groups=groups, covers=covers)
        ownership = Ownership(
            info.id,
            state_dir=state,
            substrate=order.substrate,
            groups=groups,
            all_hierarchies=plan.all_hierarchies,
            profile=profile,
            guard=guard,
            booked=booked,
        )
    except BaseException:
        if booked is not None:
            shared_root_ranges().give_back(booked)
        raise
    launched: Launched | None = None
    try:
        ownership.create(info.limits)
        handed = Handed(
            network=ownership.connect(uplink, network) if isinstance(uplink, Egress) and network else None,
            linked=isinstance(uplink, HelpedEgress),
            layer=ownership.layer.mount,
            content=None if content is None else content.directory,
            content_ids=0 if content is None else content.first_id,
        )
        launched = launch(
            INIT_BINARY,
            plan,
            sandbox_id=info.id,
            handed=handed,
            meanwhile=lambda: ownership.limit(info.limits),
            adopter=None if helper is None else ownership.adopter(helper, uplink, network),
            patience_s=HELLO_PATIENCE_S if content is None else _copy_patience_s(info.limits),
        )
        ownership.note_processes(launched)
        log = SandboxLog(state, info.id)
        log.write("create", **_about(info))
        within = None if helper is None else launched.stays
        refusals = RefusalLog(log)
        if ownership.connection is not None:
            ownership.connection.refusals.watcher = refusals
        tell_once(_worth_a_warning(order, info))
        return Made(order, info, prepared, ownership, launched, first_id, within, log, refusals)
    except BaseException:
        if launched is not None:
            launched.control.close()  # upon which init ends, and the launcher with it
        ownership.release(launched.launcher if launched is not None else None)
        raise


def _worth_a_warning(order: Order, info: SandboxInfo) -> tuple[str, ...]:
    """A layer in memory is a choice, which `info` says, but where another was wanted and is not there."""
    chosen = LAYER_IN_MEMORY if order.limits.layer == "auto" else None
    lacking = tuple(each for each in info.shortfalls if each != chosen)
    return (*lacking, *(f"{each} is unverified" for each in info.unverified))


def _about(info: SandboxInfo) -> dict[str, object]:
    return {
        "owner": {"pid": os.getpid(), "uid": os.geteuid()},
        "image": info.image,
        "substrate": info.substrate,
        "policy_sha256": policy_digest(info.policy),
        "limits": of_limits(info.limits),
        "lacking": info.shortfalls,
        "without": sorted(info.policy.without),
        "unverified": info.unverified,
        "labels": dict(info.labels),
        "made_from": info.made_from,
    }


def _plan(
    order: Order,
    info: SandboxInfo,
    image: Image,
    hierarchies: tuple[cgroups.Hierarchy, ...],
    first_id: int,
    *,
    groups: tuple[cgroups.Group, ...],
    covers: Covers,
) -> LaunchPlan:
    is_adopted = first_id == _FIRST_ADOPTED
    blueprint = Blueprint(
        id=info.id,
        image=image,
        limits=info.limits,
        owner_uid=first_id,
        privileged=_is_privileged(),
        cgroups=tuple(group.path for group in groups if group.hierarchy.version == 1),
        # What is in version 2, only somebody with privilege may change for an ordinary user.
        born_in=None
        if is_adopted
        else next((each.path for each in groups if each.hierarchy.version == 2), None),
        num_ids=UIDS_A_SANDBOX if first_id else 1,
        is_adopted=is_adopted,
        pids_by_rlimit="pids" not in cgroups.enforceable(hierarchies),
        protections=info.policy.protections,
        profile=info.profile,
        hide_unified=_second_version(hierarchies),
        runtime=order.runtime,
        hostname=info.hostname,
        is_filled=bool(info.made_from),
        covers=covers,
    )
    return find_substrate(info.substrate).plan(blueprint)


def _gaps(order: Order, helper: Helper | None) -> tuple[str, ...]:
    """What an ordinary user without a helper does not get."""
    if order.substrate != "container" or _is_privileged() or helper is not None:
        return ()
    return ("ids are one here: there is no user inside but 0, who is this user outside",)


def _lacking_ways(rules: Policy, uplink: Uplink | None) -> tuple[str, ...]:
    """Beyond this machine, for any of a policy's networks."""
    networks = [each for each in (rules.network, *rules.phases.values()) if each != "none"]
    return () if uplink is None else uplink.lacking_ways(networks)


def _copy_patience_s(limits: Limits) -> float:
    """Until all that a layer can hold has been copied, on a slow disk that others use."""
    return HELLO_PATIENCE_S + limits.disk_bytes / _SLOW_BYTES_A_S + limits.disk_inodes / _SLOW_FILES_A_S


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
            capability="apparmor",
            hint="run as root on a kernel with `apparmor` in its `lsm=` list and apparmor_parser installed",
        )
    return None


def _guard(rules: Policy, hierarchies: tuple[cgroups.Hierarchy, ...]) -> Guard | None:
    """None where the policy goes without it, and where the kernel or this host does not have it."""
    wanted = "guard" in rules.protections and any(each.version == 2 for each in hierarchies)
    return shared_guard() if wanted else None


def _lacking(rules: Policy, profile: Profile | None, guard: Guard | None) -> tuple[Protection, ...]:
    there: dict[Protection, bool] = {"apparmor": profile is not None, "guard": guard is not None}
    return tuple(name for name, is_there in there.items() if name in rules.protections and not is_there)


def _is_privileged() -> bool:
    return os.geteuid() == 0


def _second_version(hierarchies: tuple[cgroups.Hierarchy, ...]) -> Path | None:
    """Root of the version 2 tree where there are version 1 trees too."""
    if all(each.version == 2 for each in hierarchies):
        return None
    return next((each.root for each in hierarchies if each.version == 2), None)


def _check_fit(content: Snapshot, info: SandboxInfo) -> None:
    """Before anything is made: whether it is for such a sandbox and fits into it."""
    for field in ("image", "substrate"):
        if getattr(content, field) != getattr(info, field):
            raise InvalidArgument(
                f"{field}={getattr(info, field)!r}, and snapshot {content.name} is of {field} "
                f"{getattr(content, field)!r}",
                hint=f"create it with {field}={getattr(content, field)!r}",
            )
    limits = info.limits
    if content.content_bytes > limits.disk_bytes or content.entries > limits.disk_inodes:
        raise InvalidArgument(
            f"snapshot {content.name} has {content.content_bytes >> 20} MiB in {content.entries} files, and "
            f"disk_mb={limits.disk_bytes >> 20} holds less",
            hint="create it with a larger disk_mb",
        )
    in_memory = limits.layer == "memory" and limits.memory_bytes is not None
    if in_memory and content.content_bytes > (limits.memory_bytes or 0):
        raise InvalidArgument(
            f"snapshot {content.name} has {content.content_bytes >> 20} MiB, more than all of the sandbox's "
            "memory",
            hint="create it with a larger memory_mb, or with layer='disk'",
        )
