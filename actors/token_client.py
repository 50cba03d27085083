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
from protocol.errors import DockyardError, ResourceShortage
from protocol.sampling import SamplingParams
from protocol.wire import Abort, Failed, FromEngine, Hello, Submit, ToEngine, Tokens

_GREETING_S = 30.0  # for a worker to answer a new connection; its socket's thread has nothing else to do


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
        # Of each request the outputs that have still to end, and whether they have begun.
        self._open: dict[str, dict[int, bool]] = {}
        self.lost: str = ""  # why a connection broke; new requests are refused with it
        self._broken = asyncio.Event()

    @property
    def num_running(self) -> int:
        """Outputs whose first token is there."""
        return sum(sum(outputs.values()) for outputs in self._open.values())

    @property
    def num_waiting(self) -> int:
        """Outputs of requests that are queued or in prefill."""
        return sum(map(len, self._open.values())) - self.num_running

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
                await _greeted(reader, path)
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
        self,
        prompt_ids: Sequence[int],
        sampling: SamplingParams,
        priority: int = 0,
        arrived_ns: int = 0,
        *,
        choices: int = 1,
        cache_salt: str = "",
        slack_ms: float = 0.0,
        generated_ids: Sequence[int] = (),
        resumed: Sequence[int] = (),
    ) -> AsyncGenerator[Tokens]:
        """Tokens of all outputs, in order within each, until each has a finish reason. Raises RequestFailed.

        `arrived_ns`: when the request had come, on this host's monotonic clock; 0: now. `choices`: outputs
        for the one prompt, of which `give_up` ends one. `cache_salt`: prefixes are shared within it alone.
        `slack_ms`: how much later it may start without holding anyone up.
        `generated_ids`, `resumed`: of a stream that goes on (`Tokens`), with the token behind them.

        Closing the iterator early, cancelling its task, or a failure aborts the request on every worker: one
        that has lost the other would go on with it.
        """
        request_id = f"{self._client}/{next(self._numbers)}"
        if self.lost:
            raise RequestFailed(Failed(request_id, "lost", self.lost))
        inbox: asyncio.Queue[FromEngine] = asyncio.Queue()
        self._queues[request_id] = inbox
        still_open = self._open[request_id] = dict.fromkeys(range(choices), False)
        try:
            self._send(
                self._writers[0],
                Submit(
                    request_id,
                    tuple(prompt_ids),
                    sampling,
                    arrived_ns or self._clock.now_ns(),
                    priority,
                    choices,
                    slack_ms,
                    cache_salt,
                    generated_ids=tuple(generated_ids),
                    resumed=tuple(resumed),
                ),
            )
            async with aclosing(_in_order(inbox, len(generated_ids))) as ordered:
                async for tokens in ordered:
                    if tokens.choice not in still_open:
                        continue  # on its way when it was given up
                    still_open[tokens.choice] = True
                    if tokens.finish_reason is not None:
                        del still_open[tokens.choice]
                    yield tokens
                    if not still_open:
                        return
        finally:
            del self._queues[request_id], self._open[request_id]
            if still_open:
                self._abort(Abort(request_id))

    def give_up(self, tokens: Tokens) -> None:
        """End the one output that these tokens are of: it has come to a stop string, say."""
        still_open = self._open.get(tokens.request_id, {})
        if still_open.pop(tokens.choice, None) is not None:
            self._abort(Abort(tokens.request_id, tokens.choice if still_open else -1))

    def _abort(self, abort: Abort) -> None:
        for writer in self._writers:
            self._send(writer, abort)

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


async def _greeted(reader: asyncio.StreamReader, path: Path) -> None:
    """Until the worker knows the client: what it sends before is lost, a decode worker's first tokens say.

    Raises ResourceShortage.
    """
    try:
        await asyncio.wait_for(read_from_engine(reader), _GREETING_S)
    except (asyncio.IncompleteReadError, ConnectionError, TimeoutError) as error:
        raise ResourceShortage(f"the worker at {path} does not answer ({type(error).__name__})") from error


async def _in_order(inbox: "asyncio.Queue[FromEngine]", first: int) -> AsyncGenerator[Tokens]:
    """Two workers send over two sockets, so a later token can arrive before an earlier one of its output.

    `first`: the index of each output's first token.
    """
    expected: dict[int, int] = {}
    early: dict[tuple[int, int], Tokens] = {}
    while True:
        message = await inbox.get()
        if isinstance(message, Failed):
            raise RequestFailed(message)
        choice = message.choice
        early[choice, message.index] = message
        while (tokens := early.pop((choice, expected.get(choice, first)), None)) is not None:
            yield tokens
            expected[choice] = tokens.index + len(tokens.token_ids)
