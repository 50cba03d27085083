"""Where attacks take place: sandboxes of one substrate, a neighbour whose life must go on, and the guard for
what is tried outside."""

import subprocess
from collections.abc import Generator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from types import TracebackType
from typing import Self

from bench.attack_cases import guard
from bench.attack_cases.folders import Folder
from bench.attack_cases.model import Attack, Box, Identity, Probe, Seen, Substrate, Unguarded
from bench.attack_cases.neighbour import Neighbour
from bench.attack_cases.programs import command, judge, read_found
from bench.attack_cases.world import World
from protocol.errors import DockyardError
from sandbox import Sandbox


class Arena:
    """One substrate's. Made with `with`; at the end nothing of it is left. One thread at a time."""

    def __init__(self, substrate: Substrate, *, state_dir: Path, toolkit: Path) -> None:
        self.substrate: Substrate = substrate
        self.state_dir = state_dir
        self.toolkit = toolkit
        self._shared: list[tuple[Box, Sandbox]] = []
        self._neighbours: list[Sandbox] = []
        self._folder = Folder()
        self.place = self._folder.path
        self._world: World | None = None
        self._on_exit = ExitStack()
        self._guard = guard.Guard(self.place / "guard", state_dir, toolkit)

    def __enter__(self) -> Self:
        for folder in (self.place, self._guard.place):
            folder.mkdir(exist_ok=True)
            folder.chmod(0o711)
        self.open_place.mkdir()
        self.open_place.chmod(0o777)
        self._settle_neighbour()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        with ExitStack() as last:
            last.callback(self._folder.remove)
            last.callback(self._on_exit.close)
            for box in (*(box for _, box in self._shared), *self._neighbours):
                last.callback(box.kill)

    def mind_neighbour(self) -> None:
        """Makes another where it is lost. Raises what a create raises, Harmed where that one is not well."""
        if self.beside.is_lost:
            with suppress(DockyardError):  # it raises that again at the end
                self.neighbour.kill()
            self._settle_neighbour()

    def _settle_neighbour(self) -> None:
        self.neighbour = self._create(Box())
        self._neighbours.append(self.neighbour)
        self.beside = Neighbour(self.neighbour)

    @property
    def open_place(self) -> Path:
        """A folder of the host that every user may write to."""
        return self.place / "open"

    @property
    def disk(self) -> Path:
        """Where the guard's disk is, for what is tried outside."""
        return self._guard.disk

    @property
    def world(self) -> World:
        """What networked sandboxes are connected to; made at the first use."""
        if self._world is None:
            self._world = self._on_exit.enter_context(World(self.state_dir, self.place / "asked"))
        return self._world

    @contextmanager
    def sandbox(self, wanted: Box) -> Generator[Sandbox]:
        """One that is shared with other attempts, made anew where it has ended; or one that ends with the
        block."""
        if wanted.alone:
            with self._create(wanted) as box:
                yield box
            return
        box = next((box for made, box in self._shared if made == wanted and box.is_running), None)
        if box is None:
            box = self._create(wanted)
            self._shared.append((wanted, box))
        yield box

    def inside(self, probe: Probe) -> Seen:
        """Tries it in a sandbox."""
        with self.sandbox(probe.box) as box:
            return self.try_in(box, probe)

    def try_in(self, box: Sandbox, probe: Probe) -> Seen:
        """Like `inside`, in a sandbox that is there."""
        return judge(box.commands.run(command(probe), timeout_s=probe.timeout_s))

    def outside(
        self,
        probe: Probe,
        identity: Identity,
        fds: tuple[int, ...] = (),
        *,
        confined: bytes = b"",
        disk: bool = False,
    ) -> Seen:
        """Tries it as a process of the host, under the guard. `confined`: and under these instructions for
        the filter of system calls. `disk`: with a small disk. Unguarded where there can be no guard."""
        if (reason := guard.missing(identity, disk=disk)) != "":
            raise Unguarded(reason)
        words = command(probe, confined)[1:]
        try:
            done = self._guard.run(words, identity, timeout_s=probe.timeout_s, fds=fds, disk=disk)
        except subprocess.TimeoutExpired as error:
            said: bytes = error.output or b""  # whatever was asked for
            found = read_found(said.decode(errors="replace"))
            return found if found is not None and found.opened else Seen(False, "timeout")
        return read_found(done.stdout) or Seen(False, f"exit {done.returncode}: {done.stderr[-300:]}")

    def _create(self, wanted: Box) -> Sandbox:
        return Sandbox.create(
            substrate=self.substrate, policy=wanted.policy, cpu=wanted.cpu, memory_mb=wanted.memory_mb,
            pids=wanted.pids, disk_mb=wanted.disk_mb, state_dir=self.state_dir, toolkit=self.toolkit,
            egress=None if wanted.policy.network == "none" else self.world.egress,
        )  # fmt: skip


def without(probe: Probe, protections: frozenset[str]) -> Probe:
    """The same, in a sandbox without these protections."""
    policy = probe.box.policy.model_copy(update={"without": protections})
    return replace(probe, box=replace(probe.box, policy=policy))


def attempt(attack: Attack, arena: Arena) -> Seen:
    """A sandbox that ended, or an operation that was refused, is what was said. So is an OSError, which comes
    from no sandbox and which no case expects: what looks at root's things names that in `needs`."""
    try:
        return arena.inside(attack) if isinstance(attack, Probe) else attack(arena)
    except DockyardError as error:
        return Seen(False, type(error).__name__)
    except OSError as error:
        return Seen(False, f"{type(error).__name__}: {error}")
