"""The tests of the C library under AddressSanitizer: `make sanitize`, or `python
tests/sanitize_kernels.py [pytest's arguments]`.

The library is built once more, beside the usual one, and so is each form that a test compiles. A read or
write outside an allocation ends the run with a report. Takes some minutes.
"""

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
TESTS = ("tests/unit/kernels_cpu", "tests/unit/engine/deepseek/test_fused_operations.py")
FLAGS = ("-fsanitize=address", "-fno-omit-frame-pointer", "-g", "-Wno-error")
_MARK = "--inside"


def main(arguments: list[str]) -> int:
    """In a process that has the sanitizer's library before all others, as it must."""
    if _MARK in arguments:
        return run([argument for argument in arguments if argument != _MARK])
    find = subprocess.run(["gcc", "-print-file-name=libasan.so"], capture_output=True, text=True, check=True)
    # Python and PyTorch keep memory to their end, which is no leak of ours.
    sanitizer = {"LD_PRELOAD": find.stdout.strip(), "ASAN_OPTIONS": "detect_leaks=0"}
    command = [sys.executable, __file__, _MARK, *arguments]
    return subprocess.run(command, env={**os.environ, **sanitizer}, cwd=ROOT, check=False).returncode


def run(arguments: list[str]) -> int:
    sys.path.insert(0, str(ROOT))
    from kernels.cpu import build

    build.FLAGS = (*build.FLAGS, *FLAGS)  # part of the library's name
    return pytest.main(["-q", "-p", "no:cacheprovider", *(arguments or TESTS)])


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
