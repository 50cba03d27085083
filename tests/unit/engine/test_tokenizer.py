"""The byte-level tokenizer of a small file: every text and every byte goes through it and back."""

from hypothesis import given
from hypothesis import strategies as st
from tiny_gguf import CONTROL, TOKENS, byte_ids

from engine.chat.tokenizer import ChatTokenizer


@given(text=st.text())
def test_text_comes_back(tiny_tokenizer: ChatTokenizer, text: str) -> None:
    assert tiny_tokenizer.decode(tiny_tokenizer.encode(text)) == text


@given(data=st.binary())
def test_bytes_decode_as_utf8_with_replacements(tiny_tokenizer: ChatTokenizer, data: bytes) -> None:
    assert tiny_tokenizer.decode(byte_ids(data)) == data.decode(errors="replace")


def test_merges_apply_in_their_order(tiny_tokenizer: ChatTokenizer) -> None:
    """`h e` comes before `\u0120t h`, so the merge of a whole ` the` is never reached."""
    assert [TOKENS[token] for token in tiny_tokenizer.encode("hello the")] == ["hello", "\u0120t", "he"]


def test_control_tokens_are_recognised_and_left_out_of_the_text(tiny_tokenizer: ChatTokenizer) -> None:
    ids = tiny_tokenizer.encode("<|im_start|>a<|im_end|>")
    assert ids == [CONTROL.index("<|im_start|>"), *byte_ids(b"a"), CONTROL.index("<|im_end|>")]
    assert tiny_tokenizer.decode(ids) == "a"


def test_digits_stand_alone(tiny_tokenizer: ChatTokenizer) -> None:
    assert tiny_tokenizer.encode("2048") == byte_ids(b"2048")
