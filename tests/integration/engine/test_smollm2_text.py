"""The real tokenizer and template: the ids of llama.cpp, every text and back, the prompt as published."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bench.llama_cpp_peer import LlamaCpp
from engine.chat.template import ChatTemplate
from engine.chat.tokenizer import ChatTokenizer
from engine.gguf_file import GgufFile
from engine.model.llama import LlamaModel

CORPUS = (
    "Hello, world! It's 9 o'clock; they've gone and I'd say we'll wait.",
    "def f(x: int) -> list[str]:\n\treturn [str(i) for i in range(x) if i % 2 == 0]\n\n\n    # four spaces\n",
    '    for (int i = 0; i < 10; ++i) {\n        printf("%d\\n", i);\n    }\r\n',
    "1234567890 3.14159 1e-10 0xFF 1,000,000 2024-11-29 ½ ² ٣",
    "  leading,  double   triple    quadruple spaces and trailing   ",
    "\n\n\n\t\t \n \t mixed \u00a0 whitespace \u3000 and \u200b zero width\n",
    "naïve café Straße ÆØÅ Žluťoučký kůň Ελληνικά кириллица עברית العربية हिन्दी",
    "漢字かな交じり文、中文字符。한국어 텍스트",
    "😀 👩‍👩‍👧‍👦 🏳️‍🌈 🇩🇪 ✈️ é e\u0301",
    "snake_case camelCase SCREAMING_CASE kebab-case a.b.c x+=1 !=== <=> ->",
    "<|im_start|>user\nhi<|im_end|>\n<|endoftext|><repo_name>a/b<file_sep><not_a_token>",
    "don't DON'T can't've 's 'S 'll",
    "\ufffd \x00 \x1f \x7f \u2028 \ufeff",
    "aaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaa",
    "https://example.org/path?x=1&y=%20#frag user@example.org C:\\Windows\\System32",
)


@pytest.mark.parametrize("text", CORPUS)
def test_encodes_as_llama_cpp_does(tokenizer: ChatTokenizer, peer: LlamaCpp, text: str) -> None:
    assert tokenizer.encode(text) == peer.tokenize(text)


@pytest.mark.parametrize("text", CORPUS)
def test_decodes_as_llama_cpp_does(tokenizer: ChatTokenizer, peer: LlamaCpp, text: str) -> None:
    plain = text.replace("<", "(").replace(
        "|", "/"
    )  # without control tokens, which it prints and ours does not
    assert tokenizer.decode(tokenizer.encode(plain)) == peer.detokenize(peer.tokenize(plain)) == plain


@settings(max_examples=60, deadline=None)
@given(text=st.text(st.characters(codec="utf-8", exclude_characters="\x00"), max_size=40))
def test_any_text_encodes_as_llama_cpp_does(tokenizer: ChatTokenizer, peer: LlamaCpp, text: str) -> None:
    assert tokenizer.encode(text) == peer.tokenize(text)


# Bytes without a token in SmolLM2's vocabulary: some control characters, leading bytes of planes 4 to 15.
MISSING = {*b"\x04\x06\x13\x14\x16\x1d", 0xC0, 0xC1, 0xF1, 0xF2, *range(0xF5, 0x100)}


@settings(max_examples=300, deadline=None)
@given(text=st.text(max_size=80).filter(lambda text: "<" not in text and not MISSING & {*text.encode()}))
def test_any_text_comes_back(tokenizer: ChatTokenizer, text: str) -> None:
    assert tokenizer.decode(tokenizer.encode(text)) == text


@pytest.mark.parametrize("text", ["\x04", "a\x1db", "\U00040000", "x\U000f0000y"])
def test_a_byte_without_a_token_is_left_out_as_llama_cpp_does(
    tokenizer: ChatTokenizer, peer: LlamaCpp, text: str
) -> None:
    kept = bytes(byte for byte in text.encode() if byte not in MISSING)
    assert tokenizer.decode(tokenizer.encode(text)) == kept.decode(errors="replace")
    assert tokenizer.encode(text) == peer.tokenize(text)


def test_every_token_has_its_id(tokenizer: ChatTokenizer, smollm2: LlamaModel) -> None:
    file: GgufFile = smollm2.file
    assert [tokenizer.encode(text) for text in ("<|endoftext|>", "<|im_start|>", "<|im_end|>")] == [
        [0],
        [1],
        [2],
    ]
    assert tokenizer.eos_id == 2 == file.require("tokenizer.ggml.eos_token_id")


def test_a_conversation_without_a_system_message_gets_the_published_one(template: ChatTemplate) -> None:
    assert template.render([{"role": "user", "content": "Hi"}]) == (
        "<|im_start|>system\nYou are a helpful AI assistant named SmolLM, trained by Hugging Face<|im_end|>\n"
        "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n"
    )


def test_roles_stand_in_order_and_a_system_message_replaces_the_default(template: ChatTemplate) -> None:
    conversation = [("system", "Be brief."), ("user", "Hi"), ("assistant", "Hello."), ("user", "Bye")]
    messages = [{"role": role, "content": content} for role, content in conversation]
    whole = "".join(f"<|im_start|>{role}\n{content}<|im_end|>\n" for role, content in conversation)
    assert template.render(messages, add_generation_prompt=False) == whole
    assert template.render(messages) == whole + "<|im_start|>assistant\n"
