"""A finished training becomes a folder that ships: measured, described, loadable, and measured once."""

import json
from pathlib import Path
from typing import Any

import msgspec
import pytest
from tiny_place import finished_place, tiny_corpus

from engine.model.registry import load_model
from engine.training.card import CardSize, known_quality, main, make_card, ship
from engine.training.card_text import card_text
from engine.training.checkpoint_effects import NAMES, Checkpoint, Extent, known_table
from engine.training.corpus import Corpus
from engine.training.gate import gate
from engine.training.loss_curve import loss_curve
from engine.training.model_card import Card, check_bits_per_byte, read_card
from engine.training.quality import QUICK, Size, acceptance
from engine.training.quality_parts import AS_SERVED, BEHIND_HIT, EFFECTS, SERVED, first_window
from engine.training.variants import REPLAYED

SIZE = CardSize(2, 2, Size(judged=3, compared=2, recalled=2, drafted=2, stride=40, length=160))


def _change(file: Path, old: bytes, new: bytes) -> None:
    file.write_bytes(file.read_bytes().replace(old, new))


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Corpus:
    return tiny_corpus(tmp_path_factory.mktemp("text") / "library")


@pytest.fixture(scope="module")
def work(tmp_path_factory: pytest.TempPathFactory, corpus: Corpus) -> Path:
    return finished_place(tmp_path_factory.mktemp("place") / "work", corpus).folder


@pytest.fixture(scope="module")
def card(work: Path, corpus: Corpus) -> Card:
    return make_card(work, corpus, SIZE, processes=1)


def test_every_change_is_measured_through_the_serving_model(card: Card):
    quality = card.quality
    assert [effect.name for effect in quality.effects] == list(EFFECTS)
    assert all(effect.divergence.value > 0.0 for effect in quality.effects)
    assert quality.effect(AS_SERVED).tokens < quality.effects[0].tokens  # rows behind the prompt alone
    first = quality.effect(first_window(AS_SERVED))
    assert first.tokens < quality.effect(AS_SERVED).tokens
    assert first.divergence.value > quality.effect(AS_SERVED).divergence.value  # what a replay does fades
    assert 0.0 < quality.recall.value < 1.0
    assert quality.drafts.anchors == 2 * 3
    assert quality.bits_per_byte.value > quality.xz_bits_per_byte_by_file > 0.0


def test_what_is_on_record_is_not_measured_again(work: Path, corpus: Corpus, card: Card):
    for name in ("effects.json", "quality.json"):
        _change(work / name, b'"name":"Engram off"', b'"name":"Engrim off"')
    again = make_card(work, corpus, SIZE, processes=1)
    for effects in (again.trained.effects, again.quality.effects):
        assert "Engrim off" in [effect.name for effect in effects]


@pytest.mark.parametrize("of", ["weights", "text", "variants", "extent", "form"])
def test_what_is_of_something_else_is_not_on_record(work: Path, corpus: Corpus, card: Card, of: str):
    """Other weights after as many tokens, another corpus, other variants, fewer windows, an older file."""
    quality, effects = work / "quality.json", work / "effects.json"
    kept = {file: file.read_bytes() for file in (quality, effects)}
    assert _on_record(work, corpus) == (True, True)
    changes: dict[str, tuple[Any, Any]] = {
        "weights": ({"weights": "another"}, {"weights": "another"}),
        "text": ({"text": "another"}, {"text": "another"}),
        "variants": ({"variants": ["Engram off"]}, {"extent": {"names": ["Engram off"], "windows": 2}}),
        "extent": ({"size": msgspec.to_builtins(QUICK)}, {"extent": {"names": NAMES, "windows": 3}}),
        "form": ({"variants": None}, {"extent": None}),
    }
    for file, change in zip(kept, changes[of], strict=True):
        file.write_bytes(msgspec.json.encode(msgspec.json.decode(kept[file]) | change))
    assert _on_record(work, corpus) == (False, False)
    for file, content in kept.items():
        file.write_bytes(content)


