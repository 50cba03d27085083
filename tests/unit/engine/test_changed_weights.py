"""Weights that change under an engine: nothing that was cached of the old ones is used again."""

from pathlib import Path

import pytest
import torch
from engine_runs import GOLDEN, drain, finish, finish_disaggregated, prompt, small_engine
from tiny_gguf import write_tiny_gguf

from engine import Request, SamplingParams
from engine.errors import BrokenHandoff, InvalidRequest
from engine.model.content_digest import ContentDigest
from protocol.kv_events import AllBlocksCleared

NEW = SamplingParams(max_tokens=6, ignore_eos=True)
HOST = {"host_bytes": 8 << 20}


def test_new_weights_make_all_kv_old(tiny_model: Path, cpu_library: Path, tmp_path: Path) -> None:
    other = write_tiny_gguf(tmp_path / "other.gguf", seed=1)
    engine = small_engine(tiny_model, tiers=HOST, preemption="swap", kv_events=True)
    request = Request("r", prompt(50), NEW)
    finish(engine, [request])
    engine.add(Request("running", prompt(50), NEW))
    begun = tuple(token for output in engine.step().tokens for token in output.token_ids)
    engine.update_weights("2", str(other))
    engine.check_integrity()
    _, batch = engine.events_since(0)[-1]
    assert batch.events[0] == AllBlocksCleared()
    rest, _ = drain(engine)
    fresh = small_engine(other)
    moved = Request("running", prompt(50), NEW, generated_ids=begun)
    assert rest == finish(fresh, [moved])
    before = engine.statistics().rows
    assert finish(engine, [request]) == finish(small_engine(other), [request])
    assert engine.statistics().rows - before < 50  # cached under the new version by then
    engine.update_weights("3")
    rows = engine.statistics().rows
    finish(engine, [request])
    assert engine.statistics().rows - rows == 50 + 5
    with pytest.raises(InvalidRequest, match="another shape"):
        engine.update_weights("4", str(GOLDEN))
    assert finish(engine, [request]) == finish(small_engine(other), [request])


def test_a_label_that_another_run_gave_its_weights_finds_none_of_their_kv(
    tiny_model: Path, cpu_library: Path, tmp_path: Path
) -> None:
    """Nothing tells weights that were changed in place from others of the same label."""
    marks: set[str] = set()
    for _ in range(2):
        engine = small_engine(tiny_model, tiers={**HOST, "disk_path": str(tmp_path)}, block_tokens=16)
        engine.update_weights("1")
        finish(engine, [Request("r", prompt(100), NEW)])
        marks.add(engine.fingerprint)
        engine.close()
        counts = engine.statistics()
        assert (counts.scheduler.loaded_blocks, counts.tiers.prefetched) == (0, 0)
    assert len(marks) == 2


def test_weights_changed_in_place_need_a_label_of_their_own(tiny_model: Path, cpu_library: Path) -> None:
    engine = small_engine(tiny_model)
    first = engine.fingerprint
    engine.update_weights("1", str(tiny_model))
    engine.update_weights("2")
    for label in ("", "1", "2"):
        with pytest.raises(InvalidRequest, match="need one that this engine has not had") as refused:
            engine.update_weights(label)
        assert refused.value.parameter == "version"
    engine.update_weights("2", str(tiny_model))
    assert engine.fingerprint == f"{first}@2"
    engine.update_weights("", str(tiny_model))
    assert engine.fingerprint == first


def test_weights_changed_alike_on_both_sides_take_each_others_hand_offs(
    tiny_model: Path, cpu_library: Path
) -> None:
    """By the digest of what they hold now; without one, or with another, they refuse each other."""
    digest = ContentDigest()
    digest.add("w", torch.arange(10))
    request = Request("r", prompt(50), NEW)
    expected = finish(small_engine(tiny_model), [request])["r"]
    for labels, digests, fits in (
        (("1", "1"), (digest.hex(), digest.hex()), True),
        (("1", "1"), ("", ""), False),
        (("1", "2"), (digest.hex(), digest.hex()), False),
        (("1", "1"), (digest.hex(), "0" * 32), False),
    ):
        prefill, decode = (small_engine(tiny_model, role=role) for role in ("prefill", "decode"))
        for engine, label, told in zip((prefill, decode), labels, digests, strict=True):
            engine.update_weights(label, digest=told)
        if fits:
            assert finish_disaggregated(prefill, decode, [request])["r"] == expected
            continue
        prefill.add(request)
        (handoff,) = prefill.step().handoffs
        with pytest.raises(BrokenHandoff, match="'model'"):
            decode.adopt(handoff)
