"""One sandbox, from `create` to `kill`."""

import atexit
import os
import threading
import time
from collections.abc import Iterable, Mapping
from contextlib import ExitStack, nullcontext
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import NoneType, TracebackType
from typing import TYPE_CHECKING, Literal, Self, overload

from protocol.clock import Clock, SystemClock
from sandbox.arguments import check_type, check_whole
from sandbox.audit_log import network_digest
from sandbox.channel import Channel
from sandbox.commands import Commands
from sandbox.copies import Copies
from sandbox.directory import Directory
from sandbox.egress.helped import Uplink
from sandbox.errors import InvalidArgument, SandboxGone, UnsupportedError, translated
from sandbox.files import Files
from sandbox.keys import Keys
from sandbox.layers import LayerWish
from sandbox.life import Life
from sandbox.limits import Asked, check_lifetime
from sandbox.making import Made, SandboxInfo, make
from sandbox.named import Named
from sandbox.orders import Order, checked_env, checked_labels, checked_network, checked_order, checked_policy
from sandbox.places import chosen_state_dir, default_toolkit
from sandbox.policy import Network, Policy
from sandbox.refusals import denials_since
from sandbox.results import Denial
from sandbox.sessions import Sessions
from sandbox.snapshots import Snapshot, Snapshots
from sandbox.status import IdleWish, SandboxStatus, at
from sandbox.undisturbed import undisturbed, undisturbed_call

if TYPE_CHECKING:
    from sandbox.doctor import Capability

MAX_FORKS = 100  # of one call


