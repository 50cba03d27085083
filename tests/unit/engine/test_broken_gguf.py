"""A file that cannot be the model it should be ends in one error that names it: no crash, no hang."""

from pathlib import Path

import pytest
import torch
from gguf import GGMLQuantizationType as Format
from hypothesis import given, settings
from hypothesis import strategies as st
from tiny_gguf import write_tiny_gguf

from engine import load_model
from engine.chat.template import ChatTemplate
from engine.chat.tokenizer import tokenizer_from_gguf
from engine.errors import BrokenModelFile, UnknownModel
from engine.gguf_file import open_gguf
from engine.model_path import model_path
from protocol.errors import DockyardError


def load(path: Path) -> None:
    """All that reads a model file: weights, tokenizer."""
    load_model(str(path), threads=1, operations="torch")
    tokenizer_from_gguf(open_gguf(path))


@pytest.mark.parametrize("part", [0.0, 0.00003, 0.0001, 0.001, 0.05, 0.3, 0.6, 0.9, 0.999, 0.99999])
def test_a_truncated_file_is_refused(tiny_model: Path, tmp_path: Path, part: float) -> None:
    whole = tiny_model.read_bytes()
    broken = tmp_path / "broken.gguf"
    broken.write_bytes(whole[: int(part * len(whole))])
    with pytest.raises(BrokenModelFile, match=r"broken\.gguf"):
        load(broken)


@settings(max_examples=60, deadline=None)
@given(length=st.integers(0, 12_000))
def test_a_header_cut_anywhere_is_refused(
    tiny_model: Path, tmp_path_factory: pytest.TempPathFactory, length: int
) -> None:
    broken = tmp_path_factory.mktemp("cut") / "broken.gguf"
    broken.write_bytes(tiny_model.read_bytes()[:length])
    with pytest.raises(BrokenModelFile, match=r"broken\.gguf"):
        open_gguf(broken)


@settings(max_examples=80, deadline=None)
@given(where=st.integers(4, 2500), value=st.integers(0, 255))
def test_a_changed_byte_in_the_header_is_refused_or_harmless(
    tiny_model: Path, tmp_path_factory: pytest.TempPathFactory, where: int, value: int
) -> None:
    broken = tmp_path_factory.mktemp("changed") / "broken.gguf"
    data = bytearray(tiny_model.read_bytes())
    data[where] = value
    broken.write_bytes(data)
    try:
        load(broken)
    except DockyardError as error:
        assert "broken.gguf" in str(error)  # noqa: PT017 - either outcome is right


