"""Builds `dockyard-init`, the static program that starts a sandbox and is its pid 1.

`python -m sandbox.native.build` does it at set-up; it does nothing when the program is newer than its source.
"""

import platform
import shutil
import sys
from pathlib import Path

from sandbox.compilation import compile_to
from sandbox.errors import StartError, UnsupportedError
from sandbox.places import INIT_BINARY

_HERE = Path(__file__).parent
_FLAGS = ("-std=gnu11", "-static", "-O2", "-Wall", "-Wextra", "-Werror")
# The kernel's, behind those of a C library that is not the system's.
_HEADERS = ("/usr/include", f"/usr/include/{platform.machine()}-linux-gnu")


def sources() -> tuple[Path, ...]:
    """The C files and their headers."""
    return tuple(sorted((*_HERE.glob("*.c"), *_HERE.glob("*.h"))))


def is_current(binary: Path = INIT_BINARY) -> bool:
    """True when the program is there and no source is newer."""
    return binary.is_file() and all(binary.stat().st_mtime >= each.stat().st_mtime for each in sources())


def build(binary: Path = INIT_BINARY) -> bool:
    """Compiles; about a second. False when nothing was to do. UnsupportedError without a C compiler.

    musl is taken where it is: before `main`, glibc asks the processor some thirty things, each of which
    leaves a virtual machine, so that a start takes a third of a millisecond more. There are two a sandbox.

    The program appears as a whole: sandboxes that start meanwhile use the old one.
    """
    if is_current(binary):
        return False
    command = _compiler()
    if not command:
        raise UnsupportedError("no C compiler to build dockyard-init", hint="apt-get install gcc libc6-dev")
    files = [str(each) for each in sources() if each.suffix == ".c"]
    compile_to(binary, [*command, *_FLAGS, *files], "dockyard-init")
    return True


def _compiler() -> list[str]:
    if (musl := shutil.which("musl-gcc")) is not None:
        return [musl, *(word for each in _HEADERS for word in ("-idirafter", each))]
    found = shutil.which("gcc") or shutil.which("cc")
    return [] if found is None else [found]


if __name__ == "__main__":
    try:
        print(f"{INIT_BINARY}: {'built' if build() else 'up to date'}")
    except (UnsupportedError, StartError) as error:
        sys.exit(f"error: {error}")
