"""What nano has learnt, and what each mechanism and each rounding of it is worth on held-out text.

`python -m bench.nano_quality --json [--quick] [--model PATH]`. The value is the shipped model's bits per byte
of the standard library's held-out files (`nano.bits_per_byte`), with caches as released and every row
through every layer; the peer is xz on the same bytes. Effects are paired: the same windows with one thing
changed, in nats a token and bits a byte with standard errors over windows, with the divergence and how often
the likeliest token stays. They are measured through the serving model in the profile `exact`, against caches
in float32 and no replay; the indexer's recall on the training's network with the shipped weights, which shows
the attention over all groups (a test holds the two to the same logits). What shipped weights cannot tell,
since they are rounded already, comes from the model card. Beside it stands SmolLM2 with keys and values
rounded.

`met`: every line of the gate; the quick form's small sample misses a line where it is more than two standard
errors beyond it. Nothing here is a time, so noise voids nothing.
"""

import argparse
import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch

from bench import common
from bench.nano_quality_smollm2 import SmolLM2Quality, against_known, in_all_parts, parts_of
from engine.model_path import model_path
from engine.training.corpus import Corpus, standard_library
from engine.training.gate import GateLine, gate
from engine.training.model_card import Card, read_card
from engine.training.paired import Effect
from engine.training.quality import FULL, QUICK, Quality, Size, measure_quality
from engine.training.spread import spread

SMOLLM2_WINDOWS = {True: 8, False: 48}  # by `quick`
SLACK = {True: 2.0, False: 0.0}  # standard errors: a small sample misses a line by chance


@dataclass(frozen=True, slots=True)
class Verdict(common.Comparison):
    """Less is better. `lines`: of the gate."""

    lines: tuple[GateLine, ...]

    @property
    def met(self) -> bool:
        return all(line.met for line in self.lines)


def main(arguments: Sequence[str]) -> int:
    """Measure, print, and return 1 where a line of the gate was missed."""
    own = argparse.ArgumentParser(add_help=False)
    own.add_argument("--model", default="nano", help="a built-in name, or a folder of weights")
    chosen, options = common.parse_own("nano_quality", __doc__, arguments, own)
    surroundings = common.Surroundings(("torch", "numpy", "tokenizers"))
    torch.set_num_threads(1)
    folder, processes = model_path(chosen.model), len(os.sched_getaffinity(0))
    corpus, card = standard_library(), read_card(folder)
    size = QUICK if options.quick else FULL
    quality = measure_quality(folder, corpus, size, processes, common.progress)
    smollm2 = measure_smollm2(corpus, SMOLLM2_WINDOWS[options.quick], processes)
    slack = SLACK[options.quick]
    lines = gate(quality, card.fp4_before if card else None, slack)
    for text in said(quality, size, slack):
        common.progress(text)
    verdict = Verdict(
        name="nano_quality",
        unit="bits per byte of held-out text",
        value=quality.bits_per_byte.value,
        peer="xz on the same bytes",
        peer_value=quality.xz_bits_per_byte,
        target=1.0,
        lines=lines,
    )
    sample = {"size": asdict(size), "slack_errors": slack}
    detail = describe(quality, smollm2, card, lines) | sample
    value = common.report(verdict, surroundings, detail)
    return common.finish({**value, "met": verdict.met, "noisy": False}, options)


def said(quality: Quality, size: Size, slack: float) -> Iterable[str]:
    """The sample, and the indexer's recall layer by layer, for people."""
    drafts, effect = quality.drafts, quality.effects[0]
    yield (
        f"sample: {quality.judged_tokens:,} tokens judged, {effect.tokens:,} compared, {size.recalled} "
        f"windows for recall, {drafts.anchors:,} drafts; a line is missed {slack:g} standard errors beyond it"
    )
    layers = ", ".join(f"{layer}: {share:.3f}" for layer, share in quality.recall_by_layer.items())
    yield f"indexer's recall by layer: {layers}"


def measure_smollm2(corpus: Corpus, count: int, processes: int) -> SmolLM2Quality:
    """On the same files."""
    return in_all_parts(spread(parts_of(corpus.held_out, count), processes, common.progress))


def describe(
    quality: Quality, smollm2: SmolLM2Quality, card: Card | None, lines: Sequence[GateLine]
) -> dict[str, Any]:
    """The object's detail. Dotted names are those that others look up."""
    drafts = quality.drafts
    return {
        "nano.bits_per_byte": quality.bits_per_byte.value,
        "nano.bits_per_byte_error": quality.bits_per_byte.error,
        "nano.judged_tokens": quality.judged_tokens,
        "nano.mean_accepted_length": drafts.mean_length.value,
        "text": quality.text,
        "same_text": None if card is None else quality.text == card.quality.text,
        "card_bits_per_byte": None if card is None else card.quality.bits_per_byte.value,
        "xz_bits_per_byte_by_file": quality.xz_bits_per_byte_by_file,
        "gate": [asdict(line) for line in lines],
        "effects": table(quality.effects),
        "recall": asdict(quality.recall) | {"by_layer": quality.recall_by_layer},
        "drafts": asdict(drafts),
        "smollm2": {
            "tokens": smollm2.tokens,
            "bits_per_byte": asdict(smollm2.bits_per_byte),
            "effects": table(smollm2.effects),
            "known": against_known(smollm2.effects),
        },
        "training": None if card is None else training(card),
    }


def training(card: Card) -> dict[str, Any]:
    """On float32 weights, of which each rounding can be told apart."""
    before = None if card.before is None else table(card.before.effects)
    return {"trained": table(card.trained.effects), "before_last_part": before}


def table(effects: Sequence[Effect]) -> dict[str, Mapping[str, Any]]:
    """By name."""
    return {each.name: {**asdict(each), "agreement": each.agreement} for each in effects}


if __name__ == "__main__":
    common.run(main)
