"""A llama of two layers with random weights in a GGUF file of 100 KB: every format, every code path, no wait.

Its vocabulary is three control tokens, the 256 bytes and a few merges, so that any text and any sequence of
bytes can be written in its tokens.
"""

from collections.abc import Collection, Mapping
from pathlib import Path

import gguf
import numpy as np
from gguf import GGMLQuantizationType as Format
from tokenizers import pre_tokenizers

LAYERS, CHANNELS, FEED_FORWARD, HEADS, KV_HEADS, HEAD_CHANNELS, POSITIONS = 2, 64, 96, 4, 2, 16, 512
CONTROL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
EOS = 2
_BYTES = tuple(sorted(pre_tokenizers.ByteLevel.alphabet()))
_MERGES = ("h e", "l l", "he ll", "hell o", "\u0120 t", "\u0120t h", "\u0120th e", "e r")
TOKENS = (*CONTROL, *_BYTES, *(merge.replace(" ", "") for merge in _MERGES))
TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)

Metadata = Mapping[str, object]


def write_tiny_gguf(
    path: Path,
    *,
    seed: int = 0,
    without_tensors: Collection[str] = (),
    reshaped: Mapping[str, tuple[int, ...]] | None = None,
    without_keys: Collection[str] = (),
    metadata: Metadata | None = None,
    formats: Mapping[str, Format] | None = None,
    added: Mapping[str, tuple[int, ...]] | None = None,
) -> Path:
    """Write the model, or a variant: tensors or keys left out, added, or replaced."""
    writer = gguf.GGUFWriter(path, "llama")
    for key, value in {**_metadata(), **(metadata or {})}.items():
        if key not in without_keys:
            _add(writer, key, value)
    random = np.random.default_rng(seed)
    more = {name: (shape, Format.F32) for name, shape in (added or {}).items()}
    for name, (shape, usual) in {**_tensors(), **more}.items():
        form = (formats or {}).get(name, usual)
        values = random.standard_normal((reshaped or {}).get(name, shape), dtype=np.float32)
        if name in without_tensors:
            continue
        values = 1 + 0.1 * values if "norm" in name else values * (0.7 if "embd" in name else 0.25)
        if form is Format.F32:
            writer.add_tensor(name, values)
        else:
            writer.add_tensor(name, gguf.quants.quantize(values, form), raw_dtype=form)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def byte_ids(data: bytes) -> list[int]:
    """The single-byte tokens of some bytes, valid UTF-8 or not."""
    to_character = _byte_alphabet()
    return [TOKENS.index(to_character[byte]) for byte in data]


def _byte_alphabet() -> dict[int, str]:
    """GPT-2's mapping: printable bytes stand for themselves, the others for the code points after 255."""
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [byte for byte in range(256) if byte not in printable]
    return {**{b: chr(b) for b in printable}, **{b: chr(256 + i) for i, b in enumerate(others)}}


def _metadata() -> dict[str, object]:
    return {
        "llama.block_count": LAYERS,
        "llama.context_length": POSITIONS,
        "llama.embedding_length": CHANNELS,
        "llama.feed_forward_length": FEED_FORWARD,
        "llama.attention.head_count": HEADS,
        "llama.attention.head_count_kv": KV_HEADS,
        "llama.rope.dimension_count": HEAD_CHANNELS,
        "llama.rope.freq_base": 10000.0,
        "llama.attention.layer_norm_rms_epsilon": 1e-5,
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "smollm",
        "tokenizer.ggml.tokens": list(TOKENS),
        "tokenizer.ggml.token_type": [3] * len(CONTROL) + [1] * (len(TOKENS) - len(CONTROL)),
        "tokenizer.ggml.merges": list(_MERGES),
        "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.eos_token_id": EOS,
        "tokenizer.chat_template": TEMPLATE,
    }


def _tensors() -> dict[str, tuple[tuple[int, ...], Format]]:
    c, f, q, kv = CHANNELS, FEED_FORWARD, HEADS * HEAD_CHANNELS, KV_HEADS * HEAD_CHANNELS
    tensors: dict[str, tuple[tuple[int, ...], Format]] = {
        "token_embd.weight": ((len(TOKENS), c), Format.Q8_0),
        "output.weight": ((len(TOKENS), c), Format.Q4_1),
        "output_norm.weight": ((c,), Format.F32),
    }
    for layer in range(LAYERS):
        rows = {"attn_q": q, "attn_k": kv, "attn_v": kv, "ffn_gate": f, "ffn_up": f}
        for name, count in rows.items():
            tensors[f"blk.{layer}.{name}.weight"] = ((count, c), Format.Q4_1)
        tensors[f"blk.{layer}.attn_output.weight"] = ((c, q), Format.F32)
        tensors[f"blk.{layer}.ffn_down.weight"] = ((c, f), Format.Q8_0)
        tensors[f"blk.{layer}.attn_norm.weight"] = ((c,), Format.F32)
        tensors[f"blk.{layer}.ffn_norm.weight"] = ((c,), Format.F32)
    return tensors


def _add(writer: gguf.GGUFWriter, key: str, value: object) -> None:
    match value:
        case bool():
            writer.add_bool(key, value)
        case int():
            writer.add_uint32(key, value)
        case float():
            writer.add_float32(key, value)
        case str():
            writer.add_string(key, value)
        case list():
            writer.add_array(key, value)
        case _:
            raise TypeError(f"{key}: {type(value).__name__}")
