"""Frames survive being cut anywhere."""

import struct

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sandbox.errors import InvalidArgument
from sandbox.wire import (
    MAX_PAYLOAD_BYTES,
    Frame,
    FrameReader,
    Kind,
    decode_done,
    decode_entry,
    encode,
    exec_payload,
    write_payload,
)

FRAMES = st.lists(
    st.builds(
        Frame,
        id=st.integers(min_value=0, max_value=2**32 - 1),
        kind=st.sampled_from(list(Kind)),
        payload=st.binary(max_size=40),
    ),
    max_size=8,
)


@given(FRAMES, st.lists(st.integers(min_value=1, max_value=30)))
def test_frames_come_out_as_they_went_in(frames: list[Frame], cuts: list[int]):
    stream = b"".join(encode(frame.id, Kind(frame.kind), frame.payload) for frame in frames)
    reader, received = FrameReader(), list[Frame]()
    for cut in cuts:
        received += reader.feed(stream[:cut])
        stream = stream[cut:]
    received += reader.feed(stream)
    assert received == frames


def test_a_length_beyond_the_limit_is_refused():
    with pytest.raises(ValueError, match=str(MAX_PAYLOAD_BYTES + 1)):
        list(FrameReader().feed(struct.pack("=III", MAX_PAYLOAD_BYTES + 1, 1, Kind.STDOUT)))


def test_exec_payload_holds_cwd_arguments_and_environment():
    payload = exec_payload(["a", "b c"], "/w", {"X": "1"}, with_input=True)
    assert payload == struct.pack("=IIII", 1, 2, 1, 0) + b"/w\0a\0b c\0X=1\0"


def test_write_payload_may_hold_nul_bytes_after_the_path():
    payload = write_payload("/p", b"\0\xff", truncate=True, parents=False, mode=0o600)
    assert payload == struct.pack("=II", 1, 0o600) + b"/p\0\0\xff"


def test_entries_keep_names_that_are_no_utf8():
    entry = decode_entry(struct.pack("=IIQq", ord("l"), 0o777, 3, -5) + b"\xff\0../up")
    assert (entry.name, entry.type, entry.target, entry.modified_ns) == ("\udcff", "link", "../up", -5)


def test_an_unknown_type_is_other():
    assert decode_entry(struct.pack("=IIQq", ord("?"), 0, 0, 0) + b"n\0").type == "other"


def test_done_is_a_native_integer():
    assert decode_done(struct.pack("=I", 1001)) == 1001


def test_half_a_surrogate_pair_is_refused_by_name() -> None:
    with pytest.raises(InvalidArgument, match="surrogate"):
        exec_payload(["echo", "a\ud800"], "/", {}, with_input=False)
