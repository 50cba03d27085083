"""Where attacks take place: sandboxes of one substrate, a neighbour whose life must go on, and the guard for
what is tried outside."""

import json
import subprocess
import tempfile
from collections.abc import Generator
from contextlib import contextmanager, suppress
from dataclasses import replace
from functools import cache
from pathlib import Path
from types import TracebackType
from typing import Self

from bench.attack_cases import guard
from bench.attack_cases.model import Box, Identity, Probe, Seen, Substrate
from sandbox import CommandResult, Sandbox

_PROBES = Path(__file__).parent / "probes"
_HEARTBEAT_S = 60.0
MARK = "neighbour's own"
# Put after each program: words open a door, an OSError or a LookupError is a shut one.
_END = """
import errno as _errno, json as _json, sys as _sys
try:
    _found = {"opened": True, "said": globals()[_sys.argv[1]](*_sys.argv[2:])}
except OSError as _error:
    _found = {"opened": False, "said": _errno.errorcode.get(_error.errno, str(_error))}
except LookupError as _error:
    _found = {"opened": False, "said": str(_error.args[0])}
print(_json.dumps(_found), flush=True)
"""


class Unguarded(Exception):
    """Nothing can be tried outside here; the message says why."""


class Arena:
    """One substrate's. Made with `with`; at the end nothing of it is left. One thread at a time."""

    def __init__(self, substrate: Substrate, *, state_dir: Path, toolkit: Path) -> None:
        self.substrate: Substrate = substrate
        self.state_dir = state_dir
        self.toolkit = toolkit
        self._shared: dict[Box, Sandbox] = {}
        self._folder = tempfile.TemporaryDirectory(prefix="dockyard-attacks-")
        self.place = Path(self._folder.name)
        self._guard = guard.Guard(self.place / "guard", state_dir, toolkit)

    def __enter__(self) -> Self:
        for folder in (self.place, self._guard.place):
            folder.mkdir(exist_ok=True)
            folder.chmod(0o711)
        self.open_place.mkdir()
        self.open_place.chmod(0o777)
        self.neighbour = self._create(Box())
        self.neighbour.files.write("mark", MARK)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        for box in (*self._shared.values(), self.neighbour):
            box.kill()
        self._folder.cleanup()

    @property
    def open_place(self) -> Path:
        """A folder of the host that every user may write to."""
        return self.place / "open"

    @contextmanager
    def sandbox(self, wanted: Box) -> Generator[Sandbox]:
        """One that is shared with other attempts, made anew where it has ended; or one that ends with the
        block."""
        if wanted.alone:
            with self._create(wanted) as box:
                yield box
            return
        box = self._shared.get(wanted)
        if box is None or not box.is_running:
            box = self._shared[wanted] = self._create(wanted)
        yield box

    def inside(self, probe: Probe) -> Seen:
        """Tries it in a sandbox, with a heartbeat of the neighbour beside it."""
        with self.sandbox(probe.box) as box:
            return self.try_in(box, probe)

    def try_in(self, box: Sandbox, probe: Probe) -> Seen:
        """Like `inside`, in a sandbox that is there."""
        running = box.commands.start(command(probe), timeout_s=probe.timeout_s)
        self.check_neighbour()
        return judge(running.wait())

    def outside(self, probe: Probe, identity: Identity, fds: tuple[int, ...] = ()) -> Seen:
        """Tries it as a process of the host, under the guard. Unguarded where there can be none."""
        if (reason := guard.missing(identity)) != "":
            raise Unguarded(reason)
        words = command(probe)[1:]
        try:
            done = self._guard.run(words, identity, timeout_s=probe.timeout_s, fds=fds)
        except subprocess.TimeoutExpired:
            return Seen(False, "timeout")
        return _printed(done.stdout) or Seen(False, f"exit {done.returncode}: {done.stderr[-300:]}")

    def check_neighbour(self) -> None:
        """AssertionError where the neighbour does not answer, or is not what it was."""
        beat = self.neighbour.commands.run(["cat", "mark"], timeout_s=_HEARTBEAT_S)
        assert (beat.reason, beat.stdout) == ("exit", MARK), f"the neighbour is not well: {beat}"

    def _create(self, wanted: Box) -> Sandbox:
        return Sandbox.create(
            substrate=self.substrate, policy=wanted.policy, cpu=wanted.cpu, memory_mb=wanted.memory_mb,
            pids=wanted.pids, disk_mb=wanted.disk_mb, state_dir=self.state_dir, toolkit=self.toolkit,
        )  # fmt: skip


def without(probe: Probe, protections: frozenset[str]) -> Probe:
    """The same, in a sandbox without these protections."""
    policy = probe.box.policy.model_copy(update={"without": protections})
    return replace(probe, box=replace(probe.box, policy=policy))


def command(probe: Probe) -> list[str]:
    """What runs a probe, with an interpreter that takes nothing from its surroundings."""
    return ["python3", "-I", "-c", program(probe.program), probe.function, *probe.arguments]


@cache
def program(name: str) -> str:
    """A program's text with its end."""
    return (_PROBES / f"{name}.py").read_text() + _END


def judge(result: CommandResult) -> Seen:
    """What a probe's command came to."""
    if (found := _printed(result.stdout)) is not None:
        return found
    if result.reason == "exit":
        return Seen(False, f"exit {result.exit_code}: {result.stderr[-300:]}")
    name = f"{result.reason} {(result.exit_code or 0) - 128}" if result.reason == "signal" else result.reason
    return Seen(False, name)


def _printed(output: str) -> Seen | None:
    for line in reversed(output.splitlines()):
        with suppress(ValueError, KeyError, TypeError):
            found = json.loads(line)
            return Seen(found["opened"], str(found["said"]))
    return None
