"""Self-checks of a V4.1 model's bridge: what silently breaks between encoder and decoder is found and named.

A broken bridge raises nothing: the decoder goes on from zeros, from what an earlier prompt left, or from
another layer's entries, and writes fluent text. Each check is a property that holds in bits for any weights,
so that no answer has to be known. Source: fact sheet, sections 1.2, 1.3 and 3. T rows.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from engine.model.base import Model
from engine.model.deepseek import sequence_state
from engine.model.deepseek.cache import SequenceCache, SourceEntries
from engine.model.deepseek.hyper_connections import Stream
from engine.model.deepseek.model import DeepseekModel
from engine.model.deepseek.rows import Rows, SequenceRows
from engine.model.deepseek.sequence_state import StateSpan
from engine.model.deepseek.serving import DeepseekServed
from engine.stage_plan import FirstToken, time_first_token
from protocol.errors import InvalidInput

_LEFTOVER = 0x35  # bytes of an earlier prompt, as it were: a number in every format
_WINDOWS = 4  # how long the prompt is: most of it lies outside the decoder's window
_SEED = 41


@dataclass(frozen=True, slots=True)
class Finding:
    """One check. `layers`: the kv sources that are wrong, where it can tell.

    Of what the encoder itself computes from them only the first: later ones are wrong because it is.
    """

    check: str
    passed: bool
    detail: str
    layers: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class SelfCheck:
    """`first_token` is a measurement, and fails nothing: a busy machine is not a broken bridge."""

    findings: tuple[Finding, ...]
    first_token: FirstToken

    @property
    def passed(self) -> bool:
        return all(finding.passed for finding in self.findings)


def check_model(model: Model) -> SelfCheck:
    """Run all checks; blocks for some ten prompts of four windows. Raises InvalidInput: nothing to cut."""
    if not isinstance(model, DeepseekServed) or not isinstance(model.text, DeepseekModel):
        raise InvalidInput("this model has no encoder apart", hint="a deepseek_v41 folder has, as 'nano'")
    config = model.text.config
    if not config.kv_source_layer_ids:
        raise InvalidInput(f"{model.path}: without kv_source_layer_ids there is no bridge")
    ids = _prompt(config.vocab_size, _WINDOWS * config.sliding_window + 5, config.image_token_id)
    subject = _Subject(model.text, ids)
    findings = (
        _encoder_output(subject), _bridge_written(subject), _bridge_placed(subject),
        _bridge_carried(subject), _bridge_used(subject),
    )  # fmt: skip
    return SelfCheck(findings, time_first_token(model, ids))


def _prompt(vocabulary: int, length: int, image_token: int | None) -> list[int]:
    """Random text: no two places of it are alike."""
    found = np.random.default_rng(_SEED).integers(vocabulary, size=length).tolist()
    return [(token + 1) % vocabulary if token == image_token else token for token in found]


class _EncoderOutput:
    """An Observer: the streams behind the encoder's last layer."""

    def __init__(self, last: int) -> None:
        self._last = last
        self.parts: list[Tensor] = []

    def left(self, layer: int, stream: Stream, rows: Rows) -> None:
        if layer == self._last:
            self.parts.append(stream.x.clone())

    def selected(self, layer: int, groups_TK: Tensor, blocks: dict[int, Tensor], rows: Rows) -> None: ...