def _on_record(work: Path, corpus: Corpus) -> tuple[bool, bool]:
    trained = Checkpoint(work, before_last_part=False)
    return (
        known_quality(work, corpus, SIZE.released) is not None,
        known_table(trained, Extent(NAMES, SIZE.trained)) is not None,
    )


def test_the_folder_loads_and_says_what_it_is_worth(work: Path, card: Card, tmp_path: Path):
    out = tmp_path / "shipped"
    out.mkdir()
    (out / "old").touch()
    assert ship(work / "released", card, out) == sum(file.stat().st_size for file in out.iterdir())
    assert {file.name for file in out.iterdir()} == {
        "README.md", "SHA256SUMS.txt", "card.json", "config.json", "model.safetensors", "tokenizer.json",
    }  # fmt: skip
    assert read_card(out) == card
    assert check_bits_per_byte(out) == card.check_bits_per_byte
    text = (out / "README.md").read_text()
    assert text == card_text(card)
    for figure in (f"{card.quality.bits_per_byte.value:.4f}", "Python Software Foundation", "**no**"):
        assert figure in text
    model = load_model(str(out), threads=1)
    assert model.logits([0, 5], last_only=True).isfinite().all()
    model.close()


def test_a_training_that_has_not_ended_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    assert main(["--work", str(tmp_path)]) == 2
    assert "train to the end first" in capsys.readouterr().err


def test_a_folder_that_is_there_is_left_alone_unless_asked(
    work: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    """By default that is the package's own nano."""
    assert main(["--work", str(work)]) == 2
    assert main(["--work", str(work), "--out", str(tmp_path)]) == 2
    assert capsys.readouterr().err.count("--replace") == 2


def test_a_gate_without_its_first_measurement_is_not_met(card: Card):
    lines = {line.name: line.met for line in gate(card.quality, None)}
    assert not lines["FP4 main KV, divergence in nat"]
    assert lines.keys() == {line.name for line in card.gate}


def test_rows_of_a_replay_begin_behind_it():
    replayed, hit = (next(v for v in SERVED if v.name == name) for name in (REPLAYED, BEHIND_HIT))
    assert replayed.rows(1024, 64, 64) == {
        REPLAYED: slice(512, 1023), first_window(REPLAYED): slice(512, 576),
    }  # fmt: skip
    assert hit.rows(400, 64, 64)[first_window(BEHIND_HIT)] == slice(192, 256)  # 200 in whole blocks
    assert list(hit.rows(130, 64, 64)) == [BEHIND_HIT]  # a hit of a window is a miss: nothing is replayed
    assert replayed.rows(150, 64, 64)[first_window(REPLAYED)] == slice(75, 139)
    assert [*SERVED[0].rows(100, 64, 64)] == [SERVED[0].name]


def test_drafts_hold_up_to_a_position_or_they_do_not():
    found = acceptance([[0, 2, 3], [1, 0, 0]])
    assert [each.value for each in found.by_position] == [3 / 6, 2 / 6, 1 / 6]
    assert (found.anchors, found.mean_length.value) == (6, 1.0)
    assert acceptance([[0], [0]]).by_position == ()


def test_a_curve_forgets_what_a_stopped_training_lost(tmp_path: Path):
    records = [{"seen": 100, "nats": 8.0}, {"seen": 200, "nats": 1.0}, {"draft_steps": 3, "draft_nats": 1.0}]
    records[2:2] = [{"seen": 150, "nats": 6.0}, {"seen": 150, "held_out_bits_per_byte": 2.0}]
    (tmp_path / "log.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
    points = loss_curve(tmp_path / "log.jsonl")
    assert [(p.seen, p.nats, p.held_out_bits_per_byte) for p in points] == [(100, 8.0, None), (150, 6.0, 2.0)]
