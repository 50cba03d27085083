"""Compiles the programs for the kernel at set-up: `python -m sandbox.egress.build`. Does nothing when they
are newer than their source. Without them this host makes sandboxes with `network="none"` only."""

import sys
from pathlib import Path

from sandbox.compilation import compile_for_kernel
from sandbox.errors import StartError, UnsupportedError
from sandbox.places import EGRESS_OBJECT

SOURCE = Path(__file__).with_name("egress.bpf.c")


def build(target: Path = EGRESS_OBJECT) -> bool:
    """Compiles; about a second. False when nothing was to do. UnsupportedError without clang and libbpf's
    headers. The object appears as a whole."""
    return compile_for_kernel(target, SOURCE, "the egress programs")


if __name__ == "__main__":
    try:
        print(f"{EGRESS_OBJECT}: {'built' if build() else 'up to date'}")
    except (UnsupportedError, StartError) as error:
        sys.exit(f"error: {error}")