@pytest.mark.parametrize("content", [b"", b"GGU", b"GGML" + b"\0" * 100, b"PK\x03\x04", b"{}"])
def test_another_kind_of_file_is_refused(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "other.gguf"
    path.write_bytes(content)
    with pytest.raises(BrokenModelFile, match=r"other\.gguf: does not start with b'GGUF'"):
        load(path)


def test_a_folder_is_refused(tmp_path: Path) -> None:
    with pytest.raises(BrokenModelFile, match="directory"):
        load(tmp_path)


@pytest.mark.parametrize("name", ["token_embd.weight", "blk.1.ffn_down.weight", "output_norm.weight"])
def test_a_missing_tensor_is_named(tmp_path: Path, name: str) -> None:
    path = write_tiny_gguf(tmp_path / "m.gguf", without_tensors={name})
    with pytest.raises(BrokenModelFile, match=rf"m\.gguf: tensor '{name}' is missing, expected shape \["):
        load(path)


@pytest.mark.parametrize(
    ("name", "shape", "found"),
    [
        ("blk.0.attn_q.weight", (32, 64), r"\[32, 64\], expected \[64, 64\]"),
        ("blk.0.attn_norm.weight", (32,), r"\[32\], expected \[64\]"),
        ("output.weight", (10, 64), r"\[10, 64\], expected \[267, 64\]"),
    ],
)
def test_a_misshapen_tensor_is_named(tmp_path: Path, name: str, shape: tuple[int, ...], found: str) -> None:
    path = write_tiny_gguf(tmp_path / "m.gguf", reshaped={name: shape})
    with pytest.raises(BrokenModelFile, match=f"'{name}' has shape {found}"):
        load(path)


@pytest.mark.parametrize(
    "key",
    [
        "llama.block_count", "llama.embedding_length", "llama.attention.head_count", "llama.context_length",
        "tokenizer.ggml.tokens", "tokenizer.ggml.merges", "tokenizer.ggml.eos_token_id",
    ],
)  # fmt: skip
def test_a_missing_key_is_named(tmp_path: Path, key: str) -> None:
    path = write_tiny_gguf(tmp_path / "m.gguf", without_keys={key})
    with pytest.raises(BrokenModelFile, match=f"metadata has no '{key}'"):
        load(path)


@pytest.mark.parametrize(
    ("metadata", "words"),
    [
        ({"llama.block_count": 0}, "block_count"),
        ({"llama.attention.head_count": 0}, "head_count"),
        ({"llama.attention.head_count_kv": 3}, "head_count_kv"),
        ({"llama.rope.dimension_count": 8}, "rope.dimension_count is 8, expected a multiple of 16"),
        ({"llama.embedding_length": 80}, "embedding_length is 80, expected a multiple of 32"),
        ({"llama.feed_forward_length": 65_568}, "feed_forward_length is 65568, expected .* up to 65536"),
        (
            {"llama.attention.head_count": 1, "llama.attention.head_count_kv": 1},
            "head_count .* is 16, expected",
        ),
        ({"llama.rope.scaling.type": "yarn"}, "'llama.rope.scaling.type' is 'yarn'"),
        ({"llama.attention.key_length": 32}, "'llama.attention.key_length' is 32"),
        ({"llama.expert_count": 8}, "'llama.expert_count' is 8: a variant"),
        ({"llama.block_count": "two"}, "block_count"),
        ({"llama.context_length": 2**31}, "context_length"),
        ({"llama.attention.layer_norm_rms_epsilon": "small"}, "epsilon"),
        ({"llama.attention.head_count": ["4"]}, "head_count"),
        ({"tokenizer.ggml.tokens": 5}, "tokens"),
        ({"tokenizer.ggml.merges": ["ab"]}, "merge 'ab' is not a pair"),
        ({"tokenizer.ggml.merges": ["a missing"]}, "merge"),
        ({"tokenizer.ggml.model": "llama"}, "tokenizer 'llama'/'smollm' is not supported"),
        ({"tokenizer.ggml.eos_token_id": "x"}, "eos_token_id"),
        ({"tokenizer.ggml.token_type": [1]}, "token_type"),
    ],
)
def test_a_value_that_cannot_be_is_named(tmp_path: Path, metadata: dict[str, object], words: str) -> None:
    path = write_tiny_gguf(tmp_path / "m.gguf", metadata=metadata)
    with pytest.raises(BrokenModelFile, match=words):
        load(path)


@pytest.mark.parametrize(
    "metadata", [{"llama.rope.scaling.type": "none"}, {"llama.attention.key_length": 16}]
)
def test_a_value_that_changes_nothing_is_taken(tmp_path: Path, metadata: dict[str, object]) -> None:
    load(write_tiny_gguf(tmp_path / "m.gguf", metadata=metadata))


@pytest.mark.parametrize("name", ["blk.0.attn_q.bias", "rope_freqs.weight", "blk.2.attn_norm.weight"])
def test_a_tensor_without_use_is_refused_by_name(tmp_path: Path, name: str) -> None:
    path = write_tiny_gguf(tmp_path / "m.gguf", added={name: (64,)})
    with pytest.raises(BrokenModelFile, match=f"no use in this family: '{name}'"):
        load(path)


@pytest.mark.parametrize("form", [Format.Q4_1, Format.Q8_0, Format.BF16])
@pytest.mark.parametrize("name", ["output_norm.weight", "blk.1.ffn_norm.weight"])
def test_a_norm_in_another_format_is_refused(tmp_path: Path, name: str, form: Format) -> None:
    path = write_tiny_gguf(tmp_path / "m.gguf", formats={name: form})
    with pytest.raises(BrokenModelFile, match=f"'{name}' is {form.name}; supported: F32, F16"):
        load(path)


def test_a_norm_in_half_precision_is_converted(tmp_path: Path) -> None:
    path = write_tiny_gguf(tmp_path / "m.gguf", formats={"output_norm.weight": Format.F16})
    assert load_model(str(path), threads=1, operations="torch")._norm.dtype == torch.float32


def test_arrays_of_arrays_without_end_are_refused(tmp_path: Path) -> None:
    of_one_array = (9).to_bytes(4, "little") + (1).to_bytes(8, "little")
    key = (1).to_bytes(8, "little") + b"k" + (9).to_bytes(4, "little")
    start = b"GGUF" + (3).to_bytes(4, "little") + bytes(8) + (1).to_bytes(8, "little")
    path = tmp_path / "deep.gguf"
    path.write_bytes(start + key + of_one_array * 5000)
    with pytest.raises(BrokenModelFile, match=r"deep\.gguf"):
        load(path)


def test_another_architecture_is_refused(tmp_path: Path) -> None:
    path = write_tiny_gguf(tmp_path / "m.gguf")
    path.write_bytes(path.read_bytes().replace(b"\x05\0\0\0\0\0\0\0llama", b"\x05\0\0\0\0\0\0\0mamba", 1))
    with pytest.raises(BrokenModelFile, match="architecture 'mamba' is not supported"):
        load(path)


def test_an_unknown_model_is_named_with_what_is_known() -> None:
    with pytest.raises(
        UnknownModel, match=r"'gpt-9' is neither a file nor a folder nor one of: nano, smollm2"
    ) as unknown:
        model_path("gpt-9")
    assert unknown.value.exit_code == 2
    with pytest.raises(UnknownModel):
        load_model("gpt-9")


def test_another_dtype_is_refused(tiny_model: Path) -> None:
    with pytest.raises(UnknownModel, match="'float16'"):
        load_model(str(tiny_model), dtype="float16")  # pyright: ignore[reportArgumentType]


def test_a_broken_template_is_refused() -> None:
    with pytest.raises(BrokenModelFile, match="chat template"):
        ChatTemplate("{% for %}", {})
