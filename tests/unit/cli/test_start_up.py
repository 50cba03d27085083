"""Commands that serve nothing start without what serving needs."""

import subprocess
import sys

import pytest

HEAVY = ("torch", "ray", "fastapi", "numpy", "networkx", "aiohttp", "openai")
DATABASE = ("sqlalchemy", "httpx")


@pytest.mark.parametrize(
    ("command", "heavy"),
    [*((name, HEAVY + DATABASE) for name in ("down", "status", "up", "chat", "sandbox", "model")),
     *((name, HEAVY) for name in ("team", "eval", "demo", "doctor"))],
)  # fmt: skip
def test_a_command_brings_only_what_it_needs(command: str, heavy: tuple[str, ...]) -> None:
    program = (
        "import sys; from cli.main import run; run([sys.argv[1], '--help']);"
        "print([name for name in sys.argv[2].split(',') if name in sys.modules], file=sys.stderr)"
    )
    done = subprocess.run(
        [sys.executable, "-c", program, command, ",".join(heavy)], capture_output=True, text=True, check=True
    )
    assert done.stderr.splitlines()[-1] == "[]"


def test_a_server_has_one_thread_when_it_begins_to_hold_signals_back() -> None:
    """A thread that is there before would take the signal, under whatever handler Ray's libraries set."""
    program = "import os; import cli.root, cli.serve; print(len(os.listdir('/proc/self/task')))"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout == "1\n"
