"""Publishes an engine's KV events over ZeroMQ, in the form in which vLLM's engines do.

A message has three parts: topic, sequence number (8 bytes, big-endian), payload (`protocol.kv_events`). Who
has missed some asks the replay socket with the number to begin at, and gets number and payload of each batch
from there that is still kept, then number -1 with an empty payload. Source: vLLM, `distributed/kv_events.py`.
"""

import os
import threading
import time
from contextlib import suppress
from typing import Protocol

import zmq
from msgspec.structs import replace

from actors.events_config import KvEventsConfig, is_bound
from protocol.errors import ResourceShortage
from protocol.kv_events import KvEventBatch, encode_batch, message
from protocol.threads import NoThread, TimelyThread

_GATHER_MS = 50  # that events of the disk's thread wait for those of a step
_END = (-1).to_bytes(8, "big", signed=True)


class EventSource(Protocol):
    """Where batches come from (engine.cache.events.EventLog). Thread-safe."""

    @property
    def has_open(self) -> bool:
        """Whether there are events that no batch has yet."""
        ...

    def cut(self, now_s: float) -> KvEventBatch | None:
        """Those as a batch, which is then kept."""
        ...

    def since(self, number: int) -> list[tuple[int, KvEventBatch]]:
        """The batches kept from that number on."""
        ...


class EventPublisher:
    """A thread with two sockets. `wake` may be called from any thread, and never blocks.

    Batches that the log has given up before they were published are missed, as a gap in the numbers tells.
    """

    def __init__(self, config: KvEventsConfig, number: int, log: EventSource) -> None:
        """`number`: of the worker. Raises ResourceShortage where an endpoint or a thread cannot be had."""
        self._number, self._log = number, log
        config = self._config = config.of_worker(number)
        self._next = 0
        self._closing = threading.Event()
        self._wakes = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        self._context = zmq.Context[zmq.Socket[bytes]]()
        try:
            self._out = self._socket(zmq.PUB, config.endpoint, config.hwm, bind=is_bound(config.endpoint))
            # A whole replay waits for its reader: beyond the mark a ROUTER drops without a word.
            self._asked = (
                None
                if config.replay_endpoint is None
                else self._socket(zmq.ROUTER, config.replay_endpoint, config.buffer_steps + 1, bind=True)
            )
            self._thread = TimelyThread(self._run, name="kv-events")
            self._thread.start()
        except BaseException as error:
            self._context.destroy(linger=0)
            os.close(self._wakes)
            if isinstance(error, NoThread):
                raise ResourceShortage(f"kv_events: there is no thread for them: {error}") from error
            raise

    def wake(self) -> None:
        """There are new events, or a new batch."""
        with suppress(BlockingIOError):  # it has been woken 2^64 times
            os.eventfd_write(self._wakes, 1)

    def close(self) -> None:
        """Publish what is there, then end the thread. Blocks for a moment; safe to repeat."""
        if self._closing.is_set():
            return
        self._closing.set()
        self.wake()
        self._thread.join()
        self._context.destroy(linger=200)
        os.close(self._wakes)

    def _socket(self, kind: int, endpoint: str, most: int, *, bind: bool) -> "zmq.Socket[bytes]":
        socket = self._context.socket(kind)
        socket.set_hwm(most)
        try:
            (socket.bind if bind else socket.connect)(endpoint)
        except zmq.ZMQError as error:
            raise ResourceShortage(
                f"kv_events: {endpoint}: {error.strerror}", hint="name another endpoint, or leave it out"
            ) from error
        return socket

    def _run(self) -> None:
        poller = zmq.Poller()
        poller.register(self._wakes, zmq.POLLIN)
        if self._asked is not None:
            poller.register(self._asked, zmq.POLLIN)
        while not self._closing.is_set():
            ready = dict(poller.poll(_GATHER_MS if self._log.has_open else None))
            if self._wakes in ready:
                os.eventfd_read(self._wakes)
            elif not ready:  # no step has made a batch of them meanwhile
                self._log.cut(time.time())
            self._publish()
            if self._asked is not None and self._asked in ready:
                self._answer(self._asked)
        self._log.cut(time.time())
        self._publish()

    def _publish(self) -> None:
        for number, batch in self._log.since(self._next):
            self._out.send_multipart(message(self._config.topic, number, self._signed(batch)))
            self._next = number + 1

    def _answer(self, asked: "zmq.Socket[bytes]") -> None:
        """A request is an empty part and the number to begin at; anything else gets no answer."""
        match asked.recv_multipart():
            case [client, b"", start] if len(start) == 8:
                for number, batch in self._log.since(int.from_bytes(start, "big")):
                    if number < self._next:
                        payload = encode_batch(self._signed(batch))
                        asked.send_multipart((client, b"", number.to_bytes(8, "big"), payload))
                asked.send_multipart((client, b"", _END, b""))
            case _:
                pass

    def _signed(self, batch: KvEventBatch) -> KvEventBatch:
        return replace(batch, data_parallel_rank=self._number)
