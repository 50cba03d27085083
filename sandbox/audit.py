"""What is on the host because of sandboxes, and what of it no live owner holds.

A sandbox ends with its owner: its init sees the control socket close. What may stay behind after a kill -9
are cgroups, the journal entry and, for a moment or if the kernel is slow, processes. `sweep` removes all of
it. Mounts are made in a sandbox's own namespace, or in none, so none of the host's table is ours.
"""

import os
import secrets
import time
from collections.abc import Iterable, Iterator, Mapping, Set
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from sandbox import cgroups, images, toolkit
from sandbox.audit_log import SandboxLog
from sandbox.egress import links
from sandbox.errors import SandboxError, telling_shortage, translated
from sandbox.host_tree import remove_tree
from sandbox.journal import Journal, Record
from sandbox.layers import loops, residue
from sandbox.listings import list_folder, owned, pinned
from sandbox.places import INIT_BINARY, chosen_state_dir, default_toolkit
from sandbox.policy.apparmor_profiles import LoadedProfiles
from sandbox.processes import ProcessKey, boot_id, command_line, command_lines, find_process, is_wholly
from sandbox.substrates.container import RUNTIMES
from sandbox.undisturbed import undisturbed_call

LeftoverKind = Literal["process", "cgroup", "directory", "record", "link", "profile", "loop"]
_KILL_PATIENCE_S = 5.0
# What a sandbox's launcher is, one after the other, and init.
_PROGRAMS = frozenset({INIT_BINARY.name, Path(images.INIT_AT).name, "bwrap", *RUNTIMES})


@dataclass(frozen=True, slots=True)
class Leftover:
    """One thing without an owner. `name` is a pid, a path or a device's; `sandbox_id` may be unknown."""

    kind: LeftoverKind
    name: str
    sandbox_id: str = ""
    process: ProcessKey | None = field(default=None, compare=False, repr=False)  # the very one of that pid


@dataclass(frozen=True, slots=True)
class Audit:
    """The state of one state directory at one moment."""

    live: tuple[str, ...]  # ids of sandboxes whose owner runs
    leftovers: tuple[Leftover, ...]

    @property
    def is_clean(self) -> bool:
        """True when everything that there is has an owner."""
        return not self.leftovers


@undisturbed_call
@telling_shortage("looking for leftovers")
def check_integrity(state_dir: Path | str | None = None) -> Audit:
    """Looks at journal, processes, cgroups, links and directories; changes nothing. Milliseconds.
    CapacityError where this process has no descriptor for it."""
    state = chosen_state_dir(state_dir)
    # Groups, layers and profiles before records: a sandbox that is being made has its record first.
    profiles = _loaded(state).users()
    layers = residue.found(state)
    groups = cgroups.list_groups(cgroups.mount_roots(), cgroups.state_key(state))
    records = Journal(state).records()
    dead = [record for record in records if not _has_owner(record)]
    found = [*_processes(dead), *_groups(groups, records, dead)]
    found += [*_links(state, dead), *_drafts(state)]
    found += _profiles(profiles, {record.id for record in records if record not in dead})
    found += [Leftover("record", record.id, record.id) for record in dead]
    found += [Leftover("record", str(path)) for path in Journal(state).strays()]
    live = tuple(record.id for record in records if record not in dead)
    found += [Leftover("directory", str(path), path.name) for path in residue.ownerless(layers, set(live))]
    found += [Leftover("loop", str(path)) for path in residue.ownerless_loops(cgroups.state_key(state))]
    if not live:
        found += _superseded(state)
    return Audit(live, tuple(found))


@undisturbed_call
def leftovers(state_dir: Path | str | None = None) -> tuple[Leftover, ...]:
    """What no live owner holds; nothing when all is well."""
    return check_integrity(state_dir).leftovers


