"""What a sandbox has on the host: entered in the journal before it is made, and given back in full."""

import socket
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

from sandbox import cgroups
from sandbox.egress.connection import Connection
from sandbox.egress.helped import HelpedEgress, Uplink
from sandbox.egress.namespaces import CAPABILITY
from sandbox.egress.service import Egress
from sandbox.errors import UnsupportedError
from sandbox.guard.node import Guard
from sandbox.helper import Helper
from sandbox.journal import Journal, Record
from sandbox.launcher import Launched
from sandbox.layers.base import Layer, LayerSize
from sandbox.layers.choice import MECHANISMS
from sandbox.limits import Limits
from sandbox.nursery import Launcher
from sandbox.policy import Network
from sandbox.policy.apparmor import Profile
from sandbox.policy.apparmor_profiles import LoadedProfiles
from sandbox.processes import NOBODY, boot_id, find_process, this_process
from sandbox.refusals import Counts
from sandbox.root_ranges import shared_root_ranges

_NO_GROUP = "a sandbox with a network needs cgroups of version 2"
_END_PATIENCE_S = 5.0


class Ownership:
    """One sandbox's cgroups, writable layer, network and journal entry. Its owner calls `create`, `connect`
    (if there is a network), `limit`, `note_processes` and `release`, in this order, from any one thread at a
    time; `release` is right after any of them. `counters` is for any thread."""

    def __init__(
        self,
        sandbox_id: str,
        *,
        state_dir: Path,
        substrate: str,
        groups: tuple[cgroups.Group, ...],
        all_hierarchies: bool,
        profile: Profile | None = None,
        guard: Guard | None = None,
        booked: int | None = None,
    ) -> None:
        """`booked`: the first of ids that are this sandbox's in the book of root's ranges."""
        self._booked = booked
        self._profile = profile
        self._profiles = LoadedProfiles(state_dir, cgroups.state_key(state_dir))
        self.groups = cgroups.Groups(groups)
        self._guard, self._sealed = guard, 0  # the cgroup's id, once it is
        self.layer = Layer()
        self._layers = MECHANISMS["memory"]
        self._state_dir = state_dir
        self.connection: Connection | None = None
        self._egress: Egress | HelpedEgress | None = None
        self._helper: Helper | None = None
        self._journal = Journal(state_dir)
        self._state = cgroups.state_key(state_dir)
        roots = cgroups.mount_roots() if all_hierarchies else ()
        by_runtime = {root / cgroups.TOP / self._state / sandbox_id for root in roots}
        self._by_runtime = sorted(by_runtime - set(self.groups.paths))
        cgroups.keep_parents((*roots, *(group.hierarchy.root for group in groups)), self._state)
        self._record = Record(
            id=sandbox_id,
            owner=this_process(),
            boot=boot_id(),
            substrate=substrate,
            cgroups=tuple(str(path) for path in (*self.groups.paths, *self._by_runtime)),
        )

    def create(self, limits: Limits) -> None:
        """Makes the cgroups, whose limits `limit` sets, and the layer, and loads the profile. Raises
        CapacityError, StartError."""
        self._journal.write(self._record)
        self.groups.make()
        self._layers = MECHANISMS[limits.layer]
        size = LayerSize(limits.disk_bytes, limits.disk_inodes)
        self.layer = self._layers.make(self._state_dir, self._record.id, size)
        if self._profile is not None:
            self._profiles.acquire(self._profile, self._record.id)

    def limit(self, limits: Limits) -> None:
        """While the sandbox is being made, and before anything of it runs. Raises CapacityError."""
        self.groups.limit(limits)

    def connect(self, egress: Egress, network: Network) -> int:
        """Guards the cgroups and makes the network, and returns its namespace for the sandbox's first process
        to enter. Raises UnsupportedError without a version 2 group, CapacityError or StartError."""
        group = self.groups.unified
        if group is None:
            raise UnsupportedError(_NO_GROUP, capability=CAPABILITY)
        self.connection = egress.connect(self._record.id, group, network)
        self._egress = egress
        self._record = replace(self._record, links=(self.connection.link.name,))
        self._journal.write(self._record)
        return self.connection.link.namespace

    def adopter(self, helper: Helper, uplink: Uplink | None, network: Network | None) -> "HelpedLaunch":
        """Does for its launcher what a helper has to do. Once for a sandbox."""
        self._helper = helper
        return HelpedLaunch(self, helper, self._record.id, uplink, network)

    def has_lost_helper(self) -> bool:
        """Whether a helper had a hand in it that has ended, and with it the sandbox. Does not block."""
        return self._helper is not None and self._helper.has_ended()

    def take_connection(self, egress: HelpedEgress, connection: Connection) -> None:
        """One that the helper has made, in the place of `connect`."""
        self._egress, self.connection = egress, connection

    def counters(self) -> cgroups.Counters:
        """How often limits have bitten so far, the network policy's and the guard's among them."""
        return replace(self.groups.counters(), refused=self.refused())

    def refused(self) -> Counts:
        """What the network policy and the guard have refused so far."""
        refused = {} if self.connection is None else dict(self.connection.counts())
        if self._guard is not None and self._sealed:
            refused.update(self._guard.refused(self._sealed))
        return refused

    def note_processes(self, launched: Launched) -> None:
        """Enters the processes, now that they run in their namespaces, and seals the group. OSError."""
        if self._guard is not None and self.groups.unified is not None:
            self._sealed = self._guard.seal(self.groups.unified)
        self.layer.let_go()
        if self.connection is not None:
            self.connection.link.let_go()
        keys = [find_process(pid) for pid in launched.pids]
        self._journal.write(self._record.with_processes(tuple(key for key in keys if key is not None)))

    def release(self, launcher: Launcher | None) -> None:
        """Waits for the processes, removes cgroups and entry. Blocks for milliseconds; idempotent. Whatever
        becomes of one thing, the others are given back, but that what may live on stays sealed, confined and
        alone with its ids, and without a network. Raises the first error, CapacityError when the kernel does
        not let go of a group; the entry then stays, as nobody's, for a later sweep."""
        errors = _do_each(lambda: _await_end(launcher), self.groups.remove, self._remove_runtimes_groups)
        if not errors:
            errors += _do_each(self._unseal, lambda: self._profiles.release(self._record.id))
        errors += _do_each(self._disconnect, self._release_helped, self._remove_layer)
        if errors:
            with suppress(OSError):  # then it is nobody's when this process has ended
                self._journal.write(replace(self._record, owner=NOBODY))
            raise errors[0]
        self._journal.remove(self._record.id)
        if self._booked is not None:
            shared_root_ranges().give_back(self._booked)

    def _unseal(self) -> None:
        if self._guard is not None and self._sealed:
            self._guard.forget(self._sealed)

    def _disconnect(self) -> None:
        if self.connection is not None and self._egress is not None:
            self._egress.disconnect(self.connection)
            self._egress = None

    def _release_helped(self) -> None:
        """The helper keeps the ids until the groups are gone."""
        if self._helper is not None:
            self._helper.release(self._record.id)

    def _remove_layer(self) -> None:
        self._layers.remove(self.layer)

    def _remove_runtimes_groups(self) -> None:
        for path in self._by_runtime:
            cgroups.remove_group(path)


