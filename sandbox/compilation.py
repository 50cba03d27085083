"""One run of a compiler, whose result appears as a whole: whoever reads meanwhile has the old one."""

import os
import subprocess
from collections.abc import Sequence
from pathlib import Path

from sandbox.errors import StartError


def compile_to(target: Path, command: Sequence[str], name: str) -> None:
    """Runs the command with `-o` and a draft's path. StartError with the compiler's words."""
    draft = target.with_name(f"{target.stem}.{os.getpid()}{target.suffix}")
    done = subprocess.run([*command, "-o", str(draft)], capture_output=True, text=True, check=False)
    if done.returncode != 0:
        draft.unlink(missing_ok=True)
        raise StartError(f"compiling {name} failed: {done.stderr.strip()}", phase="build")
    draft.replace(target)
