"""How a bench that has a peer ends: one JSON object, what it ran on, and whether its figures can be trusted.

Figures are void (`noisy` true, `met` null) where threads already waited for a core more than a fifth of the
time before the bench began, or where other processes took more than a tenth of the machine while it ran.
"""

import argparse
import json
import os
import platform
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from types import FrameType
from typing import Any, NoReturn

from bench import neighbours
from sandbox.places import default_state_dir, default_toolkit

MAX_PRESSURE = 20.0  # percent of the last ten seconds in which some thread waited for a core
MAX_OTHERS = 0.10  # of all cores
CALM_S = 30.0  # is waited for
ONE_STOP_S = 5.0  # a terminal, and whoever has started the bench, may both say it
_ENDING = (signal.SIGINT, signal.SIGTERM)

_PRESSURE = Path("/proc/pressure/cpu")
_CPUINFO = Path("/proc/cpuinfo")
_ROOT = Path(__file__).parent.parent


@dataclass(frozen=True, slots=True)
class Options:
    """`quick`: the same measurement, smaller, at most two minutes."""

    as_json: bool
    quick: bool


@dataclass(frozen=True, slots=True)
class Comparison:
    """Ours against a peer's, in the same unit; more is better. `met`: every part reached its target."""

    name: str
    unit: str
    value: float
    peer: str
    peer_value: float
    target: float  # of the ratio

    @property
    def ratio(self) -> float:
        return self.value / self.peer_value

    @property
    def met(self) -> bool:
        return self.ratio >= self.target


@dataclass(frozen=True, slots=True)
class ComparisonOfParts(Comparison):
    """Met where each named part has reached a target of its own."""

    parts: Mapping[str, bool]

    @property
    def met(self) -> bool:
        return all(self.parts.values())


class Surroundings:
    """What a bench ran on and beside. Make it before anything heavy starts.

    Waits, at most half a minute, for what ran before to die down: the ten seconds that pressure is taken over
    may still hold a test or another bench.
    """

    def __init__(self, packages: Sequence[str]) -> None:
        self._packages = packages
        calm_by_s = time.monotonic() + CALM_S
        while (cpu_pressure() or 0.0) > MAX_PRESSURE and time.monotonic() < calm_by_s:
            time.sleep(1.0)
        self._pressure, self._load = cpu_pressure(), os.getloadavg()[0]
        self._before = neighbours.sample()

    def describe(self) -> dict[str, Any]:
        """The `env` of the object. Call it when the bench has ended."""
        return {
            "cpu": _cpu_model(),
            "cores": len(os.sched_getaffinity(0)),
            "load": self._load,
            "cpu_pressure": self._pressure,
            "others": round(neighbours.share(self._before, neighbours.sample()), 3),
            "versions": {"python": platform.python_version(), **{p: _version(p) for p in self._packages}},
            "system": platform.platform(),
            "commit": _commit(),
        }


def run(main: Callable[[Sequence[str]], int]) -> NoReturn:
    """A bench as a program. SIGTERM ends it as Ctrl-C does: one line says so, what it has made is removed."""
    stop = _Stop()
    for number in _ENDING:
        if signal.getsignal(number) is not signal.SIG_IGN:  # as of a job in the background
            signal.signal(number, stop)
    try:
        sys.exit(main(sys.argv[1:]))
    except KeyboardInterrupt:
        sys.exit(128 + stop.number)


class _Stop:
    """Of a process's main thread."""

    def __init__(self) -> None:
        self.number, self._at_s = signal.SIGINT, -ONE_STOP_S

    def __call__(self, number: int, frame: FrameType | None) -> None:
        now_s = time.monotonic()
        if now_s - self._at_s < ONE_STOP_S:
            return  # the same again, while things are removed
        self.number, self._at_s = signal.Signals(number), now_s
        # Not by `sys.stderr`, in the middle of a write of which it may have come.
        os.write(2, f"\n{self.number.name}: the bench ends, and removes what it has made\n".encode())
        raise KeyboardInterrupt


@contextmanager
def temporary_home() -> Generator[None]:
    """What sandboxes of the block keep by default (snapshots, the audit log) is in a folder of their own on
    the disk, which goes at its end. The toolkit is the one that set-up has made."""
    toolkit, before = default_toolkit(default_state_dir()), os.environ.get("DOCKYARD_HOME")
    with tempfile.TemporaryDirectory(prefix="dockyard-bench-", dir="/var/tmp") as folder:
        Path(folder, toolkit.name).symlink_to(toolkit)
        os.environ["DOCKYARD_HOME"] = folder
        try:
            yield
        finally:
            if before is None:
                del os.environ["DOCKYARD_HOME"]
            else:
                os.environ["DOCKYARD_HOME"] = before


def parse(name: str, description: str | None, arguments: Sequence[str] | None = None) -> Options:
    """The two options that every bench has. Exits with code 2 on others."""
    return parse_own(name, description, arguments, argparse.ArgumentParser(add_help=False))[1]


def parse_own(
    name: str, description: str | None, arguments: Sequence[str] | None, own: argparse.ArgumentParser
) -> tuple[argparse.Namespace, Options]:
    """Those of `own`, which `--help` shows too, and the two that every bench has."""
    parser = argparse.ArgumentParser(
        prog=f"python -m bench.{name}",
        description=description,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        parents=[own],
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object on the last line")
    parser.add_argument("--quick", action="store_true", help="the same measurement, smaller: two minutes")
    found = parser.parse_args(arguments)
    return found, Options(found.json, found.quick)


def report(found: Comparison, surroundings: Surroundings, detail: Mapping[str, Any]) -> dict[str, Any]:
    """The bench's object, the stable fields first."""
    env = surroundings.describe()
    noisy = is_noisy(env["cpu_pressure"], env["others"])
    return {
        "name": found.name,
        "value": round(found.value, 3),
        "unit": found.unit,
        "peer": found.peer,
        "peer_value": round(found.peer_value, 3),
        "ratio": round(found.ratio, 3),
        "target": found.target,
        "met": None if noisy else found.met,
        "noisy": noisy,
        "env": env,
        **detail,
    }


def is_noisy(pressure: float | None, others: float) -> bool:
    """Whether the figures cannot be trusted. `others`: share (0..1) of the machine that went to others."""
    return (pressure or 0.0) > MAX_PRESSURE or others > MAX_OTHERS


def finish(value: Mapping[str, Any], options: Options) -> int:
    """Print the object, on one line or for people; the exit code says whether the target was missed."""
    sys.stdout.write((json.dumps(value) if options.as_json else json.dumps(value, indent=2)) + "\n")
    return 1 if value["met"] is False else 0


def progress(text: str) -> None:
    """One line on stderr, beside the result."""
    sys.stderr.write(f"{text}\n")
    sys.stderr.flush()


def cpu_pressure() -> float | None:
    """Percent of the last ten seconds in which some thread waited for a core; None where nobody tells."""
    if not _PRESSURE.exists():
        return None
    return float(_PRESSURE.read_text().split("avg10=")[1].split()[0])


def _cpu_model() -> str:
    lines = _CPUINFO.read_text().splitlines() if _CPUINFO.exists() else []
    named = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return next(named, platform.machine())


def _version(package: str) -> str:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return "not installed"


def _commit() -> str:
    command = ["git", "-C", str(_ROOT), "describe", "--always", "--dirty", "--abbrev=12"]
    try:
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return "unknown"
