"""Each mechanism is there: a model without it, or with it changed, gives other logits.

The golden vectors say that the whole is right; these say that every part takes part.
"""

from collections.abc import Callable
from copy import copy
from dataclasses import replace
from functools import lru_cache

import pytest
import torch
from golden_sets import changed, golden_config, golden_ids, golden_model, golden_tensors

from engine import numerics
from engine.model.deepseek import attention, candidates, indexer
from engine.model.deepseek.config import Quantisation
from engine.model.deepseek.hyper_connections import Stream
from engine.model.deepseek.rope import Angles
from engine.model.deepseek.step import KeyRows

LEAST = 1e-3  # a change of the logits that no rounding makes; 2e-5 is what rounding does


@lru_cache
def _logits(name):
    return golden_model(name).logits(golden_ids(name))


def _without(name: str, part: str) -> dict[str, torch.Tensor]:
    """The tensors whose name holds `part`, as zeros."""
    return {key: torch.zeros_like(t) for key, t in golden_tensors(name).items() if part in key}


CONFIGS = {
    "reindex layers reuse the selection of layer 6": {"index_source_layer_ids": (2, 4, 6)},
    "layers 4 and 5 read the entries of layer 2": {
        "kv_source_layer_ids": (2, 6), "index_source_layer_ids": (2, 6, 8, 10)
    },
    "no candidate blocks": {"candidate_source_layer_id": -1},
    "a candidate block fewer": {"candidate_topk_blocks": 4},
    "candidate blocks of another size": {"candidate_block_size": 2},
    "a selected entry more": {"index_topk": 9},
    "a window of one position less": {"sliding_window": 7},
    "no YaRN": {"rope_scaling": None},
    "the rotary base of window layers in all": {"compress_rope_theta": 10000.0},
    "2 Sinkhorn iterations": {"hc_sinkhorn_iters": 2},
    "another epsilon of the hyper-connections": {"hc_eps": 1e-2},
    "one expert a token": {"num_experts_per_tok": 1},
    "another scale of routed experts": {"routed_scaling_factor": 1.0},
    "no Engram": {"engram_layer_ids": (), "engram_num_embeddings": ()},
    "FP8 windows off": {"quantisation": Quantisation(window=False)},
    "FP4 entries off": {"quantisation": Quantisation(main=False)},
    "MXFP4 index off": {"quantisation": Quantisation(index=False)},
}  # fmt: skip


@pytest.mark.parametrize("change", CONFIGS)
def test_a_changed_config_changes_the_logits(change):
    model = golden_model("a", config=changed(golden_config("a"), **CONFIGS[change]))
    assert (model.logits(golden_ids("a")) - _logits("a")).abs().max() > LEAST


@pytest.mark.parametrize(
    "part", ["attn_sink", "gate.bias", "engram.wkv", "hc_ffn_base", "wgate", "weights_proj"]
)
def test_a_tensor_of_zeros_changes_the_logits(part):
    tensors = {k: t for k, t in _without("a", part).items() if part != "gate.bias" or not k.endswith("_vl")}
    assert tensors
    found = golden_model("a", tensors=tensors).logits(golden_ids("a"))
    assert (found - _logits("a")).abs().max() > LEAST


def test_the_clamp_counts_where_activations_are_large():
    """Set b clamps at 1.5, which most of its activations exceed; set a at 10, which none do."""
    found = golden_model("b", config=changed(golden_config("b"), swiglu_limit=1e9)).logits(golden_ids("b"))
    assert (found - _logits("b")).abs().max() > LEAST


def _no_inverse(monkeypatch):
    monkeypatch.setattr(Angles, "inverse", lambda self: Angles(self.cos, torch.zeros_like(self.sin)))


def _same_site_mix(monkeypatch):
    """V4's order: the input mix of the site itself, which its coefficients hold."""
    plain = Stream.collapse

    def collapse(self):
        return plain(Stream(self.x, torch.full_like(self.premix, 0.25)))

    monkeypatch.setattr(Stream, "collapse", collapse)


def _unpinned(monkeypatch):
    real = candidates.candidate_blocks
    monkeypatch.setattr(
        indexer, "candidate_blocks",
        lambda scores, visible, size, k: real(scores, torch.ones_like(visible), size, k),
    )  # fmt: skip


def _no_selected_entries(monkeypatch):
    """Windows alone."""
    real = attention.attend
    monkeypatch.setattr(
        attention, "attend", lambda ops, q, entries, *a, **k: real(ops, q, entries[:1], *a, **k)
    )


