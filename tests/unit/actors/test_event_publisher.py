"""KV events over real ZeroMQ sockets: what vLLM's readers expect, and what nobody should be able to do."""

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import msgspec
import pytest
import zmq
from pydantic import ValidationError

from actors.event_publisher import EventPublisher
from actors.events_config import KvEventsConfig, is_bound
from engine.cache.events import EventLog
from protocol.errors import ResourceShortage
from protocol.kv_events import decode_batch

PATIENCE_MS = 30_000


def config(folder: Path, **more: Any) -> KvEventsConfig:
    return KvEventsConfig.model_validate(
        {
            "enable_kv_cache_events": True, "endpoint": f"ipc://{folder}/events",
            "replay_endpoint": f"ipc://{folder}/replay", "topic": "kv", **more,
        }
    )  # fmt: skip


@contextmanager
def publishing(settings: KvEventsConfig, log: EventLog, number: int = 0) -> Iterator[EventPublisher]:
    publisher = EventPublisher(settings, number, log)
    log.wake = publisher.wake
    try:
        yield publisher
    finally:
        publisher.close()


@contextmanager
def connected(kind: int, endpoint: str) -> Iterator["zmq.Socket[bytes]"]:
    with zmq.Context() as context, context.socket(kind) as socket:
        socket.linger, socket.rcvtimeo = 0, PATIENCE_MS
        if kind == zmq.SUB:
            socket.subscribe(b"kv")
        socket.connect(endpoint)
        yield socket


def tell(log: EventLog, number: int) -> None:
    log.stored(bytes([number]) * 16, None, (number,) * 4, 4, "GPU")
    log.cut(float(number))


def replayed(settings: KvEventsConfig, start: int) -> list[tuple[int, bytes]]:
    """As vLLM's example reader asks: a REQ socket whose answers come until number -1."""
    assert settings.replay_endpoint is not None
    with connected(zmq.DEALER, settings.replay_endpoint) as socket:
        socket.send_multipart([b"", start.to_bytes(8, "big")])
        found: list[tuple[int, bytes]] = []
        while True:
            empty, number, payload = socket.recv_multipart()
            assert empty == b""
            if number == b"\xff" * 8:
                assert payload == b""
                return found
            found.append((int.from_bytes(number, "big"), payload))


def test_a_reader_gets_topic_number_and_payload(tmp_path: Path) -> None:
    settings, log = config(tmp_path), EventLog()
    with publishing(settings, log, 1), connected(zmq.SUB, f"{settings.endpoint}_dp1") as reader:
        got = until_heard(reader, log)
        assert got[0] == b"kv"
        assert len(got[1]) == 8
        (ts, events, rank) = msgspec.msgpack.decode(got[2])
        number = int.from_bytes(got[1], "big")
        assert (ts, rank) == (float(number), 1)
        assert events == [["BlockStored", [bytes([number]) * 16], None, [number] * 4, 4, None, "GPU", None]]


def until_heard(reader: "zmq.Socket[bytes]", log: EventLog) -> list[bytes]:
    """The first message: a subscription takes a moment, and what is told before is not sent."""
    for number in range(250):
        tell(log, number)
        if reader.poll(100):
            return reader.recv_multipart()
    raise AssertionError("nothing was heard")


def test_numbers_have_no_gaps_and_who_missed_some_gets_them(tmp_path: Path) -> None:
    settings, log = config(tmp_path), EventLog()
    with publishing(settings, log), connected(zmq.SUB, settings.endpoint) as reader:
        first = int.from_bytes(until_heard(reader, log)[1], "big")
        told = log.since(0)[-1][0] + 1
        for number in range(told, told + 40):
            tell(log, number)
        heard = [int.from_bytes(reader.recv_multipart()[1], "big") for _ in range(told + 40 - first - 1)]
        assert heard == list(range(first + 1, told + 40))
        missed = replayed(settings, 0)
        assert [number for number, _ in missed] == list(range(told + 40))
        batch = decode_batch(missed[3][1])
        assert (batch.ts, batch.data_parallel_rank) == (3.0, 0)
        assert [number for number, _ in replayed(settings, told + 38)] == [told + 38, told + 39]
        assert replayed(settings, 1 << 40) == []


def test_a_replay_longer_than_a_sockets_usual_mark_comes_whole(tmp_path: Path) -> None:
    settings, log = config(tmp_path, hwm=10), EventLog()
    with publishing(settings, log):
        for number in range(3_000):
            tell(log, number % 250)
        wait_until_published(settings, 3_000)
        assert len(replayed(settings, 0)) == 3_000


def wait_until_published(settings: KvEventsConfig, count: int) -> None:
    for _ in range(200):
        if replayed(settings, count - 1):
            return
    raise AssertionError("not published")


def test_old_batches_are_gone_from_the_replay_and_the_numbers_say_so(tmp_path: Path) -> None:
    settings, log = config(tmp_path, buffer_steps=5), EventLog(5)
    with publishing(settings, log):
        for number in range(12):
            tell(log, number)
        wait_until_published(settings, 12)
        assert [number for number, _ in replayed(settings, 0)] == [7, 8, 9, 10, 11]


