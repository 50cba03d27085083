"""The gateway's end of the token sockets: submits requests and gives out their tokens in order."""

import asyncio
import itertools
import secrets
from collections.abc import AsyncGenerator, Sequence
from contextlib import AsyncExitStack, aclosing, suppress
from pathlib import Path
from types import TracebackType
from typing import Self

from actors.frames import BrokenFrame, pack_to_engine, read_from_engine
from protocol.clock import SystemClock
from protocol.errors import DockyardError
from protocol.sampling import SamplingParams
from protocol.wire import Abort, Failed, FromEngine, Hello, Submit, ToEngine, Tokens


class RequestFailed(DockyardError):
    """The engine ended a request with an error."""

    def __init__(self, failure: Failed) -> None:
        super().__init__(failure.message)
        self.failure = failure


class TokenClient:
    """Connections to one prefill worker (or one that does both) and its decode workers.

    Use as an async context manager. Any number of `generate` calls may run at once.
    """

    def __init__(self, entry: Path, others: Sequence[Path] = ()) -> None:
        self._paths = (entry, *others)
        self._client = f"gw-{secrets.token_hex(4)}"
        self._numbers = itertools.count()
        self._clock = SystemClock()
        self._writers: list[asyncio.StreamWriter] = []
        self._readers: list[asyncio.Task[None]] = []
        self._queues: dict[str, asyncio.Queue[FromEngine]] = {}
        self._started: set[str] = set()
        self.lost: str = ""  # why a connection broke; new requests are refused with it
        self._broken = asyncio.Event()

    @property
    def num_running(self) -> int:
        """Requests whose first token is there."""
        return len(self._started)

    @property
    def num_waiting(self) -> int:
        """Requests that are queued or in prefill."""
        return len(self._queues) - len(self._started)

    async def until_lost(self) -> None:
        """Returns when a connection has broken; `lost` says why."""
        await self._broken.wait()

    async def __aenter__(self) -> Self:
        async with AsyncExitStack() as opened:
            opened.push_async_callback(self._close)
            for path in self._paths:
                reader, writer = await asyncio.open_unix_connection(str(path))
                self._writers.append(writer)
                self._send(writer, Hello(self._client))
                self._readers.append(asyncio.create_task(self._receive(reader, path.name)))
            opened.pop_all()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self._close()

    async def _close(self) -> None:
        for task in self._readers:
            task.cancel()
        await asyncio.gather(*self._readers, return_exceptions=True)
        for writer in self._writers:
            writer.close()
            with suppress(ConnectionError):
                await writer.wait_closed()

    async def generate(
        self, prompt_ids: Sequence[int], sampling: SamplingParams, priority: int = 0, arrived_ns: int = 0
    ) -> AsyncGenerator[Tokens]:
        """Tokens in order until one carries a finish reason. Raises RequestFailed.

        `arrived_ns`: when the request had come, on this host's monotonic clock; 0: now.

        Closing the iterator early, cancelling its task, or a failure aborts the request on every worker: one
        that has lost the other would go on with it.
        """
        request_id = f"{self._client}/{next(self._numbers)}"
        if self.lost:
            raise RequestFailed(Failed(request_id, "lost", self.lost))
        inbox: asyncio.Queue[FromEngine] = asyncio.Queue()
        self._queues[request_id] = inbox
        finished = False
        try:
            self._send(
                self._writers[0],
                Submit(request_id, tuple(prompt_ids), sampling, arrived_ns or self._clock.now_ns(), priority),
            )
            async with aclosing(_in_order(inbox)) as ordered:
                async for tokens in ordered:
                    finished = tokens.finish_reason is not None
                    self._started.add(request_id)
                    yield tokens
        finally:
            del self._queues[request_id]
            self._started.discard(request_id)
            if not finished:
                for writer in self._writers:
                    self._send(writer, Abort(request_id))

    async def _receive(self, reader: asyncio.StreamReader, name: str) -> None:
        try:
            while True:
                for message in await read_from_engine(reader):
                    if inbox := self._queues.get(message.request_id):
                        inbox.put_nowait(message)
        except (asyncio.IncompleteReadError, ConnectionError, BrokenFrame) as error:
            self.lost = f"the connection to {name} is gone ({type(error).__name__})"
            self._broken.set()
            for request_id, inbox in self._queues.items():
                inbox.put_nowait(Failed(request_id, "lost", self.lost))

    def _send(self, writer: asyncio.StreamWriter, message: ToEngine) -> None:
        if not writer.is_closing():
            writer.write(pack_to_engine(message))


async def _in_order(inbox: "asyncio.Queue[FromEngine]") -> AsyncGenerator[Tokens]:
    """Two workers send over two sockets, so a later token can arrive before an earlier one."""
    expected = 0
    early: dict[int, Tokens] = {}
    while True:
        message = await inbox.get()
        if isinstance(message, Failed):
            raise RequestFailed(message)
        early[message.index] = message
        while (tokens := early.pop(expected, None)) is not None:
            yield tokens
            if tokens.finish_reason is not None:
                return
            expected += len(tokens.token_ids)
