"""The engine's end of the token sockets: takes requests in, sends each client its tokens.

Runs an asyncio loop in a thread of its own, so that a slow client never holds up a step. A client that does
not read is dropped once its unsent bytes pass a bound, and its requests are aborted.
"""

import asyncio
import threading
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path

from actors.frames import BrokenFrame, pack_from_engine, read_to_engine
from protocol.errors import ResourceShortage
from protocol.threads import NoThread, TimelyThread
from protocol.wire import Abort, FromEngine, Hello, Submit

MAX_UNSENT_BYTES = 8 << 20


class TokenServer:
    """`on_message` and `on_gone` are called from the server's thread and must not block."""

    def __init__(
        self, path: Path, on_message: Callable[[Submit | Abort], None], on_gone: Callable[[str], None]
    ) -> None:
        self._path = path
        self._on_message, self._on_gone = on_message, on_gone
        self._clients: dict[str, asyncio.StreamWriter] = {}
        self._loop: asyncio.AbstractEventLoop | None = None  # made by `start`, closed by its thread
        self._started = threading.Event()
        self._stop = asyncio.Event()
        self._failure: OSError | None = None
        self._connections: set[asyncio.Task[None]] = set()

    def start(self) -> None:
        """Blocks until the socket accepts connections. Raises ResourceShortage where it cannot be made."""
        self._loop = loop = asyncio.new_event_loop()
        self._thread = TimelyThread(partial(self._main, loop), name="token-server")
        try:
            self._thread.start()
        except NoThread as error:
            self._loop = None
            loop.close()
            raise ResourceShortage(f"socket {self._path}: there is no thread for it: {error}") from error
        self._started.wait()
        if self._failure is not None:
            self._thread.join()
            raise ResourceShortage(f"socket {self._path}: {self._failure}") from self._failure

    def stop(self) -> None:
        """Close the connections and end the thread. Blocks until it has ended; safe at any time."""
        if self._loop is None:
            return
        with suppress(RuntimeError):  # the loop has been closed before
            self._loop.call_soon_threadsafe(self._stop.set)
        self._thread.join()

    def send(self, messages: Sequence[FromEngine]) -> None:
        """Queue a step's messages to the clients that asked for them. Never blocks; any thread."""
        batches: dict[str, list[FromEngine]] = {}
        for message in messages:
            batches.setdefault(message.request_id.partition("/")[0], []).append(message)
        if batches and self._loop is not None and not self._loop.is_closed():
            self._loop.call_soon_threadsafe(self._write, batches)

    def _main(self, loop: asyncio.AbstractEventLoop) -> None:
        asyncio.set_event_loop(loop)
        try:
            loop.run_until_complete(self._serve())
        except OSError as error:
            self._failure = error
        finally:
            loop.close()
            self._started.set()

    async def _serve(self) -> None:
        server = await asyncio.start_unix_server(self._accept, path=str(self._path))
        self._started.set()
        await self._stop.wait()
        server.close()
        for task in list(self._connections):
            task.cancel()
        await asyncio.gather(*self._connections, return_exceptions=True)
        self._path.unlink(missing_ok=True)

    def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.get_running_loop().create_task(self._converse(reader, writer))
        self._connections.add(task)
        task.add_done_callback(self._connections.discard)

    async def _converse(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        client = ""
        try:
            hello = await read_to_engine(reader)
            if not isinstance(hello, Hello):
                return
            client = hello.client
            self._clients[client] = writer
            writer.write(pack_from_engine([]))  # from here on it gets what is sent to it
            while True:
                message = await read_to_engine(reader)
                if not isinstance(message, Hello):
                    self._on_message(message)
        except (asyncio.IncompleteReadError, ConnectionError, BrokenFrame):
            pass  # the client is gone; `finally` says so
        finally:
            writer.close()
            if client:
                self._clients.pop(client, None)
                self._on_gone(client)

    def _write(self, batches: dict[str, list[FromEngine]]) -> None:
        for client, messages in batches.items():
            writer = self._clients.get(client)
            if writer is None or writer.is_closing():
                continue
            # Looked at before: what one step has for a client may be more than the bound.
            if writer.transport.get_write_buffer_size() > MAX_UNSENT_BYTES:
                writer.transport.abort()
                continue
            writer.write(pack_from_engine(messages))
