"""Messages are whole packets; what no honest init sends is refused."""

import struct
from traceback import format_exception

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sandbox.errors import InvalidArgument
from sandbox.wire import (
    FRAME_BYTES,
    Ending,
    Frame,
    Kind,
    TerminalSize,
    decode,
    decode_done,
    decode_exit,
    encode,
    exec_words,
    pack_size,
)

WORDS = st.integers(min_value=0, max_value=2**32 - 1)


@given(WORDS, st.sampled_from(list(Kind)), WORDS, WORDS)
def test_messages_come_out_as_they_went_in(id: int, kind: Kind, first: int, second: int):
    assert decode(encode(id, kind, first, second), []) == Frame(id, kind, first, second)


def test_a_path_follows_the_words():
    assert encode(1, Kind.OPEN, 2, 3, "/ü\udcff")[FRAME_BYTES:] == "/ü".encode() + b"\xff"


@pytest.mark.parametrize("size", [0, 15, 17])
def test_a_message_of_another_size_is_refused(size: int):
    with pytest.raises(ValueError, match=f"a message of {size} bytes"):
        decode(b"\0" * size, [])


def test_words_hold_counts_cwd_arguments_and_environment():
    assert exec_words(["a", "b c"], "/w", {"X": "1"}) == struct.pack("=II", 2, 1) + b"/w\0a\0b c\0X=1\0"


def test_a_size_is_two_halves_of_a_word():
    assert struct.pack("=I", pack_size(TerminalSize(rows=3, columns=65_535))) == struct.pack("=HH", 3, 65_535)


def test_done_is_an_errno_or_a_trouble():
    assert decode_done(Frame(1, Kind.DONE, 1001)) == 1001
    with pytest.raises(ValueError, match="says 4096"):
        decode_done(Frame(1, Kind.DONE, 4096))


@pytest.mark.parametrize(("ending", "value"), [(6, 0), (99, 0), (0, 4096), (2, 2**31)])
def test_an_exit_that_no_honest_init_sends_is_refused(ending: int, value: int):
    assert decode_exit(Frame(1, Kind.EXIT, 1, 9)) == (Ending.SIGNAL, 9)
    with pytest.raises(ValueError, match=str(value or ending)):
        decode_exit(Frame(1, Kind.EXIT, ending, value))


def test_half_a_surrogate_pair_is_refused_by_name() -> None:
    with pytest.raises(InvalidArgument, match="surrogate"):
        exec_words(["echo", "a\ud800"], "/", {})


@pytest.mark.parametrize("bad", ["s3cret-key\ud800", "s3cret-key\0", 5])
def test_what_is_refused_is_named_and_not_shown(bad: str) -> None:
    """Nor by a cause, which tracebacks print."""
    for argv, env, field in (
        (["echo", "--token", bad], {}, "cmd: word 2"),
        (["echo"], {"TOKEN": bad}, "env: the value of 'TOKEN'"),
    ):
        with pytest.raises(InvalidArgument, match=field) as caught:
            exec_words(argv, "/", env)
        assert "s3cret" not in "".join(format_exception(caught.value, chain=True))
        assert caught.value.__suppress_context__ or caught.value.__context__ is None
