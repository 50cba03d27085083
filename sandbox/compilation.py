"""One run of a compiler, whose result appears as a whole: whoever reads meanwhile has the old one."""

import os
import platform
import shutil
from collections.abc import Sequence
from pathlib import Path

from sandbox.errors import StartError, UnsupportedError
from sandbox.programs import run_program
from sandbox.texts import one_line

_BPF_FLAGS = ("-O2", "-g", "-target", "bpf", "-Wall", "-Wextra", "-Werror")


def compile_to(target: Path, command: Sequence[str], name: str) -> None:
    """Runs the command with `-o` and a draft's path. StartError with the compiler's words."""
    draft = target.with_name(f"{target.stem}.{os.getpid()}{target.suffix}")
    done = run_program([*command, "-o", str(draft)])
    if done.returncode != 0:
        draft.unlink(missing_ok=True)
        raise StartError(f"compiling {name} failed: {one_line(done.stderr)}", phase="build")
    draft.replace(target)


def compile_for_kernel(target: Path, source: Path, name: str) -> bool:
    """Compiles BPF programs; about a second. False where the object is not older than its source.
    UnsupportedError without clang and libbpf's headers."""
    if target.is_file() and target.stat().st_mtime >= source.stat().st_mtime:
        return False
    compiler = shutil.which("clang")
    if compiler is None or not Path("/usr/include/bpf/bpf_helpers.h").exists():
        lacking = "clang" if compiler is None else "libbpf's headers"
        raise UnsupportedError(f"no {lacking} to build {name}", hint="apt-get install clang libbpf-dev")
    headers = f"-I/usr/include/{platform.machine()}-linux-gnu"  # clang does not look there for this target
    compile_to(target, [compiler, *_BPF_FLAGS, headers, "-c", str(source)], name)
    return True
