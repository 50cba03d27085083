"""A sandbox beside all attacks, which works while they happen and has to be what it was afterwards.

It runs a process of its own from first to last, and one small command after the other while something is
tried. How long these take is held against how long they take when nothing is: on a busy machine both grow.
"""

import threading
import time
from collections import deque
from collections.abc import Generator
from contextlib import contextmanager
from itertools import count
from statistics import fmean, median

from protocol.errors import DockyardError
from sandbox import Sandbox

MARK = "neighbour's own"
# How much longer its commands may take on average while something is tried. The grace is for a pause of the
# whole machine, of which one command may be all there is to see.
SLOWER, GRACE_S = 20.0, 0.5
PATIENCE_S = 60.0
_PAUSE_S = 0.02
_QUIET, _FIRST = 15, 5  # latest commands beside which nothing was tried, and those before the first attack
_SUMS = "sha256sum mark files/*"
_FILES = f"mkdir files; for n in 1 2 3 4 5 6 7 8; do seq $n 500 > files/$n; done; {_SUMS}"
# Little work, so that it takes nothing from an emulated processor.
_RESIDENT = """
import itertools, os, pathlib, time
pathlib.Path("resident").write_text(f"{os.getpid()}\\n")
for number in itertools.count(1):
    pathlib.Path("turns").write_text(str(number))
    time.sleep(0.1)
"""
# Writes a file, starts a program that reads others, and looks for its process.
_BEAT = f"echo $1 > beat; {_SUMS}; read -r up < resident; kill -0 $up && read -r said < beat && echo $said"


class Harmed(Exception):
    """It is not what it was before something was tried."""


class Slowed(Harmed):
    """Its commands took much longer than beside nothing: for what is tried, or since the machine paused."""


class Neighbour:
    """Of one substrate's attacks. `box` may be used meanwhile. One thread at a time. Once it `is_lost`, what
    was done to it cannot be told from what comes after."""

    def __init__(self, box: Sandbox) -> None:
        self.box = box
        self.is_lost = False
        self._numbers = count(1)
        self._quiet_s: deque[float] = deque(maxlen=_QUIET)
        box.files.write("mark", MARK)
        self._sums = box.commands.run(_FILES).stdout
        self._resident = box.commands.start(["python3", "-I", "-c", _RESIDENT], timeout_s=86_400)
        box.commands.run("until [ -s turns ]; do sleep 0.01; done", timeout_s=PATIENCE_S)
        self._turns_before = 0
        for _ in range(_FIRST):
            self._quiet_s.append(self._beat())

    @contextmanager
    def at_work(self) -> Generator[None]:
        """Runs its commands until the block ends. Harmed where one came out otherwise than it does, Slowed
        where they took much longer than beside nothing."""
        ended = threading.Event()
        took_s: list[float] = []
        failed: list[BaseException] = []

        def work() -> None:
            try:
                while True:
                    took_s.append(self._beat())
                    if ended.wait(max(_PAUSE_S, 2 * took_s[-1])):
                        return
            except BaseException as error:  # handed to the caller
                failed.append(error)

        thread = threading.Thread(target=work, name="neighbour")
        thread.start()
        try:
            yield
        finally:
            ended.set()
            thread.join()
        if failed:
            raise failed[0]
        self._compare(took_s)

    def check(self) -> None:
        """Harmed where its files or its process are not what they were, or the process has not gone on since
        the last time."""
        self._quiet_s.append(self._beat())
        if not self._resident.is_running:
            raise self._lost("its process has ended")
        until = time.monotonic() + PATIENCE_S
        while (turns := self._turns()) <= self._turns_before:
            if time.monotonic() > until:
                raise self._lost("its process does not go on")
            time.sleep(_PAUSE_S)
        self._turns_before = turns

    def _compare(self, took_s: list[float]) -> None:
        self.check()
        bound_s = SLOWER * max(median(self._quiet_s), self._quiet_s[-1]) + GRACE_S
        mean_s = fmean(took_s)
        if mean_s > bound_s:
            raise Slowed(f"the neighbour's {len(took_s)} commands took {mean_s:.3f} s, not {bound_s:.3f}")

    def _turns(self) -> int:
        try:
            return int(self.box.files.read("turns") or b"0")
        except (DockyardError, ValueError) as error:
            raise self._lost(f"how far it is: {error}") from error

    def _beat(self) -> float:
        """One command, and how long it took."""
        number = next(self._numbers)
        words = ["sh", "-c", _BEAT, "sh", str(number)]
        started = time.monotonic()
        try:
            done = self.box.commands.run(words, timeout_s=PATIENCE_S)
        except DockyardError as error:
            raise self._lost(str(error)) from error
        took_s = time.monotonic() - started
        if (done.reason, done.stdout) != ("exit", f"{self._sums}{number}\n"):
            raise self._lost(str(done))
        return took_s

    def _lost(self, how: str) -> Harmed:
        self.is_lost = True
        return Harmed(f"the neighbour is not well: {how}")
