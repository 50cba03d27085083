"""Streamed text equals the text of all tokens at once, wherever it is cut."""

from collections.abc import Sequence
from itertools import pairwise
from typing import cast

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from tiny_gguf import EOS, byte_ids

from engine.chat.text_stream import TextStream
from engine.chat.tokenizer import ChatTokenizer

texts = st.text(st.sampled_from("abxé漢😀 \n\ufffd"), max_size=30)
stops = st.lists(st.text(st.sampled_from("abxé漢"), max_size=4), max_size=3)


def cut(ids: list[int], cuts: set[int]) -> list[list[int]]:
    bounds = [0, *sorted(c for c in cuts if c < len(ids)), len(ids)]
    return [ids[a:b] for a, b in pairwise(bounds)]


def stream(tokenizer: ChatTokenizer, parts: list[list[int]], stop: list[str]) -> tuple[list[str], TextStream]:
    text = TextStream(tokenizer, stop)
    return [text.push(part, final=index == len(parts) - 1) for index, part in enumerate(parts)], text


def first_stop(text: str, stop: list[str]) -> str:
    """The text before the stop string that is complete first, read character by character."""
    for end in range(1, len(text) + 1):
        starts = [end - len(s) for s in stop if s and text[:end].endswith(s)]
        if starts:
            return text[: min(starts)]
    return text


@settings(max_examples=200, deadline=None)
@given(text=texts, stop=stops, cuts=st.sets(st.integers(1, 120)))
@example(text="xab漢", stop=["ab漢", "b"], cuts=set())
@example(text="xab漢", stop=["ab漢", "b"], cuts={1, 2, 3})
@example(text="xab漢", stop=["ab", "b"], cuts={1, 2, 3})
def test_any_cut_gives_the_text_before_the_first_stop(
    tiny_tokenizer: ChatTokenizer, text: str, stop: list[str], cuts: set[int]
) -> None:
    deltas, result = stream(tiny_tokenizer, cut(byte_ids(text.encode()), cuts), stop)
    assert "".join(deltas) == result.text == first_stop(text, stop)
    assert result.stopped == (first_stop(text, stop) != text)


@settings(max_examples=200, deadline=None)
@given(data=st.binary(max_size=40), cuts=st.sets(st.integers(1, 40)))
def test_any_bytes_come_out_as_they_decode_at_once(
    tiny_tokenizer: ChatTokenizer, data: bytes, cuts: set[int]
) -> None:
    deltas, _ = stream(tiny_tokenizer, cut(byte_ids(data), cuts), [])
    assert "".join(deltas) == data.decode(errors="replace")


@settings(max_examples=200, deadline=None)
@given(text=texts, stop=stops, cuts=st.sets(st.integers(1, 120)))
@example(text="bba", stop=["ba"], cuts={2})
def test_nothing_is_given_out_that_could_become_a_stop(
    tiny_tokenizer: ChatTokenizer, text: str, stop: list[str], cuts: set[int]
) -> None:
    parts = cut(byte_ids(text.encode()), cuts)
    result = TextStream(tiny_tokenizer, stop)
    seen: list[int] = []
    for part in parts[:-1]:
        seen += part
        result.push(part)
        known = tiny_tokenizer.decode(seen).removesuffix("\ufffd")
        if not result.stopped:
            ends = (known[at:] for at in range(len(result.text)))
            assert not any(end and string.startswith(end) for string in stop for end in ends)


class Counting:
    """A tokenizer that counts what it decodes."""

    def __init__(self, tokenizer: ChatTokenizer) -> None:
        self._tokenizer = tokenizer
        self.num_decoded = 0

    def decode(self, ids: Sequence[int]) -> str:
        self.num_decoded += len(ids)
        return self._tokenizer.decode(ids)


