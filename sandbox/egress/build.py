"""Compiles the programs for the kernel at set-up: `python -m sandbox.egress.build`. Does nothing when they
are newer than their source. Without them this host makes sandboxes with `network="none"` only."""

import platform
import shutil
import sys
from pathlib import Path

from sandbox.compilation import compile_to
from sandbox.errors import StartError, UnsupportedError
from sandbox.places import EGRESS_OBJECT

SOURCE = Path(__file__).with_name("egress.bpf.c")
_FLAGS = ("-O2", "-g", "-target", "bpf", "-Wall", "-Wextra", "-Werror")
_HINT = "apt-get install clang libbpf-dev"


def is_current(target: Path = EGRESS_OBJECT) -> bool:
    """True when the object is there and its source is not newer."""
    return target.is_file() and target.stat().st_mtime >= SOURCE.stat().st_mtime


def build(target: Path = EGRESS_OBJECT) -> bool:
    """Compiles; about a second. False when nothing was to do. UnsupportedError without clang and libbpf's
    headers. The object appears as a whole."""
    if is_current(target):
        return False
    compiler = shutil.which("clang")
    if compiler is None or not Path("/usr/include/bpf/bpf_helpers.h").exists():
        lacking = "clang" if compiler is None else "libbpf's headers"
        raise UnsupportedError(f"no {lacking} to build the egress programs", hint=_HINT)
    headers = f"-I/usr/include/{platform.machine()}-linux-gnu"  # clang does not look there for this target
    compile_to(target, [compiler, *_FLAGS, headers, "-c", str(SOURCE)], "the egress programs")
    return True


if __name__ == "__main__":
    try:
        print(f"{EGRESS_OBJECT}: {'built' if build() else 'up to date'}")
    except (UnsupportedError, StartError) as error:
        sys.exit(f"error: {error}")
