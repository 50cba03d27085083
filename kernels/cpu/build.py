"""Builds the CPU library for this processor: `python -m kernels.cpu.build`.

The file's name carries a hash of the sources, the flags and the processor's features, so that a folder
copied to another machine never runs instructions which that machine lacks.
"""

import hashlib
import os
import platform
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

from kernels.limits import BLOCK, MAX_COLUMNS, MAX_HEAD, MAX_STREAMS
from protocol.errors import DockyardError, MissingCapability

SOURCES = (
    "linear.c",
    "integer.c",
    "pointwise.c",
    "attention.c",
    "decoder.c",
    "hyper_connections.c",
    "experts.c",
    "projections.c",
    "entry_attention.c",
    "selection.c",
    "records.c",
)
HEADERS = ("vector.h", "rows.h", "pairs.h", "weight.h", "operations.h", "deepseek.h")
FLAGS = (
    "-O3",
    "-march=native",
    "-std=gnu17",
    "-fopenmp",
    "-fPIC",
    "-shared",
    "-Wall",
    "-Wextra",
    "-Wno-psabi",
    "-Werror",
    f"-DBLOCK={BLOCK}",
    f"-DMAX_COLUMNS={MAX_COLUMNS}",
    f"-DMAX_HEAD={MAX_HEAD}",
    f"-DMAX_STREAMS={MAX_STREAMS}",
)
FOLDER = Path(__file__).parent


def library_path() -> Path:
    """Where the library for this processor and these sources lies once it is built."""
    digest = hashlib.sha256(" ".join((*FLAGS, _processor())).encode())
    for name in (*SOURCES, *HEADERS):
        digest.update((FOLDER / name).read_bytes())
    return FOLDER / "build" / f"dockyard_cpu-{digest.hexdigest()[:16]}.so"


def build() -> Path:
    """Compile the library unless it is there. Blocks for a few seconds; safe to run twice at once."""
    target = library_path()
    if not target.exists():
        compile_to(target)
    return target


def compile_to(target: Path, *flags: str) -> None:
    """Compile the library to `target` with additional flags. Raises MissingCapability, DockyardError."""
    compiler = shutil.which("gcc") or shutil.which("cc")
    if compiler is None:
        raise MissingCapability(
            "no C compiler for the CPU kernels", hint="install gcc; without it PyTorch runs the model, slower"
        )
    target.parent.mkdir(exist_ok=True)
    with tempfile.TemporaryDirectory(dir=target.parent) as scratch:
        partial = Path(scratch) / target.name
        command = [
            compiler,
            *FLAGS,
            *flags,
            "-o",
            str(partial),
            *(str(FOLDER / name) for name in SOURCES),
            "-lm",
        ]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode != 0:
            raise DockyardError(
                f"the CPU kernels do not compile with {compiler}: {done.stderr.strip()[-800:]}"
            )
        os.replace(partial, target)  # noqa: PTH105 - atomic on one filesystem


def _processor() -> str:
    """What `-march=native` depends on: the architecture and the processor's feature flags."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.machine()
    flags = next((line for line in lines if line.startswith(("flags", "Features"))), "")
    return f"{platform.machine()} {flags}"


if __name__ == "__main__":
    try:
        print(build())
    except DockyardError as error:
        sys.exit(f"dockyard: {error}")
