"""A released folder as it is measured: its weights come back whole, and replays do what serving does."""

from pathlib import Path

import pytest
import torch
from tiny_nano import stirred_parameters, tiny_config
from tiny_place import finished_place, tiny_corpus

from engine.model.deepseek.config import Quantisation
from engine.model.registry import load_model
from engine.training.draft import initial_drafts
from engine.training.parameters import released_tensors, stacked
from engine.training.shipped import (
    Shipped,
    open_shipped,
    read_as_served,
    read_behind_hit,
    read_replayed,
    read_whole,
)

CONFIG = tiny_config()
IDS = [(7 * number) % 90 + 5 for number in range(300)]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    place = tmp_path_factory.mktemp("shipped")
    return finished_place(place / "work", tiny_corpus(place / "library")).folder / "released"


@pytest.fixture(scope="module")
def shipped(folder: Path) -> Shipped:
    return open_shipped(folder)


def test_experts_are_stacked_as_they_were():
    parameters = stirred_parameters(CONFIG) | initial_drafts(CONFIG, 1)
    again = stacked(dict(released_tensors(parameters)))
    assert again.keys() == parameters.keys()
    assert all(torch.equal(again[name], tensor) for name, tensor in parameters.items())


def test_it_computes_what_the_loaded_model_does(folder: Path, shipped: Shipped):
    loaded = load_model(str(folder), threads=1)
    ours = shipped.served(Quantisation(), shipped.parameters)
    assert torch.equal(read_whole(ours, IDS), loaded.logits(IDS))
    loaded.close()
    ours.close()


def test_replays_change_the_rows_behind_them_alone(shipped: Shipped):
    model = shipped.served(Quantisation.off(), shipped.parameters)
    whole = read_whole(model, IDS)
    cached, prompt, window = 128, 150, CONFIG.sliding_window
    replayed, hit, served = (read(model, IDS) for read in (read_replayed, read_behind_hit, read_as_served))
    assert [each.shape for each in (replayed, hit, served)] == [whole.shape] * 3
    assert not replayed[: prompt - window].any()  # no decoder layer saw them
    assert not hit[: cached - window].any()  # they ran for another request
    for each in (replayed, hit, served):
        rows = slice(prompt, None)
        assert not torch.equal(each[rows], whole[rows])
        assert (each[rows] - whole[rows]).abs().mean() < 0.5 * whole[rows].std()
    short = IDS[:100]  # its first half is no whole block: no hit
    assert torch.equal(read_behind_hit(model, short), read_whole(model, short))
    model.close()
