"""Pausing a sandbox: the kernel's freezer (cgroup version 2) stops all of its processes where they are."""

import threading
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from protocol.clock import Clock
from sandbox.errors import SandboxError, UnsupportedError

_PATIENCE_S = 5.0  # a process deep in the kernel stops when it leaves it


class Freezer:
    """One sandbox's. Thread-safe. `resumed` is called after each end of a pause."""

    def __init__(self, group: Path | None, clock: Clock, resumed: Callable[[], None]) -> None:
        self._group, self._clock, self._resumed = group, clock, resumed
        self._lock = threading.Lock()  # guards what follows, and writes to the group
        self._since_ns: int | None = None
        self._total_ns = 0

    @property
    def is_paused(self) -> bool:
        return self._since_ns is not None

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
                hint="mount it (also beside version 1), or let the host delegate a group",
            )
        with self._lock:
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
        """Idempotent; does not block."""
        with self._lock:
            if self._since_ns is None or self._group is None:
                return
            with suppress(FileNotFoundError):  # it has ended
                _write(self._group, "0")
            self._total_ns += self._clock.now_ns() - self._since_ns
            self._since_ns = None
        self._resumed()


def _write(group: Path, value: str) -> None:
    (group / "cgroup.freeze").write_text(value)


def _is_frozen_soon(group: Path) -> bool:
    give_up_s = time.monotonic() + _PATIENCE_S
    while "frozen 1" not in (group / "cgroup.events").read_text():
        if time.monotonic() > give_up_s:
            return False
        time.sleep(0.0005)
    return True
