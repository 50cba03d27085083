"""Drafts against a float64 loop that is written from section 8 of the fact sheet alone."""

import numpy as np
import pytest
import torch
from dspark_models import COMPRESSED_IDS, config_of, raw_config, read_context, text, whole_tensors
from golden_sets import Recorder
from section_8 import Section8, in_fp8

from engine.model.deepseek.config import Quantisation
from engine.model.deepseek.dspark import DraftModel
from engine.model.deepseek.dspark_context import Anchor
from engine.model.deepseek.model import DeepseekModel
from engine.model.tensor_source import TensorsInMemory
from kernels.operations import select_operations

TEXT = text(48, seed=4)
PLACES = [0, 1, 5, 8, 9, 31, 47]  # of anchors: without context, with less than a window, with more
SAID = [17, 200, 6, 93, 41]


@pytest.mark.parametrize("kind", ["auto", "torch"])
@pytest.mark.parametrize("quantised", [False, True], ids=["float32", "released"])
def test_drafts_are_what_section_8_says(cpu_library, kind, quantised):
    """Streams that enter the target layers, a block that sees itself both ways, noise, Markov, confidence."""
    config = config_of(Quantisation(window=quantised, main=False, index=False))
    tensors = whole_tensors(raw_config())
    source = TensorsInMemory(tensors, "random")
    model = DeepseekModel(config, source, select_operations(1, kind), COMPRESSED_IDS)
    drafts = DraftModel(model, source)
    recorder = Recorder()
    model.logits(TEXT, observer=recorder)
    weights = {name: tensor.double().numpy() for name, tensor in tensors.items()}
    reference = Section8(raw_config()["text_config"], weights, in_fp8 if quantised else lambda x: x)
    entering = [  # layer L is entered by what layer L - 1 has left
        [row.double().numpy() for stream in recorder.streams[layer - 1] for row in stream.x]
        for layer in config.dspark_target_layer_ids
    ]
    context = reference.context(entering)
    assert len(context) == len(TEXT)
    logit_errors, sure_errors = [], []
    for place in PLACES:
        cache = read_context(model, drafts, TEXT[:place], 13) if place else drafts.new_cache(3)
        expected = reference.draft(context[:place], TEXT[place])
        found = drafts.propose(cache, [Anchor(0, TEXT[place], place)])
        spoken = drafts.propose(cache, [Anchor(0, TEXT[place], place)], lambda k, _: torch.tensor([SAID[k]]))
        as_said = reference.draft(context[:place], TEXT[place], SAID)
        if not quantised:
            assert found.token_ids[0].tolist() == expected.tokens
        for ours, theirs in ((found, expected), (spoken, as_said)):
            logit_errors.append(np.abs(ours.logits[0].double().numpy() - theirs.logits).max())
            sure_errors.append(np.abs(ours.confidence[0].double().numpy() - theirs.confidence).max())
    spread = float(np.std(expected.logits))
    assert spread > 0.3, "logits that tell nothing apart"
    # A value on a rounding's threshold may fall on either side; without rounding nothing may differ.
    within = np.quantile if quantised else (lambda errors, _: np.max(errors))
    assert within(logit_errors, 0.5) < 2e-4 * spread, logit_errors
    assert within(sure_errors, 0.5) < 2e-5, sure_errors
    assert np.max(logit_errors) < 0.5 * spread