def _do_each(*deeds: Callable[[], object]) -> list[Exception]:
    """Whatever another raises, for want of memory say: what they have raised."""
    errors: list[Exception] = []
    for deed in deeds:
        try:
            deed()
        except Exception as error:
            errors.append(error)
    return errors


def _await_end(launcher: Launcher | None) -> None:
    """What does not end by itself is ended; of what the kernel still holds then, the groups tell."""
    if launcher is None:
        return
    try:
        launcher.wait(_END_PATIENCE_S)
    except TimeoutError:
        launcher.kill()
        with suppress(TimeoutError):
            launcher.wait(_END_PATIENCE_S)


class HelpedLaunch:
    """What the helper does for one launcher of an ordinary user's: an Adopter. Raises CapacityError,
    StartError and UnsupportedError."""

    def __init__(
        self, ownership: Ownership, helper: Helper, name: str, uplink: Uplink | None, network: Network | None
    ) -> None:
        self._ownership, self._helper, self._name = ownership, helper, name
        self._uplink, self._network = uplink, network

    def adopt(self, pid: int) -> None:
        """Its user namespace gets ids."""
        self._helper.adopt(self._name, pid)

    def join(self, pid: int, resolver: socket.socket | None) -> None:
        """It gets into its group of version 2, and its network a link where there are rules."""
        group = self._ownership.groups.unified
        if group is not None:
            self._helper.join(self._name, pid)
        if resolver is None or self._network is None or not isinstance(self._uplink, HelpedEgress):
            return
        if group is None:
            raise UnsupportedError(_NO_GROUP, capability=CAPABILITY)
        connection = self._uplink.connect_process(self._name, group, self._network, pid, resolver)
        self._ownership.take_connection(self._uplink, connection)
