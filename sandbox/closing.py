"""Creates that are under way when this process ends, and those that come then."""

import threading
from collections.abc import Generator
from contextlib import contextmanager

from sandbox.errors import StartError
from sandbox.forks import leave_in_children

PATIENCE_S = 30.0  # at the end, for what is being made: as long as one may take to begin, and some


class Gate:
    """Open until this process ends. Thread-safe."""

    def __init__(self) -> None:
        self.leave()
        leave_in_children(self)

    def leave(self) -> None:
        """In a child of a fork, whose creates are its own."""
        self._changed = threading.Condition(threading.Lock())  # guards what follows
        self._num_inside, self._is_closed = 0, False

    @contextmanager
    def passing(self) -> Generator[None]:
        """While one is made. StartError once it is closed."""
        changed = self._changed  # a fork within the block leaves the parent's to the parent
        with changed:
            if self._is_closed:
                raise StartError(
                    "this process is ending, and its sandboxes with it", phase="exit",
                    hint="end the threads that create sandboxes before it, or create them elsewhere",
                )  # fmt: skip
            self._num_inside += 1
        try:
            yield
        finally:
            with changed:
                if changed is self._changed:
                    self._num_inside -= 1
                    changed.notify_all()

    def close(self) -> None:
        """Nobody passes from now on. Idempotent."""
        with self._changed:
            self._is_closed = True

    def wait(self, patience_s: float) -> bool:
        """Until nobody is inside. False where somebody still is after `patience_s`."""
        with self._changed:
            return self._changed.wait_for(lambda: self._num_inside == 0, patience_s)
