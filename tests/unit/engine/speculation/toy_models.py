"""A target and a draft model of four tokens: any functions of the tokens so far, alike but not equal."""

from itertools import product

import numpy as np

from engine.speculation.distribution import probabilities

VOCABULARY = 4


def logits_after(prefix, salt, scale=1.2):
    """A toy model's: any function of the tokens so far."""
    key = [salt, len(prefix), *prefix]
    return (np.random.default_rng(key).standard_normal(VOCABULARY) * scale).astype(np.float32)


def target_logits(prefix):
    return logits_after(prefix, 1)


def draft_logits(prefix):
    return logits_after(prefix, 1) + logits_after(prefix, 2, 0.7)


def runs(length, sampling):
    """The exact distribution of the first tokens of decoding without drafts."""
    found = {}
    for tokens in product(range(VOCABULARY), repeat=length):
        chance = 1.0
        for i, token in enumerate(tokens):
            chance *= probabilities(target_logits(tokens[:i]), sampling)[token]
        found[tokens] = chance
    return found