class _Subject:
    """A prompt whose end, its last token, is cut off: the encoder runs the rest, then both run the end."""

    def __init__(self, text: DeepseekModel, ids: Sequence[int]) -> None:
        self.text, self.ids, self.count = text, ids, len(ids) - 1
        self._num_blocks = -(-len(ids) // text.block_tokens)

    def new_cache(self, leftover: int = 0) -> SequenceCache:
        """For two sequences. `leftover`: what the bytes of its entries are before anything is written."""
        cache = self.text.new_cache(2 * self._num_blocks, self.text.block_tokens, 2)
        for source in cache.sources.values():
            source.main.view(torch.uint8).fill_(leftover)
            source.index.view(torch.uint8).fill_(leftover)
        return cache

    def blocks(self, slot: int) -> list[int]:
        """Of the second sequence: other ones, in another order."""
        first = range(self._num_blocks)
        return list(first) if slot == 0 else [2 * self._num_blocks - 1 - block for block in first]

    def encode(
        self, cache: SequenceCache, ids: Sequence[int] | None = None, piece: int | None = None
    ) -> Tensor:
        """All but the end through the encoder and the bridge, in pieces; the encoder's output."""
        told, count = _EncoderOutput(cache.cut - 1), self.count
        tokens = torch.tensor(self.ids if ids is None else ids)
        for start in range(0, count, piece or count):
            stop = min(start + (piece or count), count)
            rows = SequenceRows(0, self.blocks(0), start, stop - start, decoder_from=count)
            self.text.forward(tokens[start:stop], [rows], cache, told)
        return torch.cat(told.parts)

    def end(self, cache: SequenceCache, slot: int = 0) -> Tensor:
        """Logits of the end, whose decoder layers know of what came before by the bridge alone."""
        rows = SequenceRows(slot, self.blocks(slot), self.count, 1, decoder_from=self.count)
        return self.text.head(self.text.forward(torch.tensor(self.ids[-1:]), [rows], cache))

    def carry(self, cache: SequenceCache) -> SequenceCache:
        """What the first slot has, in the second of another cache, as hand-offs take it there."""
        found = self.new_cache(_LEFTOVER)
        span = StateSpan(0, self.blocks(0), self.count, decoder_from=self.count)
        payload = sequence_state.export_state(cache, span)
        span = StateSpan(1, self.blocks(1), self.count, decoder_from=self.count)
        sequence_state.import_state(found, span, payload)
        return found

    def entries(self, cache: SequenceCache, slot: int = 0) -> Iterator[tuple[int, SourceEntries, Tensor]]:
        """Each source with the rows that its entries lie in, in order of position."""
        table = torch.tensor(self.blocks(slot))
        for layer, source in cache.sources.items():
            groups, size = torch.arange(self.count // source.ratio), cache.block_tokens // source.ratio
            yield layer, source, table[groups // size] * size + groups % size

    def bytes_of(self, cache: SequenceCache, slot: int = 0) -> dict[int, Tensor]:
        """uint8 [groups, bytes]: main entry and index key."""
        return {
            layer: torch.cat((_bytes(source.main[rows]), _bytes(source.index[rows])), 1)
            for layer, source, rows in self.entries(cache, slot)
        }


def _encoder_output(subject: _Subject) -> Finding:
    """The same bits in two runs, and in pieces."""
    first = subject.encode(subject.new_cache())
    again = torch.equal(first, subject.encode(subject.new_cache()))
    pieces = torch.equal(first, subject.encode(subject.new_cache(), piece=subject.count // 3))
    if again and pieces:
        return Finding("encoder output", True, f"{subject.count} rows: equal in two runs and in pieces")
    what = "differs from run to run" if not again else "depends on how the prompt is cut into pieces"
    return Finding("encoder output", False, what)


def _bridge_written(subject: _Subject) -> Finding:
    """Every entry is this prompt's: none is zero, and none is what was there before."""
    cache, dirty = subject.new_cache(), subject.new_cache(_LEFTOVER)
    subject.encode(cache)
    subject.encode(dirty, piece=subject.count // 3)
    clean, found = subject.bytes_of(cache), subject.bytes_of(dirty)
    stale = tuple(layer for layer in clean if not torch.equal(clean[layer], found[layer]))
    if stale:
        return Finding("bridge written", False, "entries are what was there before the prompt", stale[:1])
    empty = tuple(
        layer
        for layer, source, rows in subject.entries(cache)
        if not bool(cache.records.main.decode(source.main[rows]).any(1).all())
        or not bool(cache.records.index.decode(source.index[rows]).any(1).all())
    )
    if empty:
        return Finding("bridge written", False, "entries are zeros", empty[:1])
    return Finding("bridge written", True, f"entries of layers {_named(clean)}: all are this prompt's")


def _bridge_placed(subject: _Subject) -> Finding:
    """Another token changes its own entry and none before; no two layers have the same entries."""
    place = subject.count // 2
    other = [*subject.ids]
    other[place] = next(token for token in other if token != other[place])
    one, two = subject.new_cache(), subject.new_cache()
    subject.encode(one)
    subject.encode(two, other)
    before, after = subject.bytes_of(one), subject.bytes_of(two)
    wrong = tuple(
        layer
        for layer, source in one.sources.items()
        if _first_change(before[layer], after[layer]) != place // source.ratio
    )
    if wrong:
        return Finding("bridge placed", False, "entries do not stand where their tokens do", wrong[:1])
    same = tuple(b for a in before for b in before if a < b and torch.equal(before[a], before[b]))
    if same:
        return Finding("bridge placed", False, "entries are another layer's", same)
    return Finding("bridge placed", True, f"token {place} changes its own entries, and none before")


def _bridge_carried(subject: _Subject) -> Finding:
    """A hand-off brings every entry, and the end goes on from it to the same bits."""
    cache = subject.new_cache()
    subject.encode(cache)
    carried = subject.carry(cache)
    left, arrived = subject.bytes_of(cache), subject.bytes_of(carried, 1)
    lost = tuple(layer for layer in left if not torch.equal(left[layer], arrived[layer]))
    if lost:
        return Finding("bridge carried", False, "a hand-off brings other entries than it took", lost)
    if not torch.equal(subject.end(cache), subject.end(carried, 1)):
        return Finding("bridge carried", False, "the end has other logits behind a hand-off")
    return Finding("bridge carried", True, "the end has the same logits behind a hand-off")


def _bridge_used(subject: _Subject) -> Finding:
    """Without a source's entries the end has other logits."""
    cache = subject.new_cache()
    subject.encode(cache)
    expected, unread = subject.end(subject.carry(cache), 1), list[int]()
    for layer in cache.sources:
        carried = subject.carry(cache)
        for other, source, rows in subject.entries(carried, 1):
            if other == layer:
                source.main[rows] = 0
        if torch.equal(subject.end(carried, 1), expected):
            unread.append(layer)
    if unread:
        return Finding("bridge used", False, "the prompt's end does not depend on them", tuple(unread))
    return Finding("bridge used", True, f"the prompt's end depends on layers {_named(cache.sources)}")


def _first_change(before: Tensor, after: Tensor) -> int:
    """The first row that differs; -1 for none."""
    changed = (before != after).any(1).nonzero()
    return int(changed[0]) if len(changed) else -1


def _bytes(rows: Tensor) -> Tensor:
    return rows.view(torch.uint8)


def _named(layers: Iterable[int]) -> str:
    return ", ".join(map(str, sorted(layers)))
