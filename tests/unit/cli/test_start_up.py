"""Commands that serve nothing start without what serving needs."""

import subprocess
import sys

import pytest


@pytest.mark.parametrize("command", ["down", "status", "team", "sandbox", "eval", "demo"])
def test_a_light_command_brings_neither_torch_nor_ray(command: str) -> None:
    program = (
        "import sys; from cli.main import run; run([sys.argv[1], '--help']);"
        "print([name for name in ('torch', 'ray', 'fastapi') if name in sys.modules], file=sys.stderr)"
    )
    done = subprocess.run(
        [sys.executable, "-c", program, command], capture_output=True, text=True, check=True
    )
    assert done.stderr.splitlines()[-1] == "[]"
