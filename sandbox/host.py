"""What commands and files need of the sandbox that they are of."""

from contextlib import AbstractContextManager
from typing import Protocol

from sandbox.cgroups import Counters
from sandbox.errors import SandboxGone


class Host(Protocol):
    """A sandbox, as its commands and file operations see it. Thread-safe."""

    def counters(self) -> Counters:
        """How often limits have bitten so far."""
        ...

    def counters_before(self) -> Counters:
        """The same for what is about to begin."""
        ...

    def room(self, num_bytes: int) -> AbstractContextManager[bool]:
        """Whether the sandbox's memory has room for so many bytes, which the block then writes."""
        ...

    def break_off(self) -> None:
        """Ends the sandbox, which did not end a command. Called on the channel's thread; does not block."""
        ...

    def gone(self) -> SandboxGone | None:
        """Why the sandbox has ended, None while it has not."""
        ...

    def begin(self) -> None:
        """A command or file operation starts; a paused sandbox goes on."""
        ...

    def touch(self) -> None:
        """Something is asked of one that runs; a paused sandbox goes on."""
        ...

    def is_paused(self) -> bool:
        """Time stands still for what runs in it."""
        ...

    def paused_ns(self) -> int:
        """How long the sandbox has been paused so far, in all."""
        ...

    def finish(self) -> None:
        """One that had started has ended. Called on the channel's thread."""
        ...

    def drop(self) -> None:
        """One that had started is over, which the channel's thread has not seen: it was not sent off, say."""
        ...
