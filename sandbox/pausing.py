"""Pausing a sandbox: the kernel's freezer (cgroup version 2) stops all of its processes where they are."""

import errno
import threading
import time
from collections.abc import Callable, Generator
from contextlib import contextmanager
from pathlib import Path

from protocol.clock import Clock
from sandbox.errors import SandboxError, UnsupportedError

_ENDED = frozenset({errno.ENOENT, errno.ENODEV})  # its group is gone, or goes while it is open
_PATIENCE_S = 5.0  # a process deep in the kernel stops when it leaves it


class Freezer:
    """One sandbox's. Thread-safe. `resumed` is called after each end of a pause."""

    def __init__(self, group: Path | None, clock: Clock, resumed: Callable[[], None]) -> None:
        self._group, self._clock, self._resumed = group, clock, resumed
        self._turn = threading.Lock()  # one hold at a time
        self._lock = threading.RLock()  # guards what follows, and writes to the group
        self._since_ns: int | None = None
        self._total_ns = 0
        self._is_held = False
        self._resume_after_hold = False

    @property
    def is_paused(self) -> bool:
        return self._since_ns is not None

    @property
    def is_held(self) -> bool:
        """While a `held` block runs."""
        return self._is_held

    def paused_ns(self) -> int:
        """How long it has been paused so far, in all."""
        with self._lock:
            return self._total_ns + (0 if self._since_ns is None else self._clock.now_ns() - self._since_ns)

    def pause(self) -> None:
        """Blocks until all processes stand still, milliseconds. Idempotent.

        Raises UnsupportedError where there is no such group, SandboxError where a process will not stop; the
        sandbox then runs on.
        """
        if self._group is None:
            raise UnsupportedError(
                "pausing needs cgroup version 2, and this process may make no groups of it",
                capability="cgroups of version 2",
                hint="mount it (also beside version 1) and run as root, let the host delegate a group, "
                "or have root run `dockyard node helper --user NAME`",
            )
        with self._lock:
            self._resume_after_hold = False
            if self._since_ns is not None:
                return
            _write(self._group, "1")
            if not _is_frozen_soon(self._group):
                _write(self._group, "0")
                raise SandboxError(
                    f"a process of the sandbox did not stop within {_PATIENCE_S:g} s, so it runs on"
                )
            self._since_ns = self._clock.now_ns()

    def resume(self) -> None:
        """Idempotent; does not block. While it is held, this is done when the hold ends."""
        with self._lock:
            if self._is_held:
                self._resume_after_hold = True
                return
        self.release()

    def release(self) -> None:
        """Resumes even what is held: for a sandbox that has ended, whose processes are to go."""
        with self._lock:
            if self._since_ns is None or self._group is None:
                return
            try:
                _write(self._group, "0")
            except OSError as error:
                if error.errno not in _ENDED:
                    raise
            self._total_ns += self._clock.now_ns() - self._since_ns
            self._since_ns = None
        self._resumed()

    @contextmanager
    def held(self) -> Generator[None]:
        """Paused for as long as the block runs, whatever is asked of the sandbox meanwhile: that waits for
        the end, which also resumes what was not paused before. Raises what `pause` raises."""
        with self._turn:
            with self._lock:
                was_paused = self.is_paused
                self.pause()
                self._is_held, self._resume_after_hold = True, not was_paused
            try:
                yield
            finally:
                with self._lock:
                    self._is_held = False
                    goes_on = self._resume_after_hold
                if goes_on:
                    self.release()
                else:
                    self._resumed()  # a lifetime that has ended meanwhile counts now


def _write(group: Path, value: str) -> None:
    (group / "cgroup.freeze").write_text(value)


def _is_frozen_soon(group: Path) -> bool:
    give_up_s = time.monotonic() + _PATIENCE_S
    while "frozen 1" not in (group / "cgroup.events").read_text():
        if time.monotonic() > give_up_s:
            return False
        time.sleep(0.0005)
    return True