class Sandbox(Named):
    """A sandbox of this process. Thread-safe. Made by `create`; ends with `kill`, the end of the `with`
    block, its lifetime, its idle time, or its owner's process, whichever is first."""

    commands: Commands
    files: Files
    sessions: Sessions

    def __init__(self, made: Made, clock: Clock | None = None) -> None:
        """For `create`; takes over what was made."""
        clock = clock or SystemClock()
        self._made, self._info, self._ownership = made, made.info, made.ownership
        self._launcher = made.launched.launcher
        self._release_error: Exception | None = None
        self._changing = threading.Lock()  # of its network: one log and change at a time
        info = made.info
        self._started_s = time.time()
        with ExitStack() as on_failure:
            on_failure.callback(made.give_back)
            self._life = Life(info.id, made.launched.init_pid, info.limits, made.ownership, clock)
            on_failure.callback(self._life.close)
            self._channel = Channel(made.launched.control, clock, name=info.id)
            self._copies = Copies(made, self._life)
            self._life.wake, self._life.hang_up = self._channel.wake, self._channel.hang_up
            self._channel.start(self._life, self._release)
            on_failure.pop_all()
            on_failure.callback(self.kill)  # whose thread gives back from now on
            shell, env = made.image.shell, {**made.image.env, **dict(made.order.env)}
            self.commands = Commands(
                self._channel, self._life, clock, policy=info.policy, shell=shell, base_env=env, log=made.log
            )
            self.files = Files(self._channel, self._life, info.policy)
            self.sessions = Sessions(self.commands, self.files)
            sandboxes.add(made.order.state_dir, self)
            on_failure.pop_all()

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
        env: Mapping[str, str] | None = None,
        state_dir: Path | str | None = None,
        toolkit: Path | str | None = None,
        runtime: str | None = None,
        egress: Uplink | None = None,
        layer: LayerWish = "auto",
        snapshot: Snapshot | str | None = None,
        key: str | None = None,
    ) -> "Sandbox":
        """Makes a sandbox and waits until it takes commands; some ten milliseconds.

        `cpu` is in cores, `memory_mb` and `disk_mb` in mebibytes. A limit that is left out gets a default,
        and is dropped (see `info.limits.degraded`) where the host cannot enforce it; one that is written and
        cannot be enforced is refused. `env` is what every command has in its environment; it is in no log.
        `layer` says where what is written lies: as the policy says, else in memory, where it counts as such,
        so that `memory_mb` bounds both; or on "disk". `snapshot` is what the layer has in it at first.
        `state_dir` holds image skeletons, snapshots and the journal, by default where `dockyard down` sweeps;
        `toolkit` was made by `sandbox.toolkit` and lies beside `state_dir` by default; `runtime` names the
        OCI runtime of substrate `container`; `egress` is what a networked sandbox is connected to, by default
        this process's own network. A policy with a network that this host cannot enforce is refused.

        With a `key`, a repeated call gives the sandbox that the first has made (see `sandbox.keys`).

        Raises InvalidArgument, UnsupportedError, CapacityError or StartError, and then leaves nothing behind;
        with a key, Conflict where it stands for another order and SandboxGone where its sandbox has ended.
        """
        state, policy = chosen_state_dir(state_dir), checked_policy(policy)
        where = policy.layer if layer == "auto" else layer
        check_type("toolkit", toolkit, str, Path, NoneType)
        order = Order(
            image=image,
            substrate=substrate,
            policy=policy,
            limits=Asked(cpu, memory_mb, pids, disk_mb, lifetime_s, idle_s, where),
            labels=checked_labels(labels or {}),
            state_dir=state,
            toolkit=Path(toolkit).absolute() if toolkit is not None else default_toolkit(state),
            runtime=runtime,
            egress=egress,
            snapshot=snapshot.name if isinstance(snapshot, Snapshot) else snapshot,
            env=checked_env(env or {}),
        )
        checked_order(order)
        make_one = partial(cls._make, order)
        if key is None:
            return undisturbed(make_one, Sandbox.kill)
        return undisturbed(partial(_KEYS.get_or_make, key, order, make_one))  # which the key then finds

    @classmethod
    def _make(cls, order: Order) -> "Sandbox":
        with sandboxes.making():
            if order.snapshot is None:
                return cls(make(order, None))
            with Snapshots(order.state_dir).opened(order.snapshot) as content:
                return cls(make(order, content))

    @staticmethod
    def connect(id: str, *, state_dir: Path | str | None = None) -> "Sandbox":
        """The sandbox of this process that has this id, for whoever has lost sight of it. Changes nothing,
        neither its lifetime nor a pause. Raises SandboxGone, SandboxNotFound, AuthError for another user's,
        and UnsupportedError for one of another process: `sandbox.sandboxes` can look at it and end it."""
        return sandboxes.connect(id, state_dir=state_dir)

    @staticmethod
    def list(
        *, labels: Mapping[str, str] | None = None, state_dir: Path | str | None = None
    ) -> tuple[SandboxStatus, ...]:
        """Those that live and have all of these labels, of this process and of others, by id. AuthError for
        another user's state directory."""
        return sandboxes.list(labels=labels, state_dir=state_dir)

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

    @undisturbed_call
    def get_info(self) -> SandboxStatus:
        """How it stands now, with the timeouts that hold. Raises SandboxGone."""
        self._check()
        timeouts = self._life.timeouts()
        return SandboxStatus(
            self.id, os.getpid(), "paused" if self.is_paused else "running", self._info.image,
            self._info.substrate, dict(self._info.labels), started_at=at(self._started_s),
            end_at=at(time.time() + timeouts.left_s), lifetime_s=timeouts.lifetime_s,
            idle_s=timeouts.idle_s, network_version=self.network_version,
        )  # fmt: skip

    @undisturbed_call
    def set_timeout(self, lifetime_s: float | None = None, *, idle_s: IdleWish = "keep") -> SandboxStatus:
        """It ends `lifetime_s` from now, whatever was said before; None leaves that as it is. `idle_s` is its
        idle time from now on, None for none. Returns what holds. Raises InvalidArgument, SandboxGone."""
        check_lifetime(lifetime_s, None if idle_s == "keep" else idle_s)
        self._check()
        about = {"lifetime_s": lifetime_s, "idle_s": idle_s}
        with (
            translated("setting a timeout", sandbox_id=self.id),
            self._made.log.before("set_timeout", **about),
        ):
            self._life.set_timeout(lifetime_s, idle_s)
        return self.get_info()

    @property
    def is_running(self) -> bool:
        """False once it has ended, for whatever reason."""
        return self._life.gone() is None

    @property
    def ended(self) -> SandboxGone | None:
        """Why it has ended; None while it runs."""
        return self._life.gone()

    @property
    @undisturbed_call
    def denials(self) -> tuple[Denial, ...]:
        """What its network policy has refused so far, each kind of attempt counted."""
        return denials_since({}, self._ownership.refused())

    @property
    def network_version(self) -> int:
        """Of the network policy that holds: 1 at first. 0 for a sandbox without a network."""
        connection = self._ownership.connection
        return 0 if connection is None else connection.version

    @undisturbed_call
    def set_network(self, network: Network | Literal["none"], expected_version: int) -> int:
        """Puts a network policy in the place of the one that holds, as a whole, and returns its version.
        Connections that it does not allow are cut. Blocks for milliseconds.

        Raises VersionConflict when another version than `expected_version` holds, UnsupportedError for a
        sandbox that was made without a network, SandboxGone, CapacityError or SandboxError where the kernel
        does not take it; the one that held still does then.
        """
        network = checked_network(network)
        check_whole("expected_version", expected_version, 0, 1 << 62)
        self._check()
        connection = self._ownership.connection
        if connection is None:
            raise UnsupportedError(
                f"sandbox {self.id} was made without a network",
                hint="create it with `Policy(network=Network())`, which allows nothing, and change that",
                sandbox_id=self.id,
            )
        about = {"version": expected_version + 1, "network_sha256": network_digest(network)}
        with translated("changing the network policy", sandbox_id=self.id), self._changing:
            if connection.version != expected_version:  # it is refused, which is no deed
                return connection.replace(network, expected_version)
            with self._made.log.before("set_network", **about):
                return connection.replace(network, expected_version)

    @undisturbed_call
    def pause(self) -> None:
        """Stops all that runs in it, memory kept, until `resume` or until anything is asked of it: a command,
        a file, input. Blocks for milliseconds. Commands' time stands still meanwhile, and so does the idle
        time; the lifetime goes on. Idempotent. Raises SandboxGone, UnsupportedError without cgroup version 2,
        SandboxError where a process does not stop.

        When its owner dies it cannot notice: the process that the owner started it from ends it, and where
        that was killed as well, `sandbox.audit.sweep` does.
        """
        self._life.pause()

    @undisturbed_call
    def resume(self) -> None:
        """Lets a paused sandbox go on. Nothing happens to one that runs. Raises SandboxGone."""
        if (gone := self._life.gone()) is not None:
            raise gone
        self._life.freezer.resume()

    @property
    def is_paused(self) -> bool:
        """True between `pause` and whatever ends the pause."""
        return self._life.freezer.is_paused

    def snapshot(self, name: str | None = None, *, max_mb: int | None = None) -> Snapshot:
        """Keeps what its writable layer holds now, under a name that is new, until `Snapshot.delete`.

        All that runs in it stands still for as long as the copy takes, as in a pause; whatever is asked of it
        meanwhile waits. /dev/shm and processes are not in it. `max_mb` bounds the content, by default at what
        the layer can hold. Raises InvalidArgument for a name that is taken, FileTooLarge, CapacityError when
        the disk is full, UnsupportedError without cgroup version 2, SandboxGone; nothing is kept then.
        """
        return undisturbed(partial(self._copies.keep, name, max_mb), Snapshot.delete)

    @overload
    def fork_fs(self) -> "Sandbox": ...
    @overload
    def fork_fs(self, n: int) -> "tuple[Sandbox, ...]": ...
    def fork_fs(self, n: int | None = None) -> "Sandbox | tuple[Sandbox, ...]":
        """A new sandbox (or `n` of them, at most 100) whose writable layer holds what this one's holds now.

        Nothing else is shared, and processes are not copied: so a fork has no open file, no secret that a
        command was given and no random state of this one's. It has an id, uids, a host name and a lifetime of
        its own; image, limits, labels and policy are this one's, the network as it is now. This one stands
        still while the first is made. Raises what `create` raises (StartError where the layer cannot be
        copied), UnsupportedError without cgroup version 2, SandboxGone; then there is no fork.
        """
        if n is not None:
            check_whole("n", n, 1, MAX_FORKS)
        forks = undisturbed(partial(self._forks, n or 1), kill_all)
        return forks[0] if n is None else forks

    def _forks(self, count: int) -> "tuple[Sandbox, ...]":
        forks: list[Sandbox] = []
        doing = translated(f"forking sandbox {self.id}")
        with doing, ExitStack() as busy, ExitStack() as on_failure:
            busy.enter_context(self._life.busy())  # as all are that wait for the last one
            for _ in range(count):
                # Those after the first are copied from that, which nobody has yet, and this one goes on.
                still = nullcontext() if forks else self._life.held()
                source = (forks[0] if forks else self)._copies.source()
                with sandboxes.making(), still, source.opened() as content:
                    made = make(self._copies.fork_order(), replace(content, of=self.id))
                    forks.append(Sandbox(made))
                    on_failure.callback(forks[-1].kill)
                    busy.enter_context(forks[-1]._life.busy())
                    source.check()
                    self._made.log.write("fork", into=forks[-1].id)
            on_failure.pop_all()
        return tuple(forks)

    def _check(self) -> None:
        if (gone := self._life.gone()) is not None:
            raise gone

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

    @undisturbed_call
    def kill(self) -> None:
        """Ends the sandbox and frees all that it owns. Idempotent, from any thread and in any state; blocks
        until nothing is left (milliseconds). Commands that still run end with reason `killed`. CapacityError
        when the kernel holds on to a cgroup; `sandbox.audit.sweep` can try again later."""
        if self._life.gone() is None:
            self._made.log.note("kill")
        self._life.end("killed")
        self._channel.close()
        if self._release_error is not None:
            raise self._release_error

    def _release(self) -> None:
        """The channel's last act: however the sandbox ended, it leaves nothing behind."""
        refused: Mapping[str, int | None] = {"refused": None}  # nobody could count it
        try:
            with translated(f"removing sandbox {self.id}", sandbox_id=self.id), ExitStack() as steps:
                steps.callback(self._ownership.release, self._launcher)
                refused = self._refused()
        except Exception as error:
            self._release_error = error
        finally:
            gone = self._life.gone() or SandboxGone("it has ended", reason="lost", sandbox_id=self.id)
            with ExitStack() as steps:  # last in, first out; each is taken whatever the one before it raises
                steps.callback(sandboxes.remove, self._made.order.state_dir, self.id, gone)
                steps.callback(self._life.close)
                self._made.log.note("end", reason=gone.reason, **refused)

    def _refused(self) -> dict[str, int]:
        """What the audit log says at the end: all attempts, and those that have no line of their own."""
        count = sum(self._ownership.refused().values())
        return {"refused": count, "left_out": self._made.refusals.num_left_out} if count else {}

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.kill()


def kill_all(forks: Iterable[Sandbox]) -> None:
    """Of several that were to be one's together: each, whatever another's raises. Raises the first error."""
    errors: list[BaseException] = []
    for fork in forks:
        try:
            fork.kill()
        except BaseException as error:
            errors.append(error)
    if errors:
        raise errors[0]


_KEYS: Keys[Sandbox] = Keys()  # of this process
sandboxes: Directory[Sandbox] = Directory()
"""Those of this machine, by id: what can be done to one without being its owner."""
atexit.register(sandboxes.end_all)
