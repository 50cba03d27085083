"""The end of a bench on the live stack: its options, what it ran on, and its one JSON object.

Two kinds of noise make a verdict void (`noisy` true, `met` null): pressure on the CPU before the bench has
made any of its own, and a share of the machine that others took while it ran.
"""

import argparse
import json
import os
import platform
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

MAX_PRESSURE = 20.0  # percent of time in which some thread waited for a core
MAX_OTHERS = 0.10  # of all cores

_PRESSURE = Path("/proc/pressure/cpu")
_CPUINFO = Path("/proc/cpuinfo")


@dataclass(frozen=True, slots=True)
class Options:
    """What the command line says."""

    as_json: bool
    quick: bool


@dataclass(frozen=True, slots=True)
class Host:
    """What the bench ran on, read before it starts anything."""

    cpu: str
    cores: int
    python: str
    system: str
    load: float  # of the last minute
    pressure: float | None  # percent of the last ten seconds; None where the kernel does not tell


@dataclass(frozen=True, slots=True)
class Finding:
    """The stable fields of a bench without a peer."""

    name: str
    value: float
    unit: str
    target: float
    met: bool


def parse(arguments: Sequence[str], name: str, description: str | None) -> Options:
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


def host() -> Host:
    """Reads the host's state; does not block."""
    return Host(
        cpu=_cpu_model(),
        cores=len(os.sched_getaffinity(0)),
        python=platform.python_version(),
        system=platform.platform(),
        load=os.getloadavg()[0],
        pressure=_pressure(),
    )


def is_noisy(before: Host, others: float) -> bool:
    """Whether the figures cannot be trusted. `others`: share (0..1) of the machine that went to others."""
    return (before.pressure or 0.0) > MAX_PRESSURE or others > MAX_OTHERS


def result(finding: Finding, before: Host, others: float, detail: dict[str, Any]) -> dict[str, Any]:
    """The bench's object: stable fields first."""
    noisy = is_noisy(before, others)
    return {
        "name": finding.name,
        "value": finding.value,
        "unit": finding.unit,
        "peer": None,
        "peer_value": None,
        "ratio": None,
        "target": finding.target,
        "met": None if noisy else finding.met,
        "noisy": noisy,
        "env": asdict(before) | {"others": others},
        **detail,
    }


def finish(value: dict[str, Any], options: Options) -> int:
    """Prints the object, on one line or for people; the exit code says whether the target was missed."""
    print(json.dumps(value) if options.as_json else json.dumps(value, indent=2), flush=True)
    return 1 if value["met"] is False else 0


def _pressure() -> float | None:
    if not _PRESSURE.exists():
        return None
    return float(_PRESSURE.read_text().split("avg10=")[1].split()[0])


def _cpu_model() -> str:
    lines = _CPUINFO.read_text().splitlines() if _CPUINFO.exists() else []
    named = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return next(named, platform.machine())
