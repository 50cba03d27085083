"""The table of effects: nothing for nothing, something for everything that is changed."""

import torch
from tiny_nano import repeating_tokens, stirred_parameters, tiny_config, tiny_task

from engine.training.effects import measure, recall, variants
from engine.training.judging import Window

CONFIG = tiny_config()
WINDOWS = [Window(tuple(repeating_tokens(60, seed).tolist()), 60) for seed in range(3)]


def test_each_change_shows_and_the_unchanged_does_not():
    task, parameters = tiny_task(CONFIG), stirred_parameters(CONFIG)
    effects = {effect.name: effect for effect in measure(task, parameters, WINDOWS)}
    assert effects.keys() == {variant.name for variant in variants(task.rounding)}
    for effect in effects.values():
        assert effect.divergence > 0.0, effect
        assert 0.0 <= effect.agreement <= 1.0
    kept = {name: tensor.clone() for name, tensor in parameters.items()}
    assert all(torch.equal(kept[name], tensor) for name, tensor in parameters.items())


def test_recall_is_a_share():
    assert 0.0 < recall(tiny_task(CONFIG), stirred_parameters(CONFIG), WINDOWS[:1]) < 1.0