def test_events_that_no_step_makes_a_batch_of_are_published_too(tmp_path: Path) -> None:
    """The disk's thread tells of files when no request runs."""
    settings, log = config(tmp_path), EventLog()
    with publishing(settings, log), connected(zmq.SUB, settings.endpoint) as reader:
        until_heard(reader, log)
        while reader.poll(100):
            reader.recv_multipart()
        log.kept([b"a" * 16, b"b" * 16], 16, "STORAGE")
        batch = decode_batch(reader.recv_multipart()[2])
    (stored,) = batch.events
    assert (stored.medium, stored.block_hashes, stored.token_ids) == ("STORAGE", (b"a" * 16, b"b" * 16), ())


def test_what_is_told_before_the_end_is_published_at_the_end(tmp_path: Path) -> None:
    settings, log = config(tmp_path), EventLog()
    with connected(zmq.SUB, settings.endpoint) as reader:
        with publishing(settings, log):
            until_heard(reader, log)
            log.removed([b"z" * 16], "STORAGE")
        last = b""
        while reader.poll(500):
            last = reader.recv_multipart()[2]
    (event,) = decode_batch(last).events
    assert event.block_hashes == (b"z" * 16,)


@pytest.mark.parametrize(
    "parts", [[b""], [b"", b"short"], [b"", b"x" * 9], [b"no", b"\0" * 8], [b"", b"\0" * 8, b"more"]]
)
def test_nonsense_gets_no_answer_and_ends_nothing(tmp_path: Path, parts: list[bytes]) -> None:
    settings, log = config(tmp_path), EventLog()
    with publishing(settings, log):
        tell(log, 1)
        assert settings.replay_endpoint is not None
        with connected(zmq.DEALER, settings.replay_endpoint) as socket:
            socket.send_multipart(parts)
            socket.send_multipart([b"", bytes(8)])
            assert socket.recv_multipart()[1] == bytes(8)
            assert socket.recv_multipart()[1] == b"\xff" * 8
            assert not socket.poll(100)


def test_an_endpoint_that_is_taken_is_named_and_nothing_stays(tmp_path: Path) -> None:
    before = threading.active_count()
    with zmq.Context() as context, context.socket(zmq.PUB) as taken:
        port = taken.bind_to_random_port("tcp://127.0.0.1")
        settings = KvEventsConfig(enable_kv_cache_events=True, endpoint=f"tcp://127.0.0.1:{port}")
        with pytest.raises(ResourceShortage, match=f"127.0.0.1:{port}: Address already in use"):
            EventPublisher(settings, 0, EventLog())
    assert threading.active_count() == before


def test_without_a_thread_nothing_stays_and_its_endpoints_are_free(
    tmp_path: Path, shortage: pytest.MonkeyPatch
) -> None:
    before = len(list(Path("/proc/self/fd").iterdir()))
    with pytest.raises(ResourceShortage, match="kv_events: there is no thread"):
        EventPublisher(config(tmp_path), 0, EventLog())
    assert len(list(Path("/proc/self/fd").iterdir())) == before
    shortage.undo()
    EventPublisher(config(tmp_path), 0, EventLog()).close()


@pytest.mark.parametrize(
    ("endpoint", "number", "moved", "bound"),
    [
        ("tcp://*:5557", 0, "tcp://*:5557", True),
        ("tcp://*:5557", 2, "tcp://*:5559", True),
        ("tcp://127.0.0.1:5557", 1, "tcp://127.0.0.1:5558", True),
        ("tcp://localhost:1", 0, "tcp://localhost:1", True),
        ("tcp://[::]:5557", 0, "tcp://[::]:5557", True),
        ("tcp://collector.example:5557", 1, "tcp://collector.example:5558", False),
        ("ipc:///tmp/events", 1, "ipc:///tmp/events_dp1", True),
    ],
)
def test_endpoints_are_vllms(endpoint: str, number: int, moved: str, bound: bool) -> None:
    settings = KvEventsConfig(endpoint=endpoint, replay_endpoint=endpoint).of_worker(number)
    assert (settings.endpoint, settings.replay_endpoint) == (moved, moved)
    assert is_bound(moved) is bound


@pytest.mark.parametrize(
    "field",
    [
        {"endpoint": "5557"}, {"endpoint": "tcp://*"}, {"endpoint": "tcp://*:0"}, {"endpoint": "tcp://:1"},
        {"endpoint": "udp://a:1"}, {"endpoint": "ipc://"}, {"replay_endpoint": "tcp://*:99999"},
        {"publisher": "kafka"}, {"buffer_steps": 0}, {"hwm": 0}, {"max_queue_size": 5},
    ],
)  # fmt: skip
def test_what_cannot_be_meant_is_refused_by_its_field(field: dict[str, Any]) -> None:
    with pytest.raises(ValidationError) as refused:
        KvEventsConfig.model_validate(field)
    assert refused.value.errors()[0]["loc"] == tuple(field)
