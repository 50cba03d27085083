"""A DeepSeek model from a folder as an engine sees it, and the state that it keeps of sequences in flight."""

from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor

from engine.chat.deepseek_tokenizer import load_tokenizer
from engine.chat.tokenizer import ChatTokenizer
from engine.checkpoint.folder import CheckpointFolder
from engine.errors import BrokenModelFile
from engine.model import fingerprint
from engine.model.base import ChunkRows, Held, ResumeRules
from engine.model.deepseek import sequence_state
from engine.model.deepseek.cache import ROLLBACK_ROWS, SequenceCache
from engine.model.deepseek.rows import SequenceRows
from engine.model.deepseek.sequence_state import (
    StateSpan,
    WindowSpan,
    export_state,
    import_state,
    layout,
)
from engine.model.deepseek.text_model import TextModel
from engine.model.stages import StageClock
from protocol.handoff import KvPayload, StateLayout


class DeepseekState:
    """A State. What is persistent lies in blocks, windows and the rest in slots."""

    dtype = "deepseek"  # the layout's widths tell the released formats from float32

    def __init__(self, text: TextModel, cache: SequenceCache, *, decoder: bool) -> None:
        """`decoder`: decoder layers leave rows of prompts out, and their windows are not kept."""
        self._text = text
        self.cache = cache
        self.stages = StageClock()
        self._window_layers = min(cache.cut + 1, len(cache.window_LF)) if decoder else len(cache.window_LF)

    def begin(self, slot: int, token_ids: Sequence[int]) -> None:
        self.cache.seed_lookback(slot, token_ids)

    def run(self, chunks: Sequence[ChunkRows]) -> Tensor:
        """Raises StageInterrupted, and what a lack of memory raises; then all that the sequences read is as
        before.

        Of a longer chunk the slot is kept meanwhile. A shorter one writes over nothing that its rows read
        when they run again, and entries in blocks come out the same.
        """
        self.stages.begin(interruptible=self._text.interruptible)
        longer = [c.slot for c in chunks if len(c.token_ids) > ROLLBACK_ROWS]
        saved = [sequence_state.save_slot(self.cache, slot) for slot in longer]
        try:
            logits = self._forward(chunks)
        except BaseException:
            for slot, rows in zip(longer, saved, strict=True):
                sequence_state.restore_slot(self.cache, slot, rows)
            raise
        self.stages.passed("decoder")
        return logits

    def _forward(self, chunks: Sequence[ChunkRows]) -> Tensor:
        ids = [token for chunk in chunks for token in chunk.token_ids]
        rows = [_rows(chunk) for chunk in chunks]
        hidden_TC = self._text.forward(torch.tensor(ids), rows, self.cache, clock=self.stages)
        last_rows: list[int] = []
        end = 0
        for chunk in chunks:
            end += len(chunk.token_ids)
            last_rows += range(end - chunk.num_logits, end)
        return self._text.head(hidden_TC[last_rows]) if last_rows else hidden_TC[:0]

    def layout(self, held: Held) -> StateLayout:
        return layout(self.cache, _span(held))

    def export(self, held: Held) -> KvPayload:
        return export_state(self.cache, _span(held))

    def import_(self, held: Held, payload: KvPayload) -> None:
        import_state(self.cache, _span(held), payload)

    @property
    def block_bytes(self) -> int:
        return sequence_state.block_bytes(self.cache)

    def export_block(self, block: int) -> KvPayload:
        return sequence_state.export_block(self.cache, block)

    def import_block(self, block: int, payload: KvPayload) -> None:
        sequence_state.import_block(self.cache, block, payload)

    def copy_block(self, source: int, target: int) -> None:
        sequence_state.copy_block(self.cache, source, target)

    def copy_slot(self, source: int, target: int) -> None:
        sequence_state.copy_slot(self.cache, source, target)

    def export_windows(self, slot: int, num_positions: int) -> KvPayload:
        span = WindowSpan(slot, num_positions, self._window_layers)
        return sequence_state.export_windows(self.cache, span)

    def import_windows(self, slot: int, num_positions: int, payload: KvPayload) -> None:
        span = WindowSpan(slot, num_positions, self._window_layers)
        sequence_state.import_windows(self.cache, span, payload)


class DeepseekServed:
    """A Model. `replay`: decoder layers see a window of each prompt, as the model was trained to serve."""

    def __init__(self, text: TextModel, folder: CheckpointFolder, *, replay: bool) -> None:
        self.text, self._folder, self._replay = text, folder, replay
        self._decoder = replay and text.has_encoder
        self.operations = text.operations
        self._fingerprint = ""  # until it is asked for

    @property
    def path(self) -> Path:
        return self._folder.path

    @property
    def max_positions(self) -> int:
        return self.text.shape.max_position_embeddings

    @property
    def vocabulary(self) -> int:
        return self.text.shape.vocab_size

    @property
    def eos_ids(self) -> frozenset[int]:
        """Of the config, else of the tokenizer."""
        named = self._folder.config.get("eos_token_id")
        if isinstance(named, int):
            return frozenset({named})
        if (self.path / "tokenizer.json").exists():
            return frozenset({self.tokenizer().eos_id})
        raise BrokenModelFile(f"{self.path}: neither an 'eos_token_id' in config.json nor a tokenizer.json")

    @property
    def fingerprint(self) -> str:
        """Of weights, the caches' formats, the numerics, and replay, which decides what a row computes."""
        if not self._fingerprint:
            shape = (self.text.shape, self._replay, self.text.identity)
            self._fingerprint = fingerprint.of_folder(shape, self.operations, self._folder.shards)
        return self._fingerprint

    @property
    def resume_rules(self) -> ResumeRules:
        """Windows are no part of the prefix cache (section 1.4)."""
        return ResumeRules(self.text.shape.sliding_window, replay=self._replay, decoder=self._decoder)

    @property
    def entry_ratios(self) -> frozenset[int]:
        return self.text.entry_ratios

    def cache_bytes_per_token(self) -> float:
        return self.text.cache_bytes_per_token()

    def new_state(self, num_blocks: int, block_tokens: int, num_slots: int) -> DeepseekState:
        cache = self.text.new_cache(num_blocks, block_tokens, num_slots)
        return DeepseekState(self.text, cache, decoder=self._decoder)

    def tokenizer(self) -> ChatTokenizer:
        return load_tokenizer(self.path)

    def logits(self, token_ids: Sequence[int], last_only: bool = False) -> Tensor:
        return self.text.logits(token_ids, last_only)

    def close(self) -> None:
        self.text.close()


def _rows(chunk: ChunkRows) -> SequenceRows:
    bounds = chunk.bounds
    return SequenceRows(
        chunk.slot, chunk.blocks, chunk.start, len(chunk.token_ids),
        decoder_from=bounds.decoder_from, window_from=bounds.window_from, write_from=bounds.write_from,
    )  # fmt: skip


def _span(held: Held) -> StateSpan:
    bounds = held.bounds
    return StateSpan(held.slot, held.blocks, held.num_positions, bounds.decoder_from, bounds.window_from)
