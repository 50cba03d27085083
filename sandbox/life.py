"""When a sandbox ends and why: its channel's supervisor, and what commands and files know of it."""

import os
import signal
import threading
from collections.abc import Callable, Generator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from typing import Literal

from protocol.clock import Clock
from sandbox.cgroups import Counters
from sandbox.errors import GoneReason, SandboxError, SandboxGone
from sandbox.forks import close_left, leave_in_children
from sandbox.limits import Limits
from sandbox.ownership import Ownership
from sandbox.pausing import Freezer
from sandbox.room import Room
from sandbox.wire import Frame

_GONE_TEXT: dict[GoneReason, str] = {
    "killed": "was killed by its owner",
    "expired": "has reached the end of its lifetime",
    "idle": "was idle for too long",
    "broken": "would not end a command and was ended",
    "lost": "ended by itself: its first process died",
    "forked": "is the process's that this one was forked from",
}
_HELPER_GONE = "ended with its helper (`dockyard node helper`), which root runs and which has ended"
_HELPER_HINT = "have root start the helper again, then create a new one; root's log says why it ended"
_FORKED_HINT = "ask that process by `sandbox.sandboxes.attach`, or create one of this process's own"


@dataclass(frozen=True, slots=True)
class Timeouts:
    """Seconds. `lifetime_s` counts from the create, `idle_s` from the end of what was asked last."""

    lifetime_s: float
    idle_s: float | None  # None: never
    left_s: float  # of the lifetime


