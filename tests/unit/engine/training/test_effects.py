"""The table of effects: nothing for nothing, something for everything that is changed."""

import torch
from tiny_nano import repeating_tokens, stirred_parameters, tiny_config, tiny_task

from engine.training.judging import Window
from engine.training.network import Mode
from engine.training.table import in_all, measure, recall_of, recalls
from engine.training.variants import Variant, variants

CONFIG = tiny_config()
WINDOWS = [
    Window(tuple(repeating_tokens(length, seed).tolist()), (1,) * length)
    for seed, length in enumerate((60, 41, 64))
]


def test_each_change_shows_and_the_unchanged_does_not():
    task, parameters = tiny_task(CONFIG), stirred_parameters(CONFIG)
    kept = {name: tensor.clone() for name, tensor in parameters.items()}
    unchanged = Variant("unchanged", Mode(sparse=True))
    chosen = [unchanged, *variants(task.rounding)]
    effects = {effect.name: effect for effect in in_all([measure(task, parameters, WINDOWS, chosen)])}
    assert effects.keys() == {variant.name for variant in chosen}
    nothing = effects.pop("unchanged")
    assert (nothing.nats.value, nothing.divergence.value, nothing.agreement) == (0.0, 0.0, 1.0)
    assert nothing.tokens == sum(len(window.ids) - 1 for window in WINDOWS)
    for effect in effects.values():
        assert effect.divergence.value > 0.0, effect
        assert 0.0 <= effect.agreement <= 1.0
    assert all(torch.equal(kept[name], tensor) for name, tensor in parameters.items())


def test_windows_of_one_pass_are_what_they_are_alone():
    """Whichever windows share a pass, padded behind: so parts can go to processes."""
    task, parameters = tiny_task(CONFIG), stirred_parameters(CONFIG)
    chosen = variants(task.rounding)
    together = in_all([measure(task, parameters, WINDOWS, chosen)])
    apart = in_all([measure(task, parameters, [window], chosen) for window in WINDOWS])
    for a, b in zip(together, apart, strict=True):
        assert (a.name, a.tokens) == (b.name, b.tokens)
        assert abs(a.divergence.value - b.divergence.value) < 0.02 * a.divergence.value + 1e-4


def test_recall_is_a_share_of_the_best_choice():
    task, parameters = tiny_task(CONFIG), stirred_parameters(CONFIG)
    found = recalls(task, parameters, WINDOWS[2])
    assert [each.layer for each in found] == list(CONFIG.index_source_layer_ids)
    assert all(0.0 < each.got < each.best for each in found)
    assert 0.0 < recall_of(found).value < 1.0
