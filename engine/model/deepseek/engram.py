"""Engram (section 7.3): a hashed n-gram memory that is added to the streams before a layer.

Shapes: T rows, N streams, C channels, A ids looked back on, E channels of a row's concatenated table rows.
The tables' rows depend on ids alone, so all look-ups of a step start before layer 0.
"""

import hashlib
from collections.abc import Callable

import torch
from torch import Tensor

from engine import numerics
from engine.model.deepseek.config import DeepseekConfig
from engine.model.deepseek.config_fields import refuse
from engine.model.deepseek.engram_hash import EngramHash
from engine.model.deepseek.step import Step
from engine.model.tensor_source import RowsInMemory, RowSource, RowTable, TensorSource
from engine.numerics import Dense
from kernels.operations import Operations
from protocol.errors import ResourceShortage
from protocol.ready_threads import ReadyThreads
from protocol.threads import NoThread

_LEAST_GATE = 1e-6


class Engram:
    """One layer's table and gate."""

    def __init__(
        self,
        config: DeepseekConfig,
        source: TensorSource,
        operations: Operations,
        layer: int,
        hashed: EngramHash,
    ) -> None:
        prefix, n, c = f"layers.{layer}.engram", config.hc_mult, config.hidden_size
        self.hash, self.layer, self._channels = hashed, layer, c
        index = config.engram_layer_ids.index(layer)
        shape = (config.engram_num_embeddings[index], config.engram_head_dim)
        self.table: RowTable = (
            source.take_rows(f"{prefix}.embed.weight", shape)
            if isinstance(source, RowSource)
            else RowsInMemory(source.take(f"{prefix}.embed.weight", shape))
        )
        width = (config.engram_max_ngram_size - 1) * config.engram_n_heads * config.engram_head_dim
        projection = source.take(f"{prefix}.wkv.weight", ((n + 1) * c, width))
        self._projection = Dense.prepared(projection, operations)
        q_NC, k_NC = (source.take(f"{prefix}.{name}", (n, c)) for name in ("q_weight", "k_weight"))
        self._weight_NC, self._eps = q_NC * k_NC, config.rms_norm_eps

    def look_up(self, rows_TX: Tensor) -> Tensor:
        """[T, E]. Blocks for the time that the rows' pages take."""
        return self.table.rows(rows_TX.flatten()).view(rows_TX.shape[0], -1)

    def __call__(self, operations: Operations, x_TNC: Tensor, found_TE: Tensor, dead_T: Tensor) -> Tensor:
        """X_k + g_k v, with keys K_k and one value v from the memory.

        rho_k = sum(X_k qw_k kw_k K_k) / (rms(X_k) rms(K_k) sqrt(C)); g_k = sigmoid(sign(rho) sqrt(max(|rho|,
        1e-6))), where +0 counts as positive ("Refinements" 1); 0 for dead rows.
        """
        memory = numerics.linear(operations, found_TE, (self._projection,))[0]
        keys_TNC = memory[:, : -self._channels].reshape(len(memory), -1, self._channels)
        values_TC = memory[:, -self._channels :]
        rho_TN = numerics.row_sum(x_TNC * self._weight_NC * keys_TNC)
        rho_TN = rho_TN * (numerics.mean_square(x_TNC) + self._eps).rsqrt()
        rho_TN = rho_TN * (numerics.mean_square(keys_TNC) + self._eps).rsqrt() / self._channels**0.5
        gate_TN = numerics.sigmoid(rho_TN.abs().clamp(min=_LEAST_GATE).sqrt().copysign(rho_TN))
        return x_TNC + gate_TN.masked_fill(dead_T[:, None, None], 0.0) * values_TC[:, None]


