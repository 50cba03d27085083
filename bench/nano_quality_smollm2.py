"""What rounded keys and values cost SmolLM2: the same table as nano's, of a model that learnt from far more.

Keys after their rotation and values are rounded as they enter the cache, in the released records of
`engine/model/deepseek/records.py`, along the 64 channels of a head. Everything else is the profile `exact`.
M rows, G KV heads, D channels a head.
"""

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from math import hypot
from typing import Any, cast

from torch import Tensor

from engine.chat.tokenizer import tokenizer_from_gguf
from engine.gguf_file import open_gguf
from engine.model.deepseek.quantisation import E2M1_MAX, E4M3_MAX
from engine.model.deepseek.records import IndexRecord, MainRecord, WindowRecord
from engine.model.llama import LlamaModel
from engine.model_path import model_path
from engine.training.corpus import SourceFile
from engine.training.judging import Measured, Window, evenly
from engine.training.paired import Difference, Effect, compared
from engine.training.quality import bits_per_byte
from engine.training.quality_parts import Nats, nats_of
from engine.training.rounding import rounds_by
from engine.training.table import in_all
from kernels.decoder import run_layers
from kernels.operations import Decoder, DecoderStack, Operations, Rows, select_operations

LENGTH = 384  # tokens of a window
Round = Callable[[Tensor], Tensor]


def rounds_with_tensor_scale(x_MGD: Tensor) -> Tensor:
    """A scale above the blocks' brings the largest of all rows to the end of the blocks' range."""
    record = MainRecord(x_MGD.shape[-1])
    scale = x_MGD.abs().amax() / (E2M1_MAX * E4M3_MAX)
    return record.decode(record.encode(x_MGD / scale)) * scale


CHANNELS = 64
FORMATS: dict[str, Round] = {
    "KV in FP8 (E4M3, a power of two by 32)": rounds_by(WindowRecord(CHANNELS)),
    "KV in NVFP4 (E2M1, E4M3 by 16)": rounds_by(MainRecord(CHANNELS)),
    "KV in NVFP4 with a tensor scale": rounds_with_tensor_scale,
    "KV in MXFP4 (E2M1, a power of two by 32)": rounds_by(IndexRecord(CHANNELS)),
}


KNOWN_NATS = {  # a token, measured elsewhere on 2,300 tokens of other text
    "KV in FP8 (E4M3, a power of two by 32)": Measured(0.0011, 0.0041),
    "KV in NVFP4 (E2M1, E4M3 by 16)": Measured(0.087, 0.014),
    "KV in MXFP4 (E2M1, a power of two by 32)": Measured(0.261, 0.039),
}


class RoundingOperations:
    """Operations whose cache keeps what a format keeps of each entry."""

    def __init__(self, operations: Operations, rounded: Round) -> None:
        self._operations, self._rounded = operations, rounded

    def __getattr__(self, name: str) -> Any:
        return getattr(self._operations, name)

    def store_kv(self, cache: Tensor, rows: Rows, k_MGD: Tensor, v_MGD: Tensor) -> None:
        self._operations.store_kv(cache, rows, self._rounded(k_MGD), self._rounded(v_MGD))

    def decoder(self, stack: DecoderStack) -> Decoder:
        """Layer by layer: the C library's own decoder writes its entries itself."""
        return partial(run_layers, cast(Operations, self), stack)


@dataclass(frozen=True, slots=True)
class Part:
    """Of some windows: the loss, and what each format changes."""

    nats: list[Nats]
    differences: dict[str, list[Difference]]


@dataclass(frozen=True, slots=True)
class SmolLM2Quality:
    """`bits_per_byte`: in float32. It has most likely seen the text, so that only differences tell."""

    tokens: int
    bits_per_byte: Measured
    effects: tuple[Effect, ...]


def parts_of(files: Sequence[SourceFile], count: int) -> list[Callable[[], Part]]:
    """`count` windows, evenly spread over the files."""
    return [partial(measure, window) for window in evenly(windows_of_files(files), count)]


def in_all_parts(parts: Sequence[Part]) -> SmolLM2Quality:
    nats = [each for part in parts for each in part.nats]
    return SmolLM2Quality(
        tokens=sum(each.tokens for each in nats),
        bits_per_byte=bits_per_byte(nats),
        effects=in_all(part.differences for part in parts),
    )


def against_known(effects: Sequence[Effect]) -> dict[str, dict[str, float]]:
    """By format, in nats a token: what is known, what is found, and how many standard errors of their
    difference lie between."""
    nats = {each.name: each.nats for each in effects}
    return {
        name: {
            "known": known.value,
            "known_error": known.error,
            "found": nats[name].value,
            "error": nats[name].error,
            "errors_apart": (nats[name].value - known.value) / hypot(nats[name].error, known.error),
        }
        for name, known in KNOWN_NATS.items()
    }


def windows_of_files(files: Sequence[SourceFile]) -> list[Window]:
    """Whole ones. The vocabulary is of bytes, a character of its spelling each."""
    file = open_gguf(model_path("smollm2"))
    tokenizer, spelling = tokenizer_from_gguf(file), file.strings("tokenizer.ggml.tokens")
    texts = [tokenizer.encode_text(each.text) for each in files]
    return [
        Window(tuple(ids), tuple(len(spelling[token]) for token in ids))
        for text in texts
        for start in range(0, len(text) - LENGTH + 1, LENGTH)
        if (ids := text[start : start + LENGTH])
    ]


def measure(window: Window) -> Part:
    """Runs in a process of its own, on one thread."""
    rows = slice(0, len(window.ids) - 1)
    base_TV = _model(None).logits(window.ids)
    nats = Nats(nats_of(base_TV, window.ids), len(window.ids) - 1, window.num_bytes)
    return Part(
        [nats],
        {
            name: [compared(base_TV[rows], _model(name).logits(window.ids)[rows], window, rows)]
            for name in FORMATS
        },
    )


@functools.cache
def _model(rounding: str | None) -> LlamaModel:
    """One for each format; their weights are the same pages of the file."""
    operations = select_operations(1)
    if rounding is not None:
        operations = cast(Operations, RoundingOperations(operations, FORMATS[rounding]))
    return LlamaModel(open_gguf(model_path("smollm2")), operations)
