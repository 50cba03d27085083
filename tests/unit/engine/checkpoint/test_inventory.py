"""Inventories: the release's published numbers, and the names of models that others have written."""

import json
from collections import Counter
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.checkpoint.entries import Entry, Formats
from engine.checkpoint.family import Family, read_family, with_formats
from engine.checkpoint.parts import WHOLE, Part, rank_part
from engine.errors import BrokenModelFile
from engine.model import configs
from protocol.errors import InvalidInput

GOLDEN = Path(__file__).parents[3] / "data" / "v41_golden"
CONFIGS = Path(configs.__file__).parent


def released(name: str) -> Family:
    return read_family(json.loads((CONFIGS / f"{name}.json").read_text()))


@pytest.fixture(scope="module")
def flash() -> Family:
    return released("deepseek-v4.1-flash")


def test_the_release_has_96085_tensors(flash: Family) -> None:
    names = [stored.name for entry in flash.entries for stored in entry.stored(flash.formats)]
    assert len(names) == len(set(names)) == 96_085


def test_the_release_takes_the_space_that_it_takes(flash: Family) -> None:
    """About 475 GiB in its files, of which 203 GB are the Engram tables with their scales."""
    bytes_of = {"F8_E4M3": 1, "F8_E8M0": 1, "I8": 1, "BF16": 2, "F32": 4}
    sizes: Counter[str] = Counter()
    for entry in flash.entries:
        for stored in entry.stored(flash.formats):
            values = 1
            for size in stored.shape:
                values *= size
            sizes[entry.section] += values * bytes_of[stored.dtype]
    assert sum(sizes.values()) / 2**30 == pytest.approx(475, abs=1)
    assert sizes["engram"] / 1e9 == pytest.approx(203, abs=0.5)


@pytest.mark.parametrize(
    ("name", "shape", "dtype"),
    [
        ("layers.0.attn.wq_b.weight", (32768, 1280), "F8_E4M3"),
        ("layers.0.attn.wq_b.scale", (1024, 40), "F8_E8M0"),
        ("layers.39.ffn.experts.383.w2.weight", (5120, 1152), "I8"),
        ("layers.39.ffn.experts.383.w2.scale", (5120, 72), "F8_E8M0"),
        ("layers.1.engram.embed.weight", (384006168, 256), "F8_E4M3"),
        ("layers.14.engram.embed.scale", (384016682, 8), "F8_E8M0"),
        ("layers.14.engram.wkv.weight", (25600, 6144), "F8_E4M3"),
        ("layers.20.attn.compressor.wkv.weight", (512, 5120), "BF16"),
        ("layers.36.attn.indexer.wq_b.weight", (4096, 1280), "F8_E4M3"),
        ("layers.7.hc_ffn_fn", (24, 20480), "F32"),
        ("mtp.0.main_proj.weight", (5120, 15360), "F8_E4M3"),
        ("mtp.2.confidence_head.proj.weight", (1, 5376), "BF16"),
        ("mtp.1.ffn.gate.bias_vl", (128,), "F32"),
        ("vision.patch_embed.proj.weight", (1024, 588), "BF16"),
        ("vision.blocks.31.mlp.w1.weight", (5632, 1024), "BF16"),
        ("aligner.w1.weight", (5120, 9216), "BF16"),
    ],
)
def test_tensors_of_the_release(flash: Family, name: str, shape: tuple[int, ...], dtype: str) -> None:
    (found,) = [s for e in flash.entries for s in e.stored(flash.formats) if s.name == name]
    assert (found.shape, found.dtype) == (shape, dtype)


def test_what_the_release_lacks(flash: Family) -> None:
    names = {entry.name for entry in flash.entries}
    assert "layers.20.attn.compressor.wgate.weight" not in names  # a ratio of 1 pools nothing
    assert not any(name.startswith("layers.21.attn.compressor") for name in names)
    assert not any("hc_head" in name or "ape" in name or "tid2eid" in name for name in names)


@pytest.mark.parametrize("golden", ["a", "b"])
def test_the_golden_models_have_the_names_of_their_lists(golden: str) -> None:
    folder = GOLDEN / golden
    family = read_family(json.loads((folder / "config.json").read_text()))
    ours = {entry.name for entry in family.entries}
    listed = set(json.loads((folder / "names.json").read_text()).values())
    assert listed - ours == {name for name in listed if name.endswith("engram.embed.scale")}
    assert ours <= listed


def test_v4_flash_has_its_published_size() -> None:
    v4 = released("deepseek-v4-flash")
    values = Counter[str]()
    for entry in v4.entries:
        values[entry.section] += entry.num_values
    assert values["backbone"] / 1e9 == pytest.approx(284.3, abs=0.1)
    names = {entry.name for entry in v4.entries}
    assert "layers.42.attn.indexer.compressor.ape" in names
    assert "layers.41.attn.indexer.wq_b.weight" not in names  # the heavily compressed ones select nothing
    assert "layers.2.ffn.gate.tid2eid" in names
    assert "layers.3.ffn.gate.bias" in names