class EngramMemory:
    """All Engram layers of a model, and the thread that reads tables which are not in memory."""

    def __init__(
        self,
        config: DeepseekConfig,
        source: TensorSource,
        operations: Operations,
        compressed_ids: Tensor | None,
    ) -> None:
        """Raises BrokenModelFile, and ResourceShortage where there is no thread for such tables."""
        self._config = config
        hashes = EngramHash.of(config) if config.engram_layer_ids else []
        self.layers = {
            layer: Engram(config, source, operations, layer, hashed)
            for layer, hashed in zip(config.engram_layer_ids, hashes, strict=True)
        }
        self._compressed_V = _checked(config, compressed_ids) if self.layers else None
        slow = any(not isinstance(engram.table, RowsInMemory) for engram in self.layers.values())
        self._reader = _reader() if slow else None

    @property
    def ids_digest(self) -> str:
        """Of each token's compressed id; empty where there is no Engram."""
        ids = self._compressed_V
        return "" if ids is None else hashlib.sha256(ids.numpy().tobytes()).hexdigest()

    def close(self) -> None:
        """Ends the reading thread."""
        if self._reader is not None:
            self._reader.shutdown()

    def issue(self, step: Step, token_ids: Tensor) -> "Lookups | None":
        """Starts the look-ups of a step, and notes its ids for the next. None where there is no Engram."""
        if self._compressed_V is None:
            return None
        cache = step.cache
        plan = step.rows.windows(self._config.engram_max_ngram_size, cache.lookback_rows, bounded=False)
        pool = plan.pool(cache.lookback_F, token_ids, torch.tensor([-1]))
        cache.lookback_F[plan.stored_ring] = token_ids[plan.stored_rows]
        ids_TA = torch.flip(pool[plan.index], (1,))
        gone_TA = ids_TA < 0
        if self._config.image_token_id is not None:
            gone_TA |= ids_TA == self._config.image_token_id
        dead_T = gone_TA[:, 0]
        pad = self._compressed_V[self._config.engram_pad_token_id]
        known_TA = self._compressed_V[ids_TA.clamp(min=0)]
        compressed_TA = torch.where(numerics.running_count(gone_TA, 1) > 0, pad, known_TA)
        waits = {layer: self._start(engram, compressed_TA) for layer, engram in self.layers.items()}
        return Lookups(waits, dead_T)

    def _start(self, engram: Engram, compressed_TA: Tensor) -> Callable[[], Tensor]:
        rows = engram.hash.rows(compressed_TA)
        if self._reader is None:
            return lambda: engram.look_up(rows)
        return self._reader.submit(engram.look_up, rows).result


class Lookups:
    """The look-ups of one step; `wait` blocks until a layer's rows are there."""

    def __init__(self, waits: dict[int, Callable[[], Tensor]], dead_T: Tensor) -> None:
        self._waits, self._dead_T = waits, dead_T

    def wait(self, layer: int, picked: Tensor | None) -> tuple[Tensor, Tensor]:
        """[T, E] and which rows are dead, of all rows of the step or of those picked."""
        found = self._waits[layer]()
        return (found, self._dead_T) if picked is None else (found[picked], self._dead_T[picked])


def _reader() -> ReadyThreads:
    """One thread, before the first step: within one nobody could say that there is none."""
    try:
        return ReadyThreads(1, "engram")
    except NoThread as error:
        raise ResourceShortage(f"there is no thread that reads the Engram tables: {error}") from error


def _checked(config: DeepseekConfig, compressed_ids: Tensor | None) -> Tensor:
    """Compressed ids for the whole vocabulary; tokens that the tokenizer lacks count as padding."""
    expected = config.engram_compressed_vocab_size
    found = 0 if compressed_ids is None else len({int(i) for i in compressed_ids})
    if compressed_ids is None or found != expected:
        counted = f"{found}, what the tokenizer compresses to"
        raise refuse("text_config.engram_compressed_vocab_size", expected, counted)
    pad = int(compressed_ids[config.engram_pad_token_id])
    table = torch.full((max(config.vocab_size, len(compressed_ids)),), pad)
    table[: len(compressed_ids)] = compressed_ids
    return table
