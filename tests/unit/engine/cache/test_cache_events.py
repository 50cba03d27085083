"""Events of the caches, in the bytes that routers of vLLM's engines read."""

import threading

import msgspec

from engine.cache.events import EventLog
from protocol.kv_events import (
    AllBlocksCleared,
    BlockRemoved,
    BlockStored,
    decode_batch,
    encode_batch,
    message,
)


def test_a_chain_becomes_one_event_and_survives_the_wire() -> None:
    log = EventLog()
    log.stored(b"a", None, (1, 2), 2, "GPU")
    log.stored(b"b", b"a", (3, 4), 2, "GPU")
    log.stored(b"c", b"x", (5, 6), 2, "GPU")
    log.removed([b"a"], "GPU")
    batch = log.cut(1.5)
    assert batch is not None
    assert decode_batch(encode_batch(batch)) == batch
    plain = msgspec.msgpack.decode(encode_batch(batch))
    assert plain == [
        1.5,
        [
            ["BlockStored", [b"a", b"b"], None, [1, 2, 3, 4], 2, None, "GPU", None],
            ["BlockStored", [b"c"], b"x", [5, 6], 2, None, "GPU", None],
            ["BlockRemoved", [b"a"], "GPU"],
        ],
        None,
    ]
    assert log.cut(2.0) is None


def test_a_message_has_topic_number_and_payload() -> None:
    log = EventLog()
    log.cleared()
    batch = log.cut(0.0)
    assert batch is not None
    topic, number, payload = message("kv", 258, batch)
    assert (topic, number) == (b"kv", b"\0\0\0\0\0\0\1\2")
    assert decode_batch(payload).events == (AllBlocksCleared(),)


def test_old_batches_go_and_readers_can_tell() -> None:
    log = EventLog(kept=3)
    for number in range(5):
        log.stored(bytes([number]), None, (), 1, "CPU")
        log.cut(float(number))
    assert [number for number, _ in log.since(0)] == [2, 3, 4]
    assert [batch.ts for _, batch in log.since(4)] == [4.0]
    assert all(isinstance(event, BlockStored) for _, batch in log.since(0) for event in batch.events)


def test_blocks_of_a_tier_are_told_without_tokens_and_in_one_event() -> None:
    log = EventLog()
    log.stored(b"a", None, (1, 2), 2, "GPU")
    log.kept([b"a"], 2, "CPU")
    log.kept([b"b", b"c"], 2, "CPU")
    log.kept([], 2, "STORAGE")
    log.kept([b"a"], 2, "STORAGE")
    log.removed([b"a"], "CPU")
    log.removed([b"b"], "CPU")
    log.removed([b"a"], "STORAGE")
    batch = log.cut(0.0)
    assert batch is not None
    assert batch.events == (
        BlockStored((b"a",), None, (1, 2), 2, None, "GPU"),
        BlockStored((b"a", b"b", b"c"), None, (), 2, None, "CPU"),
        BlockStored((b"a",), None, (), 2, None, "STORAGE"),
        BlockRemoved((b"a", b"b"), "CPU"),
        BlockRemoved((b"a",), "STORAGE"),
    )


def test_a_reader_is_woken_at_a_first_event_and_at_a_batch() -> None:
    log, woken = EventLog(), list[str]()
    log.wake = lambda: woken.append("now")
    assert not log.has_open
    log.removed([b"a"], "GPU")
    log.removed([b"b"], "GPU")
    assert (len(woken), log.has_open) == (1, True)
    log.cut(0.0)
    assert (len(woken), log.has_open) == (2, False)
    assert log.cut(0.0) is None
    log.cleared()
    assert len(woken) == 3


def test_threads_lose_no_event() -> None:
    log = EventLog()

    def tell(first: int) -> None:
        for number in range(first, first + 2_000):
            log.removed([number.to_bytes(4, "big")], "STORAGE" if first else "GPU")
            if number % 7 == 0:
                log.cut(0.0)

    threads = [threading.Thread(target=tell, args=(first,)) for first in (0, 10_000, 20_000)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    log.cut(0.0)
    batches = log.since(0)
    assert [number for number, _ in batches] == list(range(len(batches)))
    told = [key for _, batch in batches for event in batch.events for key in event.block_hashes]
    assert len(told) == len(set(told)) == 6_000
