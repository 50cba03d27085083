"""The llama family (dense, grouped-query attention) from a GGUF file.

T rows (tokens) of a step, C channels, H query heads, G KV heads, D channels a head, V vocabulary.
Touvron et al. 2023; differs from it in nothing. GGUF permutes q and k so that rotary pairs are adjacent.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from engine.chat.tokenizer import ChatTokenizer, tokenizer_from_gguf
from engine.errors import BrokenModelFile
from engine.gguf_file import GgufFile
from engine.model import fingerprint
from engine.model.base import ResumeRules, check_prompt
from engine.model.llama_state import LlamaState
from engine.model.weights import WeightReader
from kernels.limits import BLOCK, MAX_COLUMNS, MAX_HEAD
from kernels.operations import (
    DecoderLayer,
    DecoderStack,
    Operations,
    Rope,
    Rows,
    Weight,
)

_KEYS = frozenset({
    "llama.block_count", "llama.context_length", "llama.embedding_length", "llama.feed_forward_length",
    "llama.attention.head_count", "llama.attention.head_count_kv", "llama.rope.dimension_count",
    "llama.rope.freq_base", "llama.attention.layer_norm_rms_epsilon",
    "llama.vocab_size",  # the length of the list of tokens is what counts
})  # fmt: skip
_HEAD_SIZES = frozenset({"llama.attention.key_length", "llama.attention.value_length"})


@dataclass(frozen=True, slots=True)
class LlamaConfig:
    """The shape, from the file's metadata."""

    num_layers: int
    channels: int
    feed_forward: int
    num_heads: int
    num_kv_heads: int
    head_channels: int
    vocabulary: int
    max_positions: int
    rope_theta: float
    norm_eps: float

    @classmethod
    def from_gguf(cls, file: GgufFile) -> "LlamaConfig":
        channels, heads = file.integer("llama.embedding_length"), file.integer("llama.attention.head_count")
        config = cls(
            num_layers=file.integer("llama.block_count", most=1024),
            channels=channels,
            feed_forward=file.integer("llama.feed_forward_length"),
            num_heads=heads,
            num_kv_heads=file.integer("llama.attention.head_count_kv", heads),
            head_channels=file.integer("llama.rope.dimension_count", max(channels // heads, 1)),
            vocabulary=len(file.strings("tokenizer.ggml.tokens")),
            max_positions=file.integer("llama.context_length"),
            rope_theta=file.number("llama.rope.freq_base", 10000.0),
            norm_eps=file.number("llama.attention.layer_norm_rms_epsilon"),
        )
        config._check(file)
        _refuse_variants(file, config.head_channels)
        return config

    def _check(self, file: GgufFile) -> None:
        """Shapes that the operations can run: whole blocks, whole vectors, whole groups of heads."""
        widths = {
            "llama.embedding_length": self.channels,
            "llama.feed_forward_length": self.feed_forward,
            "llama.attention.head_count times the channels a head": self.num_heads * self.head_channels,
        }
        limits = [
            (0 < width <= MAX_COLUMNS and width % BLOCK == 0,
             f"{key} is {width}, expected a multiple of {BLOCK} up to {MAX_COLUMNS}")
            for key, width in widths.items()
        ]  # fmt: skip
        limits += [
            (self.num_heads % self.num_kv_heads == 0,
             f"llama.attention.head_count is {self.num_heads}, expected a multiple of "
             f"llama.attention.head_count_kv, which is {self.num_kv_heads}"),
            (self.head_channels % 16 == 0 and self.head_channels <= MAX_HEAD,
             f"llama.rope.dimension_count is {self.head_channels}, expected a multiple of 16 up to "
             f"{MAX_HEAD}"),
        ]  # fmt: skip
        for fits, fault in limits:
            if not fits:
                raise BrokenModelFile(f"{file.path}: {fault}")


class LlamaModel:
    """Weights and arithmetic; holds no state of a request. Not thread-safe."""

    def __init__(self, file: GgufFile, operations: Operations) -> None:
        self.config = config = LlamaConfig.from_gguf(file)
        self.file = file
        self._fingerprint = ""  # until it is asked for
        self.operations = operations
        c, v = config.channels, config.vocabulary
        weights = WeightReader(file)
        self._embedding = weights.matrix("token_embd.weight", v, c)
        tied = "output.weight" not in file.tensors
        head = self._embedding if tied else weights.matrix("output.weight", v, c)
        self._head = operations.prepare(head)
        self._norm = weights.vector("output_norm.weight", c)
        layers = tuple(_layer(weights, operations, config, index) for index in range(config.num_layers))
        weights.check_all_taken()
        if self._head.packed:
            weights.release()
        rope = Rope.of(config.rope_theta, config.head_channels, config.max_positions)
        self._decoder = operations.decoder(DecoderStack(layers, rope, config.head_channels, config.norm_eps))

    @property
    def max_positions(self) -> int:
        return self.config.max_positions

    @property
    def vocabulary(self) -> int:
        return self.config.vocabulary

    @property
    def eos_ids(self) -> frozenset[int]:
        return frozenset({self.file.integer("tokenizer.ggml.eos_token_id", least=0)})

    @property
    def fingerprint(self) -> str:
        if not self._fingerprint:
            self._fingerprint = fingerprint.of_gguf(self.config, self.operations, self.file)
        return self._fingerprint

    @property
    def resume_rules(self) -> ResumeRules:
        """A cached prefix is all that its rows would have left."""
        return ResumeRules()

    @property
    def entry_ratios(self) -> frozenset[int]:
        return frozenset({1})

    def new_state(self, num_blocks: int, block_tokens: int, num_slots: int) -> LlamaState:
        return LlamaState(self, num_blocks, block_tokens)

    def tokenizer(self) -> ChatTokenizer:
        return tokenizer_from_gguf(self.file)

    def close(self) -> None:
        """It has no threads of its own."""

    def cache_bytes_per_token(self) -> float:
        """Bytes of persistent KV a token: keys and values of every layer in float32."""
        c = self.config
        return float(c.num_layers * 2 * c.num_kv_heads * c.head_channels * 4)

    def cache_shape(self, num_blocks: int, block: int) -> tuple[int, ...]:
        """[layers, blocks, 2 (key, value), block, G, D]."""
        c = self.config
        return (c.num_layers, num_blocks, 2, block, c.num_kv_heads, c.head_channels)

    @torch.inference_mode()
    def forward(self, token_ids: Tensor, rows: Rows, cache: Tensor) -> Tensor:
        """Run the rows through all layers, writing their KV into `cache`; hidden states [T, C].

        token_ids int64 [T]. A row's own entry is written before any row attends, so rows of one sequence
        may come in one call, in any number.
        """
        return self._decoder(self.operations.gather(self._embedding, token_ids), rows, cache)

    @torch.inference_mode()
    def head(self, hidden_TC: Tensor) -> Tensor:
        """Logits [T, V] of hidden states."""
        normed = self.operations.rms_norm(hidden_TC, self._norm, self.config.norm_eps)
        return self.operations.linear(normed, (self._head,))[0]

    def logits(self, token_ids: Sequence[int], last_only: bool = False) -> Tensor:
        """One full forward over a prompt: [T, V] float32, or [V] of the last position.

        Raises InvalidRequest.
        """
        check_prompt(token_ids, self.vocabulary, self.max_positions)
        count = len(token_ids)
        rows = Rows(
            torch.arange(count), torch.zeros(count, dtype=torch.int64), torch.zeros(1, 1, dtype=torch.int32)
        )
        cache = torch.zeros(self.cache_shape(1, count))
        hidden = self.forward(torch.tensor(token_ids, dtype=torch.int64), rows, cache)
        return self.head(hidden[-1:])[0] if last_only else self.head(hidden)


def _layer(weights: WeightReader, operations: Operations, config: LlamaConfig, index: int) -> DecoderLayer:
    def weight(name: str, rows: int, columns: int) -> Weight:
        return operations.prepare(weights.matrix(f"blk.{index}.{name}.weight", rows, columns))

    c, f = config.channels, config.feed_forward
    q, kv = config.num_heads * config.head_channels, config.num_kv_heads * config.head_channels
    return DecoderLayer(
        attention_norm=weights.vector(f"blk.{index}.attn_norm.weight", c),
        q=weight("attn_q", q, c),
        k=weight("attn_k", kv, c),
        v=weight("attn_v", kv, c),
        output=weight("attn_output", c, q),
        feed_forward_norm=weights.vector(f"blk.{index}.ffn_norm.weight", c),
        gate=weight("ffn_gate", f, c),
        up=weight("ffn_up", f, c),
        down=weight("ffn_down", c, f),
    )


def _refuse_variants(file: GgufFile, head_channels: int) -> None:
    """Keys of variants that compute something else: to ignore one is to run, and silently wrong."""
    for key, value in file.metadata.items():
        harmless = (key in _HEAD_SIZES and value == head_channels) or (
            key == "llama.rope.scaling.type" and value == "none"
        )
        if key.startswith("llama.") and key not in _KEYS and not harmless:
            raise BrokenModelFile(
                f"{file.path}: metadata {key!r} is {value!r:.60}: a variant that is not supported"
            )
