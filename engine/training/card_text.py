"""README.md of a shipped nano."""

from collections.abc import Iterable, Sequence

from engine.training.gate import GateLine
from engine.training.judging import Measured
from engine.training.model_card import Card, TextPart
from engine.training.paired import Effect


def card_text(card: Card) -> str:
    """Markdown. Figures are those of card.json."""
    sections = (_head(card), _training(card), _worth(card), _gate(card.gate), _effects(card), _again())
    return "\n".join(part for section in sections for part in (*section, ""))


def _head(card: Card) -> Iterable[str]:
    bits = card.quality.bits_per_byte
    yield "# nano"
    yield ""
    yield (
        "A DeepSeek-V4.1 of twelve layers and 3.5 million active parameters at prefill and 7.4 million at "
        "decode (`dockyard model info nano`), with every mechanism of the release, in the release's own "
        "form: experts in FP4, dense weights and Engram tables in FP8. It continues Python source, a little. "
        "It is here so that what a mechanism, a rounding or a replay costs can be measured with real "
        "weights; it is no assistant."
    )
    yield ""
    yield (
        f"Held-out text: **{bits.value:.4f} ± {bits.error:.4f} bits per byte** over "
        f"{card.quality.judged_tokens:,} tokens, with caches as released. Errors are standard errors over "
        "windows of 1,024 tokens. All figures are in card.json too."
    )


def _training(card: Card) -> Iterable[str]:
    text = card.text
    yield "## Data and training"
    yield ""
    yield (
        f"The Python source of {text.text} (digest `{text.digest}`), under the Python Software Foundation "
        f"License Version 2: {_part(text.training)}; held out, by the hash of their paths, "
        f"{_part(text.held_out)}. The weights are under this project's own licence, Apache-2.0. The "
        "vocabulary (4,096 tokens, of bytes) was learnt from the training files."
    )
    yield ""
    yield (
        f"{card.trained.seen:,} tokens in {card.trained.steps:,} steps (Muon for matrices, AdamW for the "
        "rest); in the last fifth with caches and experts rounded as they ship, the indexer's choice and "
        f"replayed windows; then {card.draft_steps} steps of the drafts beside the frozen backbone."
    )
    yield ""
    yield "| tokens | training, nats a token | some held-out windows, bits per byte |"
    yield "|---|---|---|"
    for point in card.loss:
        held_out = point.held_out_bits_per_byte
        yield f"| {point.seen:,} | {point.nats:.3f} | {'' if held_out is None else f'{held_out:.3f}'} |"
    if card.as_trained:
        yield ""
        yield "As trained: these weights were made by rules that the training's code has changed since."
        yield ""
        yield from (f"- {rule}" for rule in card.as_trained)


def _part(part: TextPart) -> str:
    return f"{part.files:,} files, {part.bytes:,} bytes, {part.tokens:,} tokens"


def _worth(card: Card) -> Iterable[str]:
    q, drafts = card.quality, card.quality.drafts
    positions = ", ".join(_with_error(each, 3) for each in drafts.by_position)
    layers = ", ".join(f"{layer}: {share:.3f}" for layer, share in q.recall_by_layer.items())
    yield "## What it is worth"
    yield ""
    yield f"- Loss: {_with_error(q.nats, 4)} nats a token, {_with_error(q.bits_per_byte, 4)} bits per byte."
    yield (
        f"- xz -9e on the same bytes: {q.xz_bits_per_byte:.3f} as one text, "
        f"{q.xz_bits_per_byte_by_file:.3f} file by file."
    )
    yield f"- Indexer's recall of the best choice's attention: {_with_error(q.recall, 3)} (layers {layers})."
    yield (
        f"- Drafts, greedy, {drafts.anchors:,} anchors: {_with_error(drafts.mean_length, 3)} of 5 hold on "
        f"average; up to the first, second, …: {positions}."
    )


def _gate(lines: Sequence[GateLine]) -> Iterable[str]:
    yield "## Gate"
    yield ""
    yield "An under-trained model hides damage. These say whether the figures here mean something."
    yield ""
    yield "| line | wanted | found | measured on | met |"
    yield "|---|---|---|---|---|"
    for each in lines:
        found = _with_error(Measured(each.value, each.error), 4)
        yield f"| {each.name} | {each.wanted} | {found} | {each.measured_on} | {_yes(each.met)} |"


def _effects(card: Card) -> Iterable[str]:
    yield "## Effects"
    yield ""
    yield (
        "The same text with one thing changed, in pairs; positive costs. Divergence is from the unchanged "
        "model's distribution, agreement how often the likeliest token stays."
    )
    yield ""
    yield "Shipped weights, against caches in float32 without replay:"
    yield ""
    yield from _table(card.quality.effects)
    yield ""
    yield f"Float32 weights at the end of the training ({card.trained.seen:,} tokens), against no rounding:"
    yield ""
    yield from _table(card.trained.effects)
    if card.before is not None:
        yield ""
        yield f"Float32 weights before the last part ({card.before.seen:,} tokens), against no rounding:"
        yield ""
        yield from _table(card.before.effects)


def _table(effects: Sequence[Effect]) -> Iterable[str]:
    yield "| change | nats a token | bits per byte | divergence, nats | agreement | tokens |"
    yield "|---|---|---|---|---|---|"
    for each in effects:
        cells = (
            each.name,
            _with_error(each.nats, 5, sign=True),
            _with_error(each.bits_per_byte, 5, sign=True),
            _with_error(each.divergence, 5),
            f"{each.agreement:.4f} ± {each.disagreement.error:.4f}",
            f"{each.tokens:,}",
        )
        yield f"| {' | '.join(cells)} |"


def _again() -> Iterable[str]:
    yield "## Again from nothing"
    yield ""
    yield "```sh"
    yield "python -m engine.training.nano --work DIR     # hours; the same command goes on where it stopped"
    yield "python -m engine.training.card --work DIR     # measures, and makes this folder"
    yield "python -m bench.nano_quality --json           # measures what is here"
    yield "```"


def _with_error(found: Measured, digits: int, *, sign: bool = False) -> str:
    return f"{found.value:{'+' if sign else ''}.{digits}f} ± {found.error:.{digits}f}"


def _yes(met: bool) -> str:
    return "yes" if met else "**no**"
