"""The llama family (dense, grouped-query attention) from a GGUF file.

T rows (tokens) of a step, C channels, H query heads, G KV heads, D channels a head, V vocabulary.
Touvron et al. 2023; differs from it in nothing. GGUF permutes q and k so that rotary pairs are adjacent.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from engine.errors import BrokenModelFile
from engine.gguf_file import GgufFile, GgufTensor
from kernels.operations import Operations, Rope, Rows, Weight, WeightFormat

FORMATS: dict[str, WeightFormat] = {"F32": "f32", "Q4_1": "q4_1", "Q8_0": "q8_0"}


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
        return config

    def _check(self, file: GgufFile) -> None:
        """Shapes that the operations can run: whole blocks, whole vectors, whole groups of heads."""
        limits = [
            (self.channels % 32 == 0, f"embedding_length {self.channels} is no multiple of 32"),
            (self.feed_forward % 32 == 0, f"feed_forward_length {self.feed_forward} is no multiple of 32"),
            (self.num_heads % self.num_kv_heads == 0,
             f"head_count {self.num_heads} is no multiple of head_count_kv {self.num_kv_heads}"),
            (self.head_channels % 16 == 0 and self.head_channels <= 512,
             f"{self.head_channels} channels a head are no multiple of 16 up to 512"),
        ]  # fmt: skip
        for fits, fault in limits:
            if not fits:
                raise BrokenModelFile(f"{file.path}: {fault}")


@dataclass(frozen=True, slots=True)
class LlamaLayer:
    attention_norm: Tensor
    q: Weight
    k: Weight
    v: Weight
    output: Weight
    feed_forward_norm: Tensor
    gate: Weight
    up: Weight
    down: Weight


class LlamaModel:
    """Weights and arithmetic; holds no state of a request. Not thread-safe."""

    def __init__(self, file: GgufFile, operations: Operations) -> None:
        self.config = config = LlamaConfig.from_gguf(file)
        self.file = file
        self.operations = operations
        c, v = config.channels, config.vocabulary
        self._embedding = _weight(file, "token_embd.weight", v, c)
        tied = "output.weight" not in file.tensors
        self._head = self._embedding if tied else _weight(file, "output.weight", v, c)
        self._norm = _vector(file, "output_norm.weight", c)
        self._layers = [_layer(file, config, index) for index in range(config.num_layers)]
        self._rope = Rope.of(config.rope_theta, config.head_channels, config.max_positions)

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
        ops, config = self.operations, self.config
        x_TC = ops.gather(self._embedding, token_ids)
        scale = config.head_channels**-0.5
        for layer, layer_cache in zip(self._layers, cache, strict=True):
            q, k, v = ops.linear(
                ops.rms_norm(x_TC, layer.attention_norm, config.norm_eps), (layer.q, layer.k, layer.v)
            )
            q_THD, k_TGD, v_TGD = (t.view(t.shape[0], -1, config.head_channels) for t in (q, k, v))
            ops.rope_(q_THD, self._rope, rows.positions)
            ops.rope_(k_TGD, self._rope, rows.positions)
            ops.store_kv(layer_cache, rows, k_TGD, v_TGD)
            mixed_TC = ops.paged_attention(q_THD, layer_cache, rows, scale).flatten(1)
            x_TC = x_TC + ops.linear(mixed_TC, (layer.output,))[0]
            gate, up = ops.linear(
                ops.rms_norm(x_TC, layer.feed_forward_norm, config.norm_eps), (layer.gate, layer.up)
            )
            x_TC = x_TC + ops.linear(ops.silu_mul(gate, up), (layer.down,))[0]
        return x_TC

    @torch.inference_mode()
    def head(self, hidden_TC: Tensor) -> Tensor:
        """Logits [T, V] of hidden states."""
        normed = self.operations.rms_norm(hidden_TC, self._norm, self.config.norm_eps)
        return self.operations.linear(normed, (self._head,))[0]

    def logits(self, token_ids: Sequence[int], last_only: bool = False) -> Tensor:
        """One full forward over a prompt: [T, V] float32, or [V] of the last position."""
        count = len(token_ids)
        rows = Rows(
            torch.arange(count), torch.zeros(count, dtype=torch.int64), torch.zeros(1, 1, dtype=torch.int32)
        )
        cache = torch.zeros(self.cache_shape(1, count))
        hidden = self.forward(torch.tensor(token_ids, dtype=torch.int64), rows, cache)
        return self.head(hidden[-1:])[0] if last_only else self.head(hidden)


def _layer(file: GgufFile, config: LlamaConfig, index: int) -> LlamaLayer:
    def weight(name: str, rows: int, columns: int) -> Weight:
        return _weight(file, f"blk.{index}.{name}.weight", rows, columns)

    c, f = config.channels, config.feed_forward
    q, kv = config.num_heads * config.head_channels, config.num_kv_heads * config.head_channels
    return LlamaLayer(
        attention_norm=_vector(file, f"blk.{index}.attn_norm.weight", c),
        q=weight("attn_q", q, c),
        k=weight("attn_k", kv, c),
        v=weight("attn_v", kv, c),
        output=weight("attn_output", c, q),
        feed_forward_norm=_vector(file, f"blk.{index}.ffn_norm.weight", c),
        gate=weight("ffn_gate", f, c),
        up=weight("ffn_up", f, c),
        down=weight("ffn_down", c, f),
    )


def _weight(file: GgufFile, name: str, rows: int, columns: int) -> Weight:
    tensor = file.tensor(name, (rows, columns))
    return Weight(_shared(tensor), rows, columns, _format(file, tensor))


def _format(file: GgufFile, tensor: GgufTensor) -> WeightFormat:
    if tensor.format not in FORMATS:
        raise BrokenModelFile(
            f"{file.path}: tensor {tensor.name!r} is {tensor.format}; supported: {', '.join(FORMATS)}"
        )
    return FORMATS[tensor.format]


def _vector(file: GgufFile, name: str, size: int) -> Tensor:
    return _shared(file.tensor(name, (size,))).float()


def _shared(tensor: GgufTensor) -> Tensor:
    """The mapped pages as a tensor, without a copy. Copy-on-write, since torch knows no read-only tensors."""
    return torch.from_numpy(tensor.data)  # pyright: ignore[reportUnknownMemberType]