@undisturbed_call
@telling_shortage("sweeping")
def sweep(state_dir: Path | str | None = None) -> tuple[Leftover, ...]:
    """Removes all leftovers and returns them; nothing the second time. Live sandboxes are not touched.

    Blocks until it is done, seconds at most. CapacityError when the kernel holds on to a cgroup, AuthError
    when one is another user's: behind all others, and what its sandbox has besides, but for links, stays for
    the next sweep. SandboxError, behind all others too, for a profile that is not unloaded.
    """
    state = chosen_state_dir(state_dir)
    found = leftovers(state)
    _kill_all(each.process for each in found if each.process is not None)
    kept = _remove_groups(each for each in found if each.kind == "cgroup")
    by_kind: dict[LeftoverKind, list[Leftover]] = {}
    for each in found:
        if each.sandbox_id not in kept or each.kind == "link":
            by_kind.setdefault(each.kind, []).append(each)
    for each in by_kind.get("link", ()):
        links.delete_host_end(each.name)
    for each in by_kind.get("profile", ()):
        try:
            with translated("unloading a profile", sandbox_id=each.sandbox_id):
                _loaded(state).release(each.sandbox_id)
        except SandboxError as error:  # it is found again
            kept.setdefault(each.sandbox_id, error)
    for each in by_kind.get("loop", ()):
        loops.detach(Path(each.name))
    for each in by_kind.get("directory", ()):
        _remove_directory(Path(each.name))
    for each in by_kind.get("record", ()):
        # Last, so that a sweep that is cut short leaves the record for the next.
        if each.sandbox_id:
            SandboxLog(state, each.sandbox_id).note("end", reason="swept")
            Journal(state).remove(each.sandbox_id)
        else:
            Journal(state).remove_stray(Path(each.name))
    roots = cgroups.mount_roots()
    cgroups.remove_abandoned(roots, time.time())
    cgroups.remove_empty_parents(roots, cgroups.state_key(state))
    for error in kept.values():
        raise error
    return found


def _has_owner(record: Record) -> bool:
    return record.boot == boot_id() and record.owner.is_alive()


def _processes(dead: Iterable[Record]) -> Iterator[Leftover]:
    """Of a record of an ordinary user's, who may write into it what he wants, those that are his: the first
    process of his sandbox is, with which all others end."""
    records = {record.id: record for record in dead if record.boot == boot_id()}
    seen: set[ProcessKey] = set()
    for key, named in _named_processes(records):
        user = records[named].user
        if key not in seen and key.is_alive() and (user == 0 or is_wholly(key, user)):
            seen.add(key)
            yield Leftover("process", str(key.pid), named, key)


def _named_processes(records: Mapping[str, Record]) -> Iterator[tuple[ProcessKey, str]]:
    """Recorded ones, members of recorded groups, and programs of ours that carry the id in their arguments:
    the last finds a launcher whose owner died before it could write down the pid."""
    roots = cgroups.mount_roots()
    for record in records.values():
        groups = (Path(place) for place in record.cgroups)
        for group in (each for each in groups if _is_below(each, roots)):
            for key in _members(group):
                yield key, record.id
        for key in record.processes:
            yield key, record.id
    if records:
        yield from _launchers(records.keys())


def _is_below(place: Path, roots: Iterable[Path]) -> bool:
    """Of a path as it is written: a folder elsewhere is no group, whatever its files say."""
    return ".." not in place.parts and any(place.is_relative_to(root) for root in roots)


def _members(group: Path) -> Iterator[ProcessKey]:
    """Known before it is seen that they are in it: a pid may have become another's in between."""
    keys = [find_process(pid) for pid in cgroups.members(group)]
    members = set(cgroups.members(group))
    yield from (key for key in keys if key is not None and key.pid in members)


