"""Frames on a stream: cut anywhere they come whole, and nonsense ends the connection, not the process."""

import asyncio
import itertools

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from actors.frames import BrokenFrame, pack_from_engine, pack_to_engine, read_from_engine, read_to_engine
from protocol.sampling import SamplingParams
from protocol.wire import MAX_FRAME_BYTES, Abort, Failed, FromEngine, Hello, Submit, Tokens

MESSAGES = [Hello("gw-1"), Submit("gw-1/0", (1, 2, 3), SamplingParams(stop=("x",)), 5), Abort("gw-1/0")]


async def read_all(parts: list[bytes], count: int) -> list[object]:
    reader = asyncio.StreamReader()
    for part in parts:
        reader.feed_data(part)
    reader.feed_eof()
    return [await read_to_engine(reader) for _ in range(count)]


@given(cuts=st.sets(st.integers(1, 150)))
def test_frames_cut_anywhere_come_whole(cuts: set[int]) -> None:
    data = b"".join(pack_to_engine(message) for message in MESSAGES)
    bounds = [0, *sorted(cut for cut in cuts if cut < len(data)), len(data)]
    parts = [data[a:b] for a, b in itertools.pairwise(bounds)]
    assert asyncio.run(read_all(parts, 3)) == MESSAGES


@given(length=st.integers(0, 60))
def test_a_frame_that_ends_early_is_the_end_of_the_stream(length: int) -> None:
    data = pack_to_engine(MESSAGES[1])
    with pytest.raises(asyncio.IncompleteReadError):
        asyncio.run(read_all([data[: min(length, len(data) - 1)]], 1))


@given(body=st.binary(max_size=60))
def test_nonsense_is_a_broken_frame_or_no_message_of_ours(body: bytes) -> None:
    with pytest.raises(BrokenFrame):
        asyncio.run(read_all([len(body).to_bytes(4, "big") + b"\xc1" + body[1:] if body else bytes(4)], 1))


def test_a_length_beyond_the_bound_is_not_waited_for() -> None:
    with pytest.raises(BrokenFrame, match="exceeds"):
        asyncio.run(read_all([(MAX_FRAME_BYTES + 1).to_bytes(4, "big")], 1))
    with pytest.raises(BrokenFrame, match="exceeds"):
        pack_to_engine(Hello("x" * (MAX_FRAME_BYTES + 1)))


async def read_batches(data: bytes) -> list[list[FromEngine]]:
    reader = asyncio.StreamReader()
    reader.feed_data(data)
    reader.feed_eof()
    found: list[list[FromEngine]] = []
    while not reader.at_eof():
        found.append(await read_from_engine(reader))
    return found


def test_a_step_of_more_than_a_frame_comes_in_several_in_order() -> None:
    step = [Failed(f"gw-1/{n}", "lost", "x" * (3 << 20)) for n in range(11)]
    batches = asyncio.run(read_batches(pack_from_engine(step)))
    assert len(batches) > 1
    assert [message for batch in batches for message in batch] == step


def test_a_message_that_fits_in_no_frame_fails_its_request_and_no_other() -> None:
    step = [Failed("gw-1/0", "lost", "a"), Failed("gw-1/2", "internal", "x" * (17 << 20))]
    first, second = [m for batch in asyncio.run(read_batches(pack_from_engine(step))) for m in batch]
    assert first == step[0]
    assert isinstance(second, Failed)
    assert (second.request_id, second.code) == ("gw-1/2", "internal")
    assert "bytes in one message" in second.message


def test_a_step_s_messages_come_as_one_batch() -> None:
    async def read() -> object:
        reader = asyncio.StreamReader()
        reader.feed_data(pack_from_engine(batch))
        return await read_from_engine(reader)

    batch = [Failed("gw-1/0", "lost", "a", "b"), Failed("gw-1/1", "invalid", "c")]
    assert asyncio.run(read()) == batch


@given(bad=st.sampled_from(["half \ud800 a pair", "\udfff", "x" * MAX_FRAME_BYTES]), place=st.integers(0, 3))
@settings(max_examples=12)
def test_a_message_that_cannot_be_written_costs_itself_alone_and_ends_its_request(
    bad: str, place: int
) -> None:
    good: list[FromEngine] = [Failed(f"gw-1/{n}", "lost", "as it is") for n in range(3)]
    messages = [*good[:place], Failed("gw-1/bad", "invalid", bad, "tools\ud800", 2.0), *good[place:]]
    found = [message for batch in asyncio.run(read_batches(pack_from_engine(messages))) for message in batch]
    (failed,) = [message for message in found if message.request_id == "gw-1/bad"]
    assert isinstance(failed, Failed)
    assert (failed.code, failed.parameter, failed.retry_after_s) == ("invalid", "tools\\ud800", 2.0)
    assert [message for message in found if message is not failed] == good


def test_a_request_ends_whose_tokens_cannot_be_written() -> None:
    tokens = Tokens("gw-1/0", 0, (2**70,), None, 0, 0, 0, 0, 0, 0)
    ((failed,),) = asyncio.run(read_batches(pack_from_engine([tokens])))
    assert isinstance(failed, Failed)
    assert (failed.request_id, failed.code) == ("gw-1/0", "internal")