@settings(deadline=None)
@given(
    rows=st.integers(1, 300),
    columns=st.integers(1, 300),
    block=st.tuples(st.integers(1, 64), st.integers(1, 64)),
)
def test_every_value_has_one_scale(rows: int, columns: int, block: tuple[int, int]) -> None:
    values, scales = Entry("a.weight", (rows, columns), "dense", "backbone").stored_as("F8_E4M3", block)
    assert values.shape == (rows, columns)
    assert (scales.shape[0] - 1) * block[0] < rows <= scales.shape[0] * block[0]
    assert (scales.shape[1] - 1) * block[1] < columns <= scales.shape[1] * block[1]


def test_formats_come_back_from_the_config_that_they_wrote(flash: Family) -> None:
    raw = json.loads((CONFIGS / "deepseek-v4.1-flash.json").read_text())
    for formats in (
        flash.formats,
        Formats("f32", "f32", "f32", (32, 32)),
        Formats("bf16", "bf16", "bf16", (32, 32)),
        Formats("fp8", "fp8", "bf16", (128, 128)),
        Formats("bf16", "fp4", "bf16", (32, 32)),
    ):
        assert read_family(with_formats(raw, formats)).formats == formats


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"model_type": "llama"}, "'model_type' is 'llama', expected deepseek_v41 or deepseek_v4"),
        ({"dtype": "int8"}, "'dtype' is 'int8'"),
        ({"quantization_config": {"quant_method": "awq"}}, "quant_method"),
        ({"quantization_config": {"quant_method": "fp8", "weight_block_size": [0]}}, "weight_block_size"),
        ({"quantization_config": {"quant_method": "fp8", "expert_dtype": "int4"}}, "expert_dtype"),
    ],
)
def test_a_field_that_does_not_fit_is_named(change: dict[str, object], message: str) -> None:
    raw = json.loads((CONFIGS / "deepseek-v4.1-flash.json").read_text())
    with pytest.raises(BrokenModelFile, match=message):
        read_family(raw | change)


def test_a_number_of_experts_that_no_model_has_is_refused() -> None:
    raw = json.loads((CONFIGS / "deepseek-v4-flash.json").read_text())
    with pytest.raises(BrokenModelFile, match="more than 200,000 weights"):
        read_family(raw | {"n_routed_experts": 10**12})


def test_experts_of_other_ranks_are_left_out_and_shared_ones_stay(flash: Family) -> None:
    part = rank_part(flash, 7, 8)
    names = [entry.name for entry in flash.entries if part.holds(entry.name, flash.cut)]
    routed = [name for name in names if ".experts." in name]
    assert len(routed) == (40 * 384 + 3 * 128) * 3 // 8
    assert "layers.0.ffn.experts.336.w1.weight" in names
    assert "layers.0.ffn.experts.335.w1.weight" not in names
    assert "mtp.0.ffn.experts.112.w1.weight" in names
    assert sum("shared_experts" in name for name in names) == 43 * 3


def test_each_layer_may_have_experts_of_its_own(flash: Family) -> None:
    part = Part({0: frozenset({3}), 1: frozenset({4, 5})}, draft_experts=frozenset())
    held = {e.name for e in flash.entries if ".experts." in e.name and part.holds(e.name, flash.cut)}
    assert held == {
        f"layers.{layer}.ffn.experts.{expert}.w{n}.weight"
        for layer, expert in ((0, 3), (1, 4), (1, 5))
        for n in (1, 2, 3)
    }


def test_the_ranks_together_hold_everything_once(flash: Family) -> None:
    parts = [rank_part(flash, rank, 8) for rank in range(8)]
    for entry in flash.entries:
        holders = sum(part.holds(entry.name, flash.cut) for part in parts)
        assert holders == (1 if ".experts." in entry.name else 8)


def test_a_prefill_worker_holds_the_encoder_and_what_makes_the_decoders_entries(flash: Family) -> None:
    part = Part(encoder_only=True)
    names = {entry.name for entry in flash.entries if part.holds(entry.name, flash.cut)}
    assert {name for name in names if name.startswith("layers.20.")} == {
        f"layers.20.{name}"
        for name in (
            "attn_norm.weight", "attn.wkv.weight", "attn.kv_norm.weight", "attn.compressor.wkv.weight",
            "attn.compressor.norm.weight", "attn.indexer.wk.weight", "attn.indexer.k_norm.weight",
        )
    }  # fmt: skip
    assert "layers.19.ffn.experts.0.w1.weight" in names
    assert "vision.norm.weight" in names
    assert not any(name.startswith(("layers.21.", "mtp.", "head.", "norm.")) for name in names)
    held = sum(entry.num_values for entry in flash.entries if entry.name in names and entry.kind != "table")
    whole = sum(entry.num_values for entry in flash.entries if entry.kind != "table")
    assert held / whole == pytest.approx(0.49, abs=0.01)


@pytest.mark.parametrize(("rank", "ranks", "message"), [(8, 8, "rank is 8"), (0, 7, "do not divide")])
def test_ranks_that_do_not_fit_are_refused(flash: Family, rank: int, ranks: int, message: str) -> None:
    with pytest.raises(InvalidInput, match=message):
        rank_part(flash, rank, ranks)
    assert WHOLE.holds("layers.0.ffn.experts.0.w1.weight", 20)