def _launchers(ids: Set[str]) -> Iterator[tuple[ProcessKey, str]]:
    """Programs of ours that have one of these ids as an argument, and that; known before they are read, as
    members are."""
    for pid, arguments in command_lines():
        if Path(os.fsdecode(arguments[0])).name not in _PROGRAMS:
            continue  # someone who looks for the id in a log
        named = next((word for word in map(os.fsdecode, arguments) if word in ids), None)
        if named is not None and (key := find_process(pid)) is not None and command_line(pid) == arguments:
            yield key, named


def _groups(groups: Iterable[Path], records: Iterable[Record], dead: Iterable[Record]) -> Iterator[Leftover]:
    known, ownerless = {record.id for record in records}, {record.id for record in dead}
    for path in groups:
        if (path.name in ownerless or path.name not in known) and path.exists():
            yield Leftover("cgroup", str(path), path.name)


def _links(state: Path, dead: Iterable[Record]) -> Iterator[Leftover]:
    """Host ends in this network namespace. The kernel removes one with the last process of its sandbox, so
    there is one here only where such a process still lives; no record names one that was made ahead."""
    users = {name: record.id for record in dead for name in record.links}
    for each in links.host_ends():
        if each.state == cgroups.state_key(state) and not each.owner.is_alive():
            yield Leftover("link", each.name, users.get(each.name, ""))


def _loaded(state: Path) -> LoadedProfiles:
    return LoadedProfiles(state, cgroups.state_key(state))


def _profiles(profiles: Mapping[str, Set[str]], live: Set[str]) -> Iterator[Leftover]:
    """Of AppArmor, that sandboxes which are no more still count as theirs."""
    for name, users in profiles.items():
        for gone in users - live:
            yield Leftover("profile", name, gone)


def _superseded(state: Path) -> list[Leftover]:
    """Old skeletons and toolkits, which only a sandbox made before the new ones could still have."""
    toolkits = toolkit.superseded(default_toolkit(state), _users(state))
    paths = (*images.superseded(state, INIT_BINARY), *toolkits)
    return [Leftover("directory", str(path)) for path in paths]


def _drafts(state: Path) -> Iterator[Leftover]:
    """Drafts whose maker, whose pid is in the name, has gone."""
    beside = default_toolkit(state).parent.glob(".toolkit-*")  # none where it may not be listed, as /home
    toolkits = owned(beside, _users(state))
    for path in (*list_folder(state / "images", "draft-*"), *toolkits):
        pid = path.name.split("-")[1]
        if not pid.isdecimal() or find_process(int(pid)) is None:
            yield Leftover("directory", str(path))


def _users(state: Path) -> Set[int]:
    """Whose toolkits beside it may be: where it lies, others may make what looks like one."""
    return {os.geteuid(), *(place.stat().st_uid for place in (state,) if place.exists())}


def _remove_directory(path: Path) -> None:
    """What does not go stays, and is found again. A skeleton or toolkit goes as a draft of this process, so
    that nobody ever finds half of it under its name."""
    kind = path.parent.name
    with suppress(OSError), pinned(path.parent) as place:
        if kind in ("layers", "snapshots"):
            residue.remove(place / path.name)
            return
        draft = "draft" if kind == "images" else ".toolkit"
        doomed = place / f"{draft}-{os.getpid()}-{secrets.token_hex(4)}"
        (place / path.name).rename(doomed)
        remove_tree(doomed)


def _remove_groups(groups: Iterable[Leftover]) -> dict[str, SandboxError]:
    """By the sandbox's id, why one is there yet."""
    kept: dict[str, SandboxError] = {}
    for each in groups:
        try:
            cgroups.remove_group(Path(each.name))
        except SandboxError as error:
            kept.setdefault(each.sandbox_id, error)
    return kept


def _kill_all(keys: Iterable[ProcessKey]) -> None:
    give_up = time.monotonic() + _KILL_PATIENCE_S
    alive: list[ProcessKey] = [key for key in keys if key.kill()]
    while alive and time.monotonic() < give_up:
        time.sleep(0.002)
        alive = [key for key in alive if key.is_alive()]
