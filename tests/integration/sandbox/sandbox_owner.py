"""Another process that owns a sandbox."""

import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from sandbox.audit import sweep

_REPOSITORY = Path(__file__).parents[3]
_SCRIPT = """
import sys
from sandbox import Policy, Sandbox
state, toolkit = sys.argv[1:]
box = Sandbox.create(
    state_dir=state, toolkit=toolkit, labels={"team": "red"}, lifetime_s=600, env={"TOKEN": "canary"},
    policy=Policy(max_timeout_s=600),
)
running = box.commands.start("sleep 600", timeout_s=600)
print(box.id, flush=True)
print(running.wait().reason, box.ended.reason, flush=True)
sys.stdin.readline()
"""


class Owner:
    """Its sandbox runs a command of 600 seconds; a line more comes when that has ended."""

    def __init__(self, state_dir: Path, toolkit: Path) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-c", _SCRIPT, str(state_dir), str(toolkit)], cwd=_REPOSITORY, text=True,
            stdin=subprocess.PIPE, stdout=subprocess.PIPE,
        )  # fmt: skip
        self.id = self.line()

    def line(self) -> str:
        assert self.process.stdout is not None
        return self.process.stdout.readline().strip()

    def end(self) -> None:
        with self.process:
            self.process.kill()


@contextmanager
def owned(state_dir: Path, toolkit: Path) -> Iterator[Owner]:
    """Ended, and what it left removed, with the block."""
    owner = Owner(state_dir, toolkit)
    try:
        yield owner
    finally:
        owner.end()
        sweep(state_dir)
