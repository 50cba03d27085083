"""A sandbox that is on its way: awaited, or entered by `async with` at once."""

from collections.abc import Coroutine, Generator
from contextlib import AbstractAsyncContextManager
from types import TracebackType
from typing import Any, Generic, TypeVar

M = TypeVar("M", bound=AbstractAsyncContextManager[Any])


class Arrival(Coroutine[Any, Any, M], Generic[M]):
    """The coroutine that it is given, and whatever takes a coroutine takes this. `async with` awaits it, and
    enters what came."""

    def __init__(self, work: Coroutine[Any, Any, M]) -> None:
        self._work = work
        self._made: M | None = None

    def __await__(self) -> Generator[Any, Any, M]:
        return self._work.__await__()

    def send(self, value: Any) -> Any:
        """As a coroutine's."""
        return self._work.send(value)

    def throw(self, typ: Any, val: Any = None, tb: TracebackType | None = None) -> Any:
        """As a coroutine's."""
        if val is None and tb is None:
            return self._work.throw(typ)
        return self._work.throw(typ, val, tb)

    def close(self) -> None:
        """As a coroutine's."""
        self._work.close()

    async def __aenter__(self) -> M:
        self._made = await self._work
        return await self._made.__aenter__()

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> bool | None:
        assert self._made is not None, "nothing has been entered"
        return await self._made.__aexit__(kind, error, trace)
