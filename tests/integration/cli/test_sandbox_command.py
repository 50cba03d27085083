"""`dockyard sandbox run`: the command's exit code is its own, whatever it is."""

import subprocess
import sys


def test_a_command_that_exits_with_130_was_not_interrupted() -> None:
    command = [sys.executable, "-m", "cli.main", "sandbox", "run", "--", "sh", "-c", "exit 130"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert (done.returncode, done.stderr) == (130, "")
