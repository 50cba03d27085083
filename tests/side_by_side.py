"""The tests of `make test`: two runs of pytest side by side, as sandboxes mostly wait and models compute.

`python tests/side_by_side.py [PYTEST ARGUMENTS]`. What takes or counts things of the whole machine (mounts,
cgroups, ids and networks of sandboxes, clusters) is in the first run and meets nothing else of its kind; the
second has all the rest. The first one's words come as they are said, the second's behind them. Ends with the
first run's code where something was wrong there, else with the second's.
"""

import signal
import subprocess
import sys
import tempfile
import threading
from pathlib import Path

TESTS = Path(__file__).resolve().parent
OF_THE_MACHINE = (
    *("attacks", "integration/bench", "integration/cli", "integration/evals", "integration/sandbox"),
    *("integration/serving", "integration/teams", "unit/sandbox"),
)
OK, NO_TESTS = 0, 5  # pytest's: what was chosen may all be in the other run


def main(arguments: list[str]) -> int:
    """Interrupted, it waits for what the runs then give back: Ctrl-C reaches them by itself."""
    pytest = [sys.executable, "-m", "pytest", "-m", "not soak", *arguments]
    folders = [str(TESTS / each) for each in OF_THE_MACHINE]
    # Ray has its workers at this, and beside others at none they would hardly run.
    rest = ["nice", "-n", "15", *pytest, *(f"--ignore={each}" for each in folders), str(TESTS)]
    runs, is_ended = list[subprocess.Popen[bytes]](), threading.Event()

    def end(*_: object) -> None:
        is_ended.set()
        for each in runs:
            each.send_signal(signal.SIGINT)

    # Before there are runs: these begin without handlers, and with no signal ignored.
    signal.signal(signal.SIGINT, lambda *_: None)
    signal.signal(signal.SIGTERM, end)
    with tempfile.TemporaryFile() as said:
        runs.append(subprocess.Popen([*pytest, *folders], stdin=subprocess.DEVNULL))
        runs.append(subprocess.Popen(rest, stdin=subprocess.DEVNULL, stdout=said, stderr=subprocess.STDOUT))
        if is_ended.is_set():
            end()
        codes = [each.wait() for each in runs]
        said.seek(0)
        print("\nMeanwhile, beside it:", flush=True)
        sys.stdout.buffer.write(said.read())
        sys.stdout.flush()
    return verdict(*codes)


def verdict(first: int, second: int) -> int:
    """Of two of pytest's codes, or of signals, which are below zero."""
    wrong = [code for code in (first, second) if code not in (OK, NO_TESTS)]
    return abs(wrong[0]) if wrong else min(first, second)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
