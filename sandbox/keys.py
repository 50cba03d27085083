"""Idempotent creation: one key, one order, one sandbox.

A key is scoped to this process and a state directory, and names one sandbox for good: whoever uses it again
with the same order gets that sandbox, and after its end hears that it has ended. A retry that comes late
therefore never makes a second sandbox that nobody waits for. A create that fails makes nothing, so it frees
its key.
"""

import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass
from pathlib import Path
from typing import Generic, Protocol, TypeVar

from sandbox.arguments import check_type
from sandbox.errors import CapacityError, Conflict, InvalidArgument, SandboxGone
from sandbox.forks import leave_in_children
from sandbox.orders import Order, difference

MAX_KEY = 255  # characters
REMEMBERED_S = 86_400.0  # after a sandbox has ended; as long as payment services do
MAX_ENDED = 10_000  # keys of ended sandboxes that are remembered
_STEP = 256


class Keyed(Protocol):
    """What a key stands for."""

    @property
    def ended(self) -> SandboxGone | None:
        """Why it is no more; None while it is there."""
        ...


T = TypeVar("T", bound=Keyed)


@dataclass(slots=True)
class _Entry(Generic[T]):
    order: Order
    state: "Future[T] | SandboxGone"  # the sandbox, or how it ended
    ended_s: float = 0.0


class Keys(Generic[T]):
    """Thread-safe."""

    def __init__(self, now_s: Callable[[], float] = time.monotonic) -> None:
        self._now_s = now_s
        self._lock = threading.Lock()  # guards what follows
        self._entries: dict[tuple[Path, str], _Entry[T]] = {}
        self._look_at = _STEP  # entries, at which ended ones are looked for
        leave_in_children(self)

    def leave(self) -> None:
        """In a child of a fork: keys stand for its parent's sandboxes, or for creates that no thread of its
        own goes on with."""
        self._lock, self._entries, self._look_at = threading.Lock(), {}, _STEP

    def get_or_make(self, key: str, order: Order, make: Callable[[], T]) -> T:
        """What the key stands for, made if this is its first use. Blocks while another thread makes it, and
        then raises what that raises.

        Raises Conflict for a key of another order, SandboxGone for one whose sandbox has ended,
        InvalidArgument for an empty or overlong key.
        """
        check_type("key", key, str)
        if not 0 < len(key) <= MAX_KEY:
            raise InvalidArgument(
                f"key of {len(key)} characters", hint=f"use 1 to {MAX_KEY}, such as a request's id"
            )
        place = (order.state_dir, key)
        mine: Future[T] = Future()
        with self._lock:
            self._forget()
            entry = self._entries.get(place)
            if entry is None:
                self._entries[place] = _Entry(order, mine)
        if entry is not None:
            return _known(key, entry, order)
        try:
            mine.set_result(make())
        except BaseException as error:
            with self._lock:
                del self._entries[place]
            # An interrupt is this thread's; whoever waits for the sandbox is only told that there is none.
            is_interrupt = not isinstance(error, Exception)
            interrupted = CapacityError(f"key={key!r}: the create that had begun was interrupted")
            mine.set_exception(interrupted if is_interrupt else error)
            raise
        return mine.result()

    def _forget(self) -> None:
        """Lets go of ended sandboxes and, later, of their keys. Looks at all of them, so not every time."""
        if len(self._entries) < self._look_at:
            return
        num_ended = 0
        for place, entry in reversed(list(self._entries.items())):
            if isinstance(entry.state, Future) and entry.state.done():
                end = entry.state.result().ended
                if end is not None:
                    entry.state, entry.ended_s = end, self._now_s()
            if isinstance(entry.state, SandboxGone):
                num_ended += 1
                if num_ended > MAX_ENDED or self._now_s() - entry.ended_s > REMEMBERED_S:
                    del self._entries[place]
        self._look_at = len(self._entries) + _STEP


def _known(key: str, entry: "_Entry[T]", order: Order) -> T:
    if differs := difference(entry.order, order):
        raise Conflict(
            f"key={key!r} was used for another sandbox: now it has {differs}",
            hint="repeat the request as it was, or use a new key",
        )
    state = entry.state
    if isinstance(state, Future):
        made = state.result()
        end = made.ended
        if end is None:
            return made
    else:
        end = state
    text = f"key={key!r} stands for a sandbox that is no more: {end.message}"
    raise SandboxGone(text, reason=end.reason, hint="use a new key for a new one", sandbox_id=end.sandbox_id)