def _transposed_mix(monkeypatch):
    real = numerics.batched_product

    def product(a, b):
        return real(a.transpose(1, 2) if a.shape[1:] == (4, 4) else a, b)

    monkeypatch.setattr(numerics, "batched_product", product)


def _signed_products(monkeypatch):
    """Index scores without ReLU."""
    monkeypatch.setattr(torch.Tensor, "relu_", lambda self: self)


def _selection_of_the_source_before(monkeypatch):
    """Reuse layers 9 and 11 read what layers 6 and 8 chose, of the same entries, in place of 8 and 10."""
    chosen, before = {}, {9: 6, 11: 8}
    select, mix = indexer.Indexer.select, attention.Attention.mix

    def note(self, step, rows, queries):
        found = chosen[self._role.layer] = select(self, step, rows, queries)
        return found

    def mixed(self, step, *rest):
        if self._role.layer in before:
            step.shared.selection = chosen[before[self._role.layer]]
        return mix(self, step, *rest)

    monkeypatch.setattr(indexer.Indexer, "select", note)
    monkeypatch.setattr(attention.Attention, "mix", mixed)


def _reindex_by_keys_of_layer_4(monkeypatch):
    """A group of layer 6's gets the score of the group of two in which layer 4 has it."""
    real = indexer.Indexer._keys

    def keys(self, step, rows, sequence):
        if self._role.role != "reindex":
            return real(self, step, rows, sequence)
        earlier, count = copy(self), rows.sequences[sequence].stop
        earlier._role = replace(self._role, kv_source=4, ratio=2)
        step.shared.index_keys = {}  # which has the keys of layer 6
        found = real(earlier, step, rows, sequence)
        step.shared.index_keys = {}
        return KeyRows(found.pool, found.rows[(torch.arange(count) // 2).clamp(max=len(found.rows) - 1)])

    monkeypatch.setattr(indexer.Indexer, "_keys", keys)


def _candidates_limit_their_own_source(monkeypatch):
    """Layer 6 selects inside the blocks that it makes for layers 8 and 10."""
    real = candidates.candidate_blocks

    def blocks(scores, visible, size, k):
        found = real(scores, visible, size, k)
        candidates.restrict_(scores, found, size)
        return found

    monkeypatch.setattr(indexer, "candidate_blocks", blocks)


MUTATIONS: dict[str, Callable[[pytest.MonkeyPatch], None]] = {
    "no inverse rotation": _no_inverse,
    "no delayed input mix": _same_site_mix,
    "newest candidate block not pinned": _unpinned,
    "no selected entries": _no_selected_entries,
    "transposed stream mix": _transposed_mix,
    "no ReLU in index scores": _signed_products,
    "another source's selection in reuse layers": _selection_of_the_source_before,
    "another source's keys in reindex layers": _reindex_by_keys_of_layer_4,
    "the candidate source's own selection inside its candidates": _candidates_limit_their_own_source,
}


@pytest.mark.parametrize("mutation", MUTATIONS)
def test_a_broken_part_changes_the_logits(mutation, monkeypatch):
    model = golden_model("a", kind="torch")  # parts of the reference
    whole = model.logits(golden_ids("a"))
    MUTATIONS[mutation](monkeypatch)
    assert (model.logits(golden_ids("a")) - whole).abs().max() > LEAST


IMAGE = 3


def test_image_rows_take_the_other_bias_and_break_ngrams():
    """A placeholder's router bias, its shut gate, and the n-grams of the three rows behind it."""
    ids = golden_ids("a")[:24]
    ids[10] = IMAGE
    whole = golden_model("a").logits(ids)
    no_bias = golden_model("a", tensors=_without("a", "bias_vl")).logits(ids)
    assert torch.equal(no_bias[:10], whole[:10])
    assert (no_bias[10] - whole[10]).abs().max() > LEAST
    alive = golden_model("a", config=changed(golden_config("a"), image_token_id=None)).logits(ids)
    assert torch.equal(alive[:10], whole[:10])
    assert (alive[11] - whole[11]).abs().max() > LEAST


def test_an_image_row_without_router_bias_differs_by_its_engram_alone():
    """Its gate is shut: with all Engram values zero, being dead or alive makes no difference."""
    ids = [*golden_ids("a")[:10], IMAGE]
    tensors = {**_without("a", "engram.wkv"), **_without("a", "gate.bias")}
    dead = golden_model("a", tensors=tensors).logits(ids)
    config = changed(golden_config("a"), image_token_id=None)
    assert torch.equal(golden_model("a", config=config, tensors=tensors).logits(ids), dead)
