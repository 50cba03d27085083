"""Ship a trained nano: its folder of weights, and a card that says what they are worth.

`python -m engine.training.card --work DIR [--out FOLDER] [--replace] [--before-windows all] [--windows 64]
[--quick] [--processes 2]`. Measures what the training's folder has not on record yet: what FP4 costs the
weights from before the last part (`effects_before_last_part.json`), the effects on the trained float32
weights (`effects.json`), and the released weights themselves (`quality.json`). Then FOLDER, by default the
one that the package ships, becomes `released/` with card.json and README.md; one that exists is left alone
without `--replace`. On two quiet cores that takes some 25 minutes; `--quick` looks at fewer windows. What is
on record of the same weights, text and extent is used again.
"""

import argparse
import shutil
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import msgspec
import torch

from engine.checkpoint.checksums import write_sums
from engine.model_path import NANO
from engine.training.card_text import card_text
from engine.training.checkpoint_effects import (
    NAMES,
    Checkpoint,
    Extent,
    keep_table,
    known_table,
    measure_checkpoint,
)
from engine.training.corpus import Corpus, standard_library
from engine.training.draft_trainer import CHECKPOINT, DraftPlan
from engine.training.gate import gate
from engine.training.loss_curve import loss_curve
from engine.training.model_card import Card, TextFacts, check_bits_per_byte, fp4_of, write_card
from engine.training.options import at_least, count_of
from engine.training.quality import FULL, QUICK, Quality, Size, measure_quality
from engine.training.quality_parts import EFFECTS
from engine.training.saved import progress_of
from engine.training.table import Table
from engine.training.tensor_file import digest_of
from engine.training.variants import MAIN_IN_FP4

QUALITY, RELEASED = "quality.json", "released"
LARGEST_BYTES = 24 << 20


@dataclass(frozen=True, slots=True)
class CardSize:
    """How much text each part looks at; windows of 1,024 tokens, None for all."""

    before: int | None
    trained: int | None
    released: Size


@dataclass(frozen=True, slots=True)
class KnownQuality:
    """A measurement, and what it is of: weights and text by their digests."""

    weights: str
    text: str
    variants: tuple[str, ...]
    size: Size
    quality: Quality


def make_card(work: Path, corpus: Corpus, size: CardSize, processes: int) -> Card:
    """Measures what is not on record. Blocks for minutes. Raises BrokenModelFile."""
    quality = _quality(work, corpus, size.released, processes)
    trained = _table(Checkpoint(work, before_last_part=False), Extent(NAMES, size.trained), processes)
    assert trained is not None, "what is released has been trained"
    gated = Extent((MAIN_IN_FP4,), size.before)
    before = _table(Checkpoint(work, before_last_part=True), gated, processes)
    return Card(
        draft_steps=_draft_steps(work),
        text=msgspec.json.decode((work / "corpus.json").read_bytes(), type=TextFacts),
        loss=loss_curve(work / "log.jsonl"),
        quality=quality,
        trained=trained,
        before=before,
        gate=gate(quality, fp4_of(before)),
        check_bits_per_byte=check_bits_per_byte(work / RELEASED),
    )


def ship(released: Path, card: Card, out: Path) -> int:
    """`out` is replaced as a whole. Returns its bytes."""
    new = out.with_name(f".{out.name}.new")
    shutil.rmtree(new, ignore_errors=True)
    shutil.copytree(released, new)
    write_sums(new)
    write_card(new, card)
    (new / "README.md").write_text(card_text(card))
    for file in new.iterdir():
        file.chmod(0o644)
    shutil.rmtree(out, ignore_errors=True)
    new.rename(out)
    return sum(file.stat().st_size for file in out.iterdir())


def _quality(work: Path, corpus: Corpus, size: Size, processes: int) -> Quality:
    known = known_quality(work, corpus, size)
    if known is not None:
        return known
    _say("the released weights")
    quality = measure_quality(work / RELEASED, corpus, size, processes, _say)
    (work / QUALITY).write_bytes(msgspec.json.encode(_known(work, corpus, size, quality)) + b"\n")
    return quality


def known_quality(work: Path, corpus: Corpus, size: Size) -> Quality | None:
    """What is on record of the released weights, on this text. A file of another form is none."""
    if not (work / QUALITY).exists():
        return None
    try:
        known = msgspec.json.decode((work / QUALITY).read_bytes(), type=KnownQuality)
    except msgspec.ValidationError:
        return None
    return known.quality if known == _known(work, corpus, size, known.quality) else None


def _known(work: Path, corpus: Corpus, size: Size, quality: Quality) -> KnownQuality:
    weights = digest_of(*sorted((work / RELEASED).iterdir()))
    return KnownQuality(weights, corpus.digest, EFFECTS, size, quality)


def _draft_steps(work: Path) -> int:
    progress = progress_of(work / CHECKPOINT)
    return DraftPlan().steps if progress is None else progress["steps"]


def _table(checkpoint: Checkpoint, extent: Extent, processes: int) -> Table | None:
    known = known_table(checkpoint, extent)
    if known is not None:
        return known
    _say(f"the weights of {checkpoint.place}")
    table = measure_checkpoint(checkpoint, extent, processes)
    if table is not None:
        keep_table(checkpoint, extent, table)
    return table


def _say(text: str) -> None:
    sys.stderr.write(f"{text}\n")
    sys.stderr.flush()


def main(arguments: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m engine.training.card", description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )  # fmt: skip
    parser.add_argument("--work", type=Path, required=True, help="the training's folder")
    parser.add_argument("--out", type=Path, default=NANO, help="the folder to make")
    parser.add_argument("--replace", action="store_true", help="the folder, where it exists, as a whole")
    parser.add_argument("--before-windows", type=count_of, default=None, help="a number, or all")
    parser.add_argument("--windows", type=count_of, default=64, help="for the trained float32 weights")
    parser.add_argument("--quick", action="store_true", help="the released weights on fewer windows")
    parser.add_argument("--processes", type=at_least(1), default=2, help="of one thread each")
    options = parser.parse_args(arguments)
    if not (options.work / RELEASED).is_dir():
        _say(f"{options.work}: no {RELEASED}/; train to the end first: python -m engine.training.nano")
        return 2
    if options.out.exists() and not options.replace:
        _say(f"{options.out} exists; name another folder by --out, or have it replaced by --replace")
        return 2
    torch.set_num_threads(1)
    size = CardSize(options.before_windows, options.windows, QUICK if options.quick else FULL)
    card = make_card(options.work, standard_library(), size, options.processes)
    num_bytes = ship(options.work / RELEASED, card, options.out)
    print(f"{options.out}: {num_bytes:,} bytes; gate {'met' if all(g.met for g in card.gate) else 'missed'}")
    if num_bytes > LARGEST_BYTES:
        _say(f"{options.out} is larger than {LARGEST_BYTES:,} bytes")
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