@pytest.mark.parametrize("data", [b"\x80", b"\xf0", b"\xef\xbf\xbd", b"a", b"\xe2\x82"])
def test_each_token_costs_the_same_whatever_its_bytes(tiny_tokenizer: ChatTokenizer, data: bytes) -> None:
    counting = Counting(tiny_tokenizer)
    text = TextStream(cast(ChatTokenizer, counting))
    ids = byte_ids(data * 500)
    given_out = "".join(text.push([token], final=n == len(ids)) for n, token in enumerate(ids, 1))
    assert given_out == (data * 500).decode(errors="replace")
    assert counting.num_decoded < 12 * len(ids)


def test_a_character_that_control_tokens_interrupt_costs_no_more(tiny_tokenizer: ChatTokenizer) -> None:
    counting = Counting(tiny_tokenizer)
    text = TextStream(cast(ChatTokenizer, counting))
    ids = [*byte_ids(b"a\xf0"), *[EOS] * 2_000, *byte_ids(b"b")]
    assert "".join(text.push([token]) for token in ids) == "a\ufffdb"
    assert counting.num_decoded < 12 * len(ids)


def test_a_character_of_four_tokens_comes_whole(tiny_tokenizer: ChatTokenizer) -> None:
    deltas, _ = stream(tiny_tokenizer, [[token] for token in byte_ids("a😀b".encode())], [])
    assert deltas == ["a", "", "", "", "😀", "b"]


def test_the_end_gives_out_what_was_held(tiny_tokenizer: ChatTokenizer) -> None:
    deltas, result = stream(tiny_tokenizer, [byte_ids(b"x STO"), [EOS]], ["STOP"])
    assert deltas == ["x ", "STO"]
    assert not result.stopped


def test_after_a_stop_nothing_comes(tiny_tokenizer: ChatTokenizer) -> None:
    result = TextStream(tiny_tokenizer, ("b",))
    assert result.push(byte_ids(b"abc")) == "a"
    assert result.push(byte_ids(b"def"), final=True) == ""
    assert (result.text, result.stopped) == ("a", True)


@settings(max_examples=200, deadline=None)
@given(text=texts, stop=stops, include=st.booleans(), min_tokens=st.integers(0, 40))
def test_a_split_at_every_byte_gives_what_the_whole_gives(
    tiny_tokenizer: ChatTokenizer, text: str, stop: list[str], include: bool, min_tokens: int
) -> None:
    ids = byte_ids(text.encode())
    results: list[tuple[str, bool, str]] = []
    for parts in ([ids], [[token] for token in ids], *([ids[:at], ids[at:]] for at in range(1, len(ids)))):
        whole = TextStream(tiny_tokenizer, stop, include_stop=include, min_tokens=min_tokens)
        given_out = "".join(
            whole.push(part, final=index == len(parts) - 1) for index, part in enumerate(parts)
        )
        assert given_out == whole.text
        results.append((whole.text, whole.stopped, whole.matched))
    assert len(set(results)) == 1
    assert results[0][0] == expected(text, stop, include, min_tokens)


def expected(text: str, stop: list[str], include: bool, min_tokens: int) -> str:
    """The text up to the stop string that is complete first behind `min_tokens` bytes, or all of it."""
    for end in range(1, len(text) + 1):
        starts = [end - len(s) for s in stop if s and text[:end].endswith(s)]
        if starts and len(text[:end].encode()) > min_tokens:
            return text[: end if include else min(starts)]
    return text


def test_what_ended_the_text_is_told(tiny_tokenizer: ChatTokenizer) -> None:
    result = TextStream(tiny_tokenizer, ("xx", "b"))
    result.push(byte_ids(b"abc"))
    assert result.matched == "b"


@pytest.mark.parametrize("size", [33, 64, 65, 97, 100, 200])
def test_a_character_cut_behind_many_tokens_at_once_is_whole(
    tiny_tokenizer: ChatTokenizer, size: int
) -> None:
    """As where a stream goes on that has given out hundreds of tokens."""
    for before in range(4):
        text = "x" * before + "é😀漢字 " * 60
        ids = byte_ids(text.encode())
        deltas, _ = stream(tiny_tokenizer, [ids[n : n + size] for n in range(0, len(ids), size)], [])
        assert "".join(deltas) == text
