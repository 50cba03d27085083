"""An agent's box as those who use it see it: one at a time, in the order in which they came.

The owner works in it, and teammates read it. Whoever comes while it is in use queues, and the log says so:
a `tool.queue` with an `unblock` edge from the use that it waited for, so that nobody else's command is
charged to the one who waits for its end.
"""

import asyncio
from collections.abc import AsyncGenerator
from contextlib import ExitStack, asynccontextmanager

from protocol.events import Scalar
from teams.recorder import Recorder, Span


class Desk:
    """Who may use one box now. Belongs to one event loop."""

    def __init__(self) -> None:
        self._lock = asyncio.Lock()
        self._claims = 0  # uses and queued ones; the lock alone reads as free while it passes to the next
        self._last_use = ""

    @asynccontextmanager
    async def use(self, recorder: Recorder, name: str, **attributes: Scalar) -> AsyncGenerator[Span]:
        """Holds the box for one `tool.run` of the recorder's agent. May be cancelled, in the queue too."""
        self._claims += 1
        with ExitStack() as held:
            held.callback(self._leave)
            if self._claims == 1:
                await self._take(held)
            else:
                with recorder.interval("tool.queue", name):
                    await self._take(held)
                    if self._last_use:
                        recorder.caused_by("unblock", self._last_use)
            with recorder.interval("tool.run", name, **attributes) as span:
                self._last_use = span.id
                yield span

    async def _take(self, held: ExitStack) -> None:
        await self._lock.acquire()
        held.callback(self._lock.release)

    def _leave(self) -> None:
        self._claims -= 1
