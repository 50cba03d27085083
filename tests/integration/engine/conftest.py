"""The real model, loaded once for the folder."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from bench.llama_cpp_peer import LlamaCpp, llama_cpp
from engine import load_model
from engine.chat.template import ChatTemplate
from engine.chat.tokenizer import ChatTokenizer, tokenizer_from_gguf
from engine.gguf_file import open_gguf
from engine.model.llama import LlamaModel


@pytest.fixture(scope="session")
def smollm2(smollm2_file: Path) -> LlamaModel:
    return load_model("smollm2", threads=2, operations="c")


@pytest.fixture(scope="session")
def tokenizer(smollm2_file: Path) -> ChatTokenizer:
    return tokenizer_from_gguf(open_gguf(smollm2_file))


@pytest.fixture(scope="session")
def template(smollm2_file: Path) -> ChatTemplate:
    return ChatTemplate(open_gguf(smollm2_file).require("tokenizer.chat_template"), {})


@pytest.fixture(scope="session")
def peer(smollm2_file: Path) -> Iterator[LlamaCpp]:
    with llama_cpp(smollm2_file, threads=2) as server:
        yield server
