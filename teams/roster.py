"""Who is in the team, who is blocked on whom, and how each one ended.

A wait that nobody can end any more (everyone else has finished or waits as well) is ended here, and says so:
a team of language models must not hang on a promise that its members forgot.
"""

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Literal

from protocol.errors import InvalidInput
from teams.workspace import Diff

AGENT_NAME = r"[a-z][a-z0-9_-]{0,15}"
EndState = Literal["done", "failed", "cancelled"]


@dataclass(frozen=True, slots=True)
class Outcome:
    """How one agent ended."""

    name: str
    state: EndState
    summary: str
    diff: Diff = field(default_factory=Diff)
    last_interval: str | None = None


@dataclass(frozen=True, slots=True)
class _Waiter:
    woken: asyncio.Future[bool]  # True: look again; False: give up
    joins: bool


class Roster:
    """The members of one team. Belongs to one event loop."""

    def __init__(self) -> None:
        self._live: set[str] = set()
        self._outcomes: dict[str, Outcome] = {}
        self._blocked: dict[str, _Waiter] = {}

    @property
    def live(self) -> frozenset[str]:
        """The members that have not ended."""
        return frozenset(self._live)

    def join(self, name: str) -> None:
        """Adds a member. Raises `InvalidInput` for a name that was ever used in this team."""
        if name in self._live or name in self._outcomes:
            raise InvalidInput(f"the name {name!r} is taken", hint="choose another")
        self._live.add(name)

    def finish(self, outcome: Outcome) -> None:
        """Notes how a member ended and wakes those who may wait for it."""
        self._live.discard(outcome.name)
        self._outcomes[outcome.name] = outcome
        self.notify()

    def outcome(self, name: str) -> Outcome | None:
        """How `name` ended; None while it is live. Raises `InvalidInput` for a stranger."""
        if name not in self._live and name not in self._outcomes:
            raise InvalidInput(f"nobody is called {name!r}", hint=f"known: {', '.join(self.names())}")
        return self._outcomes.get(name)

    def names(self) -> list[str]:
        """All members, ended ones too, sorted."""
        return sorted({*self._live, *self._outcomes})

    def notify(self) -> None:
        """Something changed (a message, an end): everyone blocked looks again."""
        self._wake(list(self._blocked), True)

    async def until(self, name: str, ready: Callable[[], bool], *, joins: bool) -> bool:
        """Blocks member `name` until `ready()`. False: nobody is left who could make it so.

        `joins`: what is waited for is the end of others. May be cancelled.
        """
        while not ready():
            waiter = _Waiter(asyncio.get_running_loop().create_future(), joins)
            self._blocked[name] = waiter
            if self._blocked.keys() >= self._live:
                self._release()
            try:
                changed = await waiter.woken
            finally:
                if self._blocked.get(name) is waiter:
                    del self._blocked[name]
            if not changed:
                return ready()
        return True

    def _release(self) -> None:
        # Each of the blocked has looked since the last change, so no one will ever be ready. Those who wait
        # for messages give up first: when they end, the joins on them may still come true.
        hopeless = [name for name, waiter in self._blocked.items() if not waiter.joins]
        self._wake(hopeless or list(self._blocked), False)

    def _wake(self, names: list[str], look_again: bool) -> None:
        for name in names:
            waiter = self._blocked.pop(name)
            if not waiter.woken.done():
                waiter.woken.set_result(look_again)
