"""Events of the caches, in the bytes that routers of vLLM's engines read."""

import msgspec

from engine.cache.events import EventLog
from protocol.kv_events import AllBlocksCleared, BlockStored, decode_batch, encode_batch, message


def test_a_chain_becomes_one_event_and_survives_the_wire() -> None:
    log = EventLog()
    log.stored(b"a", None, (1, 2), 2, "GPU")
    log.stored(b"b", b"a", (3, 4), 2, "GPU")
    log.stored(b"c", b"x", (5, 6), 2, "GPU")
    log.removed(b"a", "GPU")
    batch = log.cut(1.5)
    assert batch is not None
    assert decode_batch(encode_batch(batch)) == batch
    plain = msgspec.msgpack.decode(encode_batch(batch))
    assert plain == [
        1.5,
        [
            ["BlockStored", [b"a", b"b"], None, [1, 2, 3, 4], 2, None, "GPU"],
            ["BlockStored", [b"c"], b"x", [5, 6], 2, None, "GPU"],
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
