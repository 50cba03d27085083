"""Commands that serve nothing start without what serving needs."""

import subprocess
import sys

import pytest


@pytest.mark.parametrize("command", ["down", "status", "team", "sandbox", "eval", "demo"])
def test_a_light_command_brings_neither_torch_nor_ray(command: str) -> None:
    program = (
        "import sys; from cli.main import run; run([sys.argv[1], '--help']);"
        "heavy = ('torch', 'ray', 'fastapi', 'numpy');"
        "print([name for name in heavy if name in sys.modules], file=sys.stderr)"
    )
    done = subprocess.run(
        [sys.executable, "-c", program, command], capture_output=True, text=True, check=True
    )
    assert done.stderr.splitlines()[-1] == "[]"


def test_a_server_has_one_thread_when_it_begins_to_hold_signals_back() -> None:
    """A thread that is there before would take the signal, under whatever handler Ray's libraries set."""
    program = "import os; import cli.main; print(len(os.listdir('/proc/self/task')))"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout == "1\n"
