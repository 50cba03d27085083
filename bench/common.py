"""How a bench that has a peer ends: one JSON object, what it ran on, and whether its figures can be trusted.

Figures are void (`noisy` true, `met` null) where threads already waited for a core more than a fifth of the
time before the bench began, or where other processes took more than a tenth of the machine while it ran.
"""

import argparse
import json
import os
import platform
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Any

from bench import neighbours

MAX_PRESSURE = 20.0  # percent of the last ten seconds in which some thread waited for a core
MAX_OTHERS = 0.10  # of all cores
CALM_S = 30.0  # is waited for

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


def parse(name: str, description: str | None, arguments: Sequence[str] | None = None) -> Options:
    """The two options that every bench has. Exits with code 2 on others."""
    parser = argparse.ArgumentParser(
        prog=f"python -m bench.{name}",
        description=description,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object on the last line")
    parser.add_argument("--quick", action="store_true", help="the same measurement, smaller: two minutes")
    options = parser.parse_args(arguments)
    return Options(options.json, options.quick)


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