class Life:
    """Thread-safe. Owns a handle on init, through which it ends the sandbox whatever happens to the pid."""

    def __init__(
        self, sandbox_id: str, init_pid: int, limits: Limits, ownership: Ownership, clock: Clock
    ) -> None:
        self._id = sandbox_id
        self._ownership = ownership
        self._clock = clock
        self._lock = threading.Lock()  # guards what follows
        self._reason: GoneReason | None = None
        self._with_helper = False  # it went when that did
        self._num_active = self._num_begun = 0
        self._still: Counters | None = Counters()  # while nothing runs; None where they have to be read
        self._began_ns = self._last_used_ns = clock.now_ns()
        self._expires_ns = self._began_ns + int(limits.lifetime_s * 1e9)
        self._idle_s = limits.idle_s
        self.freezer = Freezer(ownership.groups.unified, clock, self._on_resume, name=sandbox_id)
        self._room = _room(ownership, limits)
        self.wake: Callable[[], None] = lambda: None  # the channel's, once there is one, as the next
        self.hang_up: Callable[[], None] = lambda: None
        self._init: int | None = os.pidfd_open(init_pid)  # guarded too; the last that can fail
        leave_in_children(self)

    def end(self, reason: GoneReason) -> None:
        """Kills init, and with it the whole sandbox. The first reason stays. Does not block."""
        with self._lock:
            self._reason = self._reason or reason
            may_signal = self._init is None or _kill(self._init)
        if not may_signal:
            self.hang_up()
        self.freezer.release()  # what is outside of init, such as its launcher, ends by itself

    def close(self) -> None:
        """Lets go of the handle. Idempotent."""
        with self._lock:
            init, self._init = self._init, None
        if init is not None:
            os.close(init)

    def leave(self) -> None:
        """In a child of a fork: the sandbox lives on, and is another process's."""
        self._lock, self._reason = threading.Lock(), self._reason or "forked"
        init, self._init = self._init, None
        close_left(init)
        self.freezer.leave()
        self.freezer = Freezer(None, self._clock, lambda: None, name=self._id)

    def gone(self) -> SandboxGone | None:
        """Why the sandbox has ended, None while it has not."""
        with self._lock:
            reason, with_helper = self._reason, self._with_helper
        if reason is None:
            return None
        text = f"sandbox {self._id} {_HELPER_GONE if with_helper else _GONE_TEXT[reason]}"
        hint = _FORKED_HINT if reason == "forked" else _HELPER_HINT if with_helper else "create a new one"
        return SandboxGone(text, reason=reason, hint=hint, sandbox_id=self._id)

    def set_timeout(self, lifetime_s: float | None, idle_s: float | Literal["keep"] | None) -> None:
        """See `Sandbox.set_timeout`, which has checked them. Raises SandboxGone."""
        with self._lock:
            if self._reason is None:
                if lifetime_s is not None:
                    self._expires_ns = self._clock.now_ns() + int(lifetime_s * 1e9)
                if idle_s != "keep":
                    self._idle_s, self._last_used_ns = idle_s, self._clock.now_ns()
        if (gone := self.gone()) is not None:
            raise gone
        self.wake()

    def timeouts(self) -> Timeouts:
        """Those that hold now."""
        with self._lock:
            lifetime_s = (self._expires_ns - self._began_ns) / 1e9
            left_s = (self._expires_ns - self._clock.now_ns()) / 1e9
            return Timeouts(lifetime_s, self._idle_s, max(0.0, left_s))

    def counters(self) -> Counters:
        """How often limits have bitten so far."""
        with self._lock:
            num_begun = self._num_begun
            # What a network policy has refused is heard of a moment later.
            is_alone = self._num_active <= 1 and self._ownership.connection is None
        found = self._ownership.counters()
        with self._lock:
            if is_alone and num_begun == self._num_begun:
                self._still = found
        return found

    def counters_before(self) -> Counters:
        """The same for what is about to begin: while nothing runs they stand still, and are known."""
        with self._lock:
            still = self._still if self._num_active == 0 else None
        return still or self.counters()

    def room(self, num_bytes: int) -> AbstractContextManager[bool]:
        """See `Room.taken`."""
        return self._room.taken(num_bytes)

    def break_off(self) -> None:
        """Ends a sandbox that does not end a command."""
        self.end("broken")

    def is_paused(self) -> bool:
        """Time stands still for its commands."""
        return self.freezer.is_paused

    def paused_ns(self) -> int:
        """How long it has been paused so far, in all."""
        return self.freezer.paused_ns()

    def touch(self) -> None:
        """Something is asked of the sandbox, which a paused one cannot do."""
        self.freezer.resume()

    def pause(self) -> None:
        """See `Freezer.pause`. Raises SandboxGone."""
        with self._lasting():
            self.freezer.pause()
            if (gone := self.gone()) is not None:
                self.freezer.release()
                raise gone

    @contextmanager
    def held(self) -> Generator[None]:
        """Nothing in it runs for as long as the block does (see `Freezer.held`). Raises SandboxGone."""
        with self._lasting(), self.freezer.held():
            yield

    @contextmanager
    def _lasting(self) -> Generator[None]:
        if (gone := self.gone()) is not None:
            raise gone
        try:
            yield
        except (SandboxError, OSError):
            if (gone := self.gone()) is not None:  # which is why it failed
                raise gone from None
            raise

    @contextmanager
    def busy(self) -> Generator[None]:
        """It is not idle while the block runs. A paused one stays so."""
        with self._lock:
            self._num_active += 1
            self._still = None
        try:
            yield
        finally:
            self.drop()

    def begin(self) -> None:
        """Something starts to run in the sandbox: it is not idle, nor paused."""
        self.touch()
        with self._lock:
            self._num_active += 1
            self._num_begun += 1
            self._still = None

    def finish(self) -> None:
        """It has ended; when it was the last, the idle time starts."""
        with self._lock:
            self._num_active -= 1
            self._last_used_ns = self._clock.now_ns()

    def drop(self) -> None:
        """The same of what the channel's thread has not seen end: it has to hear when idle time ends."""
        self.finish()
        self.wake()

    def on_frame(self, frame: Frame) -> bool:
        """Channel thread: init sends nothing to the sandbox as a whole."""
        del frame
        return False

    def on_lost(self) -> None:
        """At the channel's end: the stream has ended, by us or by itself."""
        has_lost_helper = self._ownership.has_lost_helper()
        with self._lock:
            self._with_helper = self._reason is None and has_lost_helper
        self.end("lost")

    def deadline_ns(self) -> int | None:
        """End of its lifetime, or of its idle time. None while its layer is being copied: what has been begun
        is not cut short."""
        with self._lock:
            return self._deadline_ns()

    def _deadline_ns(self) -> int | None:
        if self._reason is not None or self.freezer.is_held:
            return None
        if self._idle_s is None or self._num_active > 0 or self.freezer.is_paused:
            return self._expires_ns
        return min(self._expires_ns, self._last_used_ns + int(self._idle_s * 1e9))

    def _on_resume(self) -> None:
        with self._lock:
            self._last_used_ns = self._clock.now_ns()
        self.wake()

    def on_deadline(self) -> None:
        """Channel thread: one of the two is over, unless somebody has just set it anew."""
        with self._lock:
            deadline_ns, now_ns = self._deadline_ns(), self._clock.now_ns()
            if deadline_ns is None or deadline_ns > now_ns:
                return
            self._reason = reason = "expired" if now_ns >= self._expires_ns else "idle"
        self.end(reason)


def _kill(init: int) -> bool:
    """False for an owner that has dropped root since: init ends when the control socket closes, too."""
    try:
        signal.pidfd_send_signal(init, signal.SIGKILL)
    except ProcessLookupError:  # it was quicker
        return True
    except PermissionError:
        return False
    return True


def _room(ownership: Ownership, limits: Limits) -> Room:
    group = ownership.groups.memory
    if group is None:
        return Room(None, 1, None)
    return Room(group.path, group.hierarchy.version, limits.memory_bytes)
