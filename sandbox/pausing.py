"""Pausing a sandbox: the kernel's freezer (cgroup version 2) stops all of its processes where they are."""

import errno
import os
import threading
import time
from collections.abc import Callable, Generator
from contextlib import contextmanager
from pathlib import Path

from protocol.clock import Clock
from sandbox.errors import SandboxError, UnsupportedError, translated
from sandbox.forks import close_left

_ENDED = frozenset({errno.ENOENT, errno.ENODEV})  # its group is gone, or goes while it is open
_PATIENCE_S = 5.0  # a process deep in the kernel stops when it leaves it


class Freezer:
    """One sandbox's. Thread-safe; only `pause` and `held` block. `resumed` is called after each end of a
    pause. It has a descriptor for as long as a pause lasts, so that none is wanting for its end."""

    def __init__(self, group: Path | None, clock: Clock, resumed: Callable[[], None], *, name: str) -> None:
        self._group, self._clock, self._resumed, self._name = group, clock, resumed, name
        self._turn = threading.Lock()  # one hold at a time
        self._freezing = threading.Lock()  # one that stops it, which may take seconds
        self._lock = threading.Lock()  # guards what follows, for moments
        self._fd: int | None = None  # from when it is to stop until it is to go on
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
        """Blocks until all processes stand still, milliseconds, or until somebody resumes it. Idempotent.

        Raises UnsupportedError where there is no such group, SandboxError where a process will not stop,
        CapacityError where no descriptor is left; the sandbox then runs on.
        """
        with self._freezing:
            with self._lock:
                self._resume_after_hold = False
            self._freeze()

    def resume(self) -> None:
        """Idempotent; does not block. While it is held, this is done when the hold ends."""
        self._go_on(even_if_held=False)

    def release(self) -> None:
        """Resumes even what is held: for a sandbox that has ended, whose processes are to go."""
        self._go_on(even_if_held=True)

    @contextmanager
    def held(self) -> Generator[None]:
        """Paused for as long as the block runs, whatever is asked of the sandbox meanwhile: that waits for
        the end, which also resumes what was not paused before. Raises what `pause` raises."""
        with self._turn:
            with self._freezing:
                with self._lock:
                    self._is_held, self._resume_after_hold = True, not self.is_paused
                try:
                    self._freeze()
                    if not self.is_paused:
                        raise SandboxError("the sandbox has ended meanwhile", sandbox_id=self._name)
                except BaseException:
                    self._is_held = False
                    self._resumed()
                    raise
            try:
                yield
            finally:
                with self._lock:  # in one step: a pause that is asked for finds it held, or going on
                    self._is_held = False
                    if self._resume_after_hold:
                        self._thaw()
                self._resumed()  # also of what stays paused: a lifetime that has ended meanwhile counts now

    def leave(self) -> None:
        """In a child of a fork: the pause is the parent's."""
        close_left(self._fd)

    def _freeze(self) -> None:
        if self._group is None:
            raise UnsupportedError(
                "pausing needs cgroup version 2, and this process may make no groups of it",
                capability="cgroups of version 2",
                hint="mount it (also beside version 1) and run as root, let the host delegate a group, "
                "or have root run `dockyard node helper --user NAME`",
            )
        if self.is_paused:
            return
        try:
            with translated("pausing", sandbox_id=self._name):
                self._stop(self._group)
        except BaseException:
            with self._lock:
                self._thaw()
            raise

    def _stop(self, group: Path) -> None:
        """Until all of it stands still, or somebody resumes it."""
        with (group / "cgroup.events").open() as events:
            with self._lock:
                self._fd = fd = os.open(group / "cgroup.freeze", os.O_WRONLY | os.O_CLOEXEC)
                os.pwrite(fd, b"1", 0)
            give_up_s = time.monotonic() + _PATIENCE_S
            while self._fd == fd and "frozen 1" not in events.read():
                if time.monotonic() > give_up_s:
                    words = f"a process of the sandbox did not stop within {_PATIENCE_S:g} s, so it runs on"
                    raise SandboxError(words, sandbox_id=self._name)
                time.sleep(0.0005)
                events.seek(0)
            with self._lock:
                if self._fd == fd:
                    self._since_ns = self._clock.now_ns()

    def _go_on(self, *, even_if_held: bool) -> None:
        with self._lock:
            if self._is_held and not even_if_held:
                self._resume_after_hold = True
                return
            was_paused, _ = self.is_paused, self._thaw()
        if was_paused:
            self._resumed()

    def _thaw(self) -> None:
        """Under the lock. Nothing happens to what neither stands still nor is about to."""
        if (fd := self._fd) is None:
            return
        if self._since_ns is not None:
            self._total_ns += self._clock.now_ns() - self._since_ns
            self._since_ns = None
        try:
            os.pwrite(fd, b"0", 0)
        except OSError as error:
            if error.errno not in _ENDED:
                raise
        finally:
            self._fd = None  # only now: a child that begins meanwhile closes its own
            os.close(fd)
