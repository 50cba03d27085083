"""What is told of a long prompt comes in parts before the first token, none too large for a frame."""

import asyncio

import pytest

from actors.frames import pack_from_engine, read_from_engine
from actors.token_messages import token_messages
from engine.request import Stages
from engine.results import TokenOutput
from protocol.sampling_reply import TokenLogprob, TokenLogprobs
from protocol.wire import MAX_FRAME_BYTES, FromEngine, Tokens

OWN = TokenLogprobs(7, -0.5, 1)


def output(count: int, top: int = 0) -> TokenOutput:
    told = tuple(
        TokenLogprobs(n, -1.5, 2, (TokenLogprob(1, -1.5),) * top) for n in range(count)
    )  # fmt: skip
    return TokenOutput("gw-1/1", 0, (5,), "length", Stages(1, 2, 3, 4), 6, OWN, told, 2, (16,))


@pytest.mark.parametrize("count", [0, 1, 4095, 4096, 4097, 8192, 20_001])
def test_parts_are_the_whole_in_order_and_the_token_comes_last(count: int) -> None:
    *parts, last = token_messages(output(count), 9)
    assert len(parts) == max(count - 1, 0) // 4096
    assert all((part.token_ids, part.finish_reason, part.logprobs) == ((), None, ()) for part in parts)
    assert {(part.request_id, part.index, part.choice) for part in (*parts, last)} == {("gw-1/1", 0, 2)}
    assert [told.token_id for part in (*parts, last) for told in part.prompt_logprobs] == list(range(count))
    assert (last.token_ids, last.finish_reason, last.logprobs, last.resumed) == (
        (5,),
        "length",
        (OWN,),
        (16,),
    )
    assert (last.arrived_ns, last.produced_ns, last.num_cached) == (1, 9, 6)


def test_more_than_a_frame_crosses_whole() -> None:
    messages = list(token_messages(output(80_000, 20), 9))
    data = pack_from_engine(messages)
    assert len(data) > MAX_FRAME_BYTES
    assert asyncio.run(read(data)) == messages


async def read(data: bytes) -> list[FromEngine]:
    reader = asyncio.StreamReader()
    reader.feed_data(data)
    reader.feed_eof()
    found: list[FromEngine] = []
    while not reader.at_eof():
        found += await read_from_engine(reader)
    assert all(isinstance(message, Tokens) for message in found)
    return found
