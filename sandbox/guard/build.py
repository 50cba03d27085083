"""Compiles the guard's programs at set-up: `python -m sandbox.guard.build`. Does nothing when they are newer
than their source. Without them sandboxes are made without the guard, which `info.lacking` says."""

import sys
from pathlib import Path

from sandbox.compilation import compile_for_kernel
from sandbox.errors import StartError, UnsupportedError
from sandbox.places import GUARD_OBJECT

SOURCE = Path(__file__).with_name("guard.bpf.c")


def build(target: Path = GUARD_OBJECT) -> bool:
    """Compiles; about a second. False when nothing was to do. UnsupportedError without clang and libbpf's
    headers. The object appears as a whole."""
    return compile_for_kernel(target, SOURCE, "the guard's programs")


if __name__ == "__main__":
    try:
        print(f"{GUARD_OBJECT}: {'built' if build() else 'up to date'}")
    except (UnsupportedError, StartError) as error:
        sys.exit(f"error: {error}")
