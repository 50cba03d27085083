"""What a released nano is worth: loss, effects, the indexer's recall and the drafts' acceptance.

Everything is measured on the standard library's held-out files, in windows of 1,024 tokens.
"""

import lzma
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path

from tokenizers import Tokenizer

from engine.training.corpus import Corpus
from engine.training.judging import Measured, Window, evenly, in_groups, ratio, windows_of
from engine.training.network import Recall
from engine.training.paired import Effect
from engine.training.quality_parts import Nats, comparing, drafting, judging, recalling
from engine.training.spread import spread
from engine.training.table import in_all, recall_of
from engine.training.vocabulary import encode_texts

_TOGETHER = 2  # windows of one part


@dataclass(frozen=True, slots=True)
class Size:
    """Windows, evenly spread over the held-out text; None takes all. `stride`: positions between drafts."""

    judged: int | None
    compared: int
    recalled: int
    drafted: int
    stride: int
    length: int = 1024  # tokens of a window


FULL = Size(judged=None, compared=64, recalled=32, drafted=32, stride=16)
QUICK = Size(judged=24, compared=10, recalled=8, drafted=4, stride=24)


@dataclass(frozen=True, slots=True)
class Acceptance:
    """Greedy drafts from anchors in the held-out text, judged by the model."""

    anchors: int
    mean_length: Measured  # drafts that hold; a step commits one token more
    by_position: tuple[Measured, ...]  # share of the anchors whose drafts hold up to there


@dataclass(frozen=True, slots=True)
class Quality:
    """`text`: the digest of the standard library that all is measured on."""

    text: str
    judged_tokens: int
    bits_per_byte: Measured
    nats: Measured  # a token
    xz_bits_per_byte: float  # of all held-out files, one after the other
    xz_bits_per_byte_by_file: float  # of each by itself, as the model is given them
    effects: tuple[Effect, ...]
    recall: Measured
    recall_by_layer: Mapping[int, float]
    drafts: Acceptance

    def effect(self, name: str) -> Effect:
        return next(effect for effect in self.effects if effect.name == name)


def measure_quality(
    folder: Path, corpus: Corpus, size: Size, processes: int, say: Callable[[str], None]
) -> Quality:
    """Blocks for minutes. Raises BrokenModelFile."""
    windows = _windows(folder, corpus, size.length)
    whole = [window for window in windows if len(window.ids) == size.length]
    drafted, recalled = evenly(whole, size.drafted), evenly(whole, size.recalled)
    differing, judged = _groups(evenly(windows, size.compared)), _groups(evenly(windows, size.judged))
    parts = [
        *(drafting(folder, window, size.stride) for window in drafted),
        *(comparing(folder, group) for group in differing),
        *(recalling(folder, window) for window in recalled),
        *(judging(folder, group) for group in judged),
    ]
    found = iter(spread(parts, processes, say))
    lengths = [part.lengths for part in islice(found, len(drafted))]
    effects = in_all(part.differences for part in islice(found, len(differing)))
    recalls = [part.recalls for part in islice(found, len(recalled))]
    nats = [window for part in found for window in part.nats]
    return Quality(
        text=corpus.digest,
        judged_tokens=sum(each.tokens for each in nats),
        bits_per_byte=bits_per_byte(nats),
        nats=ratio([each.nats for each in nats], [each.tokens for each in nats]),
        xz_bits_per_byte=_xz_bits_per_byte(["".join(file.text for file in corpus.held_out)]),
        xz_bits_per_byte_by_file=_xz_bits_per_byte([file.text for file in corpus.held_out]),
        effects=effects,
        recall=recall_of([_summed(each) for each in recalls]),
        recall_by_layer=_by_layer([each for of_window in recalls for each in of_window]),
        drafts=acceptance(lengths),
    )


def acceptance(by_window: Sequence[Sequence[int]]) -> Acceptance:
    """Of lengths of accepted drafts."""
    counts = [len(each) for each in by_window]
    longest = max(length for each in by_window for length in each)
    held = [
        [sum(length >= position for length in each) for each in by_window]
        for position in range(1, longest + 1)
    ]
    return Acceptance(
        anchors=sum(counts),
        mean_length=ratio([sum(each) for each in by_window], counts),
        by_position=tuple(ratio(each, counts) for each in held),
    )


def _windows(folder: Path, corpus: Corpus, length: int) -> list[Window]:
    """Of the held-out files, in the folder's tokens."""
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    files = encode_texts(tokenizer, [file.text for file in corpus.held_out])
    return windows_of(tokenizer, files, length)


def bits_per_byte(found: Sequence[Nats]) -> Measured:
    """Of windows together."""
    return ratio([each.nats / math.log(2) for each in found], [each.num_bytes for each in found])


def _xz_bits_per_byte(texts: Sequence[str]) -> float:
    """What a compressor makes of the same bytes, which a model should beat."""
    raw = [text.encode() for text in texts]
    packed = sum(len(lzma.compress(text, preset=9 | lzma.PRESET_EXTREME)) for text in raw)
    return 8.0 * packed / sum(map(len, raw))


def _summed(found: Sequence[Recall]) -> Recall:
    """A window's index sources together."""
    return Recall(-1, sum(each.got for each in found), sum(each.best for each in found))


def _by_layer(found: Sequence[Recall]) -> dict[int, float]:
    layers = sorted({each.layer for each in found})
    return {layer: recall_of([each for each in found if each.layer == layer]).value for layer in layers}


def _groups(windows: Sequence[Window]) -> list[Sequence[Window]]:
    return list(in_groups(windows, _TOGETHER))
