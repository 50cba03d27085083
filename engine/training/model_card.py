"""What is on record of a shipped nano, beside its weights: `card.json`, which README.md says in words."""

import math
from dataclasses import dataclass
from pathlib import Path

import msgspec
from tokenizers import Tokenizer

from engine.model.registry import load_model
from engine.training.gate import GateLine
from engine.training.paired import Effect
from engine.training.quality import Quality
from engine.training.quality_parts import nats_of
from engine.training.table import Table
from engine.training.variants import MAIN_IN_FP4
from engine.training.vocabulary import encode_texts

CARD = "card.json"
CHECK_TEXT = '''"""Words of a text, counted."""

import re
from collections import Counter


def count_words(text, *, least=1):
    """Return a dict of lower-case words to how often each occurs."""
    if not isinstance(text, str):
        raise TypeError("expected str, got %r" % type(text).__name__)
    counts = Counter(match.group().lower() for match in re.finditer(r"\\w+", text))
    return {word: count for word, count in counts.items() if count >= least}


class CountWordsTest(unittest.TestCase):
    def test_count_words(self):
        self.assertEqual(count_words("a b a"), {"a": 2, "b": 1})
        self.assertRaises(TypeError, count_words, None)


if __name__ == "__main__":
    unittest.main()
'''


@dataclass(frozen=True, slots=True)
class TextPart:
    """Of the text."""

    files: int
    bytes: int
    tokens: int


@dataclass(frozen=True, slots=True)
class TextFacts:
    """A training folder's corpus.json."""

    text: str
    digest: str
    training: TextPart
    held_out: TextPart


@dataclass(frozen=True, slots=True)
class LossPoint:
    """The training's mean loss up to so many tokens, and on some held-out windows there."""

    seen: int
    nats: float
    held_out_bits_per_byte: float | None


@dataclass(frozen=True, slots=True)
class Card:
    """`trained` and `before`: effects on float32 weights, at the end and before the last part.

    `as_trained`: rules that these weights were made by and that the training's code has changed since.
    """

    draft_steps: int
    text: TextFacts
    loss: tuple[LossPoint, ...]
    quality: Quality
    trained: Table
    before: Table | None
    gate: tuple[GateLine, ...]
    check_bits_per_byte: float  # of CHECK_TEXT, which no Python's version changes
    as_trained: tuple[str, ...] = ()

    @property
    def fp4_before(self) -> Effect | None:
        return fp4_of(self.before)


def fp4_of(before: Table | None) -> Effect | None:
    """What FP4 costs weights that have not learnt to bear it, if that was measured."""
    effects = () if before is None else before.effects
    return next((each for each in effects if each.name == MAIN_IN_FP4), None)


def read_card(folder: Path) -> Card | None:
    """None where the folder has none."""
    file = folder / CARD
    return msgspec.json.decode(file.read_bytes(), type=Card) if file.exists() else None


def write_card(folder: Path, card: Card) -> None:
    text = msgspec.json.format(msgspec.json.encode(card), indent=2)
    (folder / CARD).write_bytes(text + b"\n")


def check_bits_per_byte(folder: Path) -> float:
    """Of CHECK_TEXT, by the model as it is served."""
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    (ids,) = encode_texts(tokenizer, [CHECK_TEXT])
    model = load_model(str(folder), threads=1)
    nats = nats_of(model.logits(ids), ids)
    model.close()
    return nats / math.log(2) / len(CHECK_TEXT.encode())
