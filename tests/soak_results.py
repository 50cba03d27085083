"""What long tests found, kept beside them with their date: `make soak` writes, a person commits."""

import json
import os
import platform
from collections.abc import Mapping
from datetime import UTC, datetime
from pathlib import Path

import psutil

FOLDER = Path(__file__).parent / "soak_results"


def keep(name: str, found: Mapping[str, object]) -> Path:
    """Write one result; the latest of a day stays. Returns its file."""
    FOLDER.mkdir(exist_ok=True)
    now = datetime.now(UTC)
    file = FOLDER / f"{now:%Y-%m-%d}-{name}.json"
    machine = {"cores": os.cpu_count(), "kernel": platform.release(), "python": platform.python_version()}
    said = {"name": name, "at": f"{now:%Y-%m-%dT%H:%MZ}", **found, "machine": machine}
    file.write_text(json.dumps(said, indent=2) + "\n")
    return file


def resident_mib() -> float:
    """Memory of this process that lies in RAM, MiB."""
    return psutil.Process().memory_info().rss / (1 << 20)
