"""Rounded caches of SmolLM2 against a cache rounded by hand, and the object that the bench prints."""

import json
import math
from pathlib import Path
from typing import cast

import pytest
import torch

from bench import nano_quality
from bench.nano_quality_smollm2 import (
    CHANNELS,
    FORMATS,
    LENGTH,
    RoundingOperations,
    SmolLM2Quality,
    in_all_parts,
    measure,
    windows_of_files,
)
from engine.gguf_file import open_gguf
from engine.model.deepseek.records import MainRecord
from engine.model.llama import LlamaModel
from engine.training.corpus import SourceFile
from engine.training.gate import gate
from engine.training.judging import Measured, Window
from engine.training.paired import Effect
from engine.training.quality import QUICK, Acceptance, Quality
from engine.training.variants import RANDOM_CHOICE, ZEROED
from kernels.operations import Operations, Rows, select_operations

IDS = list(range(300, 324))


def test_entries_are_rounded_as_they_enter_the_cache(smollm2_file: Path):
    rounded = FORMATS["KV in NVFP4 (E2M1, E4M3 by 16)"]
    operations = select_operations(1)
    rounding = cast(Operations, RoundingOperations(operations, rounded))
    plain, model = (LlamaModel(open_gguf(smollm2_file), ops) for ops in (operations, rounding))
    count = len(IDS)
    rows = Rows(
        torch.arange(count), torch.zeros(count, dtype=torch.int64), torch.zeros(1, 1, dtype=torch.int32)
    )
    caches = [torch.zeros(each.cache_shape(1, count)) for each in (plain, model)]
    for each, cache in zip((plain, model), caches, strict=True):
        each.forward(torch.tensor(IDS), rows, cache)
    record = MainRecord(CHANNELS)
    assert torch.equal(caches[1][0], record.decode(record.encode(caches[0][0])))  # of the first layer
    assert torch.equal(caches[1], record.decode(record.encode(caches[1])))
    assert not torch.equal(caches[1][1], record.decode(record.encode(caches[0][1])))


def test_nothing_rounded_changes_nothing(smollm2_file: Path):
    operations = select_operations(1)
    unchanged = cast(Operations, RoundingOperations(operations, lambda x: x))
    plain, same = (LlamaModel(open_gguf(smollm2_file), ops) for ops in (operations, unchanged))
    assert torch.equal(plain.logits(IDS), same.logits(IDS))


@pytest.mark.parametrize("rounded", FORMATS.values(), ids=FORMATS.keys())
def test_a_format_keeps_values_about_what_they_are(rounded):
    x = torch.randn(5, 3, CHANNELS, generator=torch.Generator().manual_seed(0))
    error = (rounded(x) - x).norm() / x.norm()
    assert 0.0 < error < 0.2


def test_coarser_formats_cost_more(smollm2_file: Path):
    text = Path(nano_quality.__file__).read_text()
    window = windows_of_files([SourceFile("a.py", text)])[0]
    assert len(window.ids) == len(window.sizes) == LENGTH
    short = Window(window.ids[:96], window.sizes[:96])
    found = in_all_parts([measure(short), measure(short)])
    assert found.tokens == 2 * 95
    divergence = [effect.divergence.value for effect in found.effects]
    assert [effect.name for effect in found.effects] == list(FORMATS)
    fp8, nvfp4, scaled, mxfp4 = divergence
    assert 0.0 < fp8 < min(nvfp4, scaled) < mxfp4


def test_the_object_has_the_names_that_others_look_up():
    one = Measured(1.25, 0.01)
    effects = tuple(Effect(name, one, one, one, one, 9) for name in (ZEROED, RANDOM_CHOICE, *FORMATS))
    drafts = Acceptance(10, Measured(1.5, 0.1), (Measured(0.6, 0.01),))
    quality = Quality("digest", 100, one, one, 1.3, 1.4, effects, Measured(0.9, 0.01), {2: 0.9}, drafts)
    lines = gate(quality, None)
    found = nano_quality.describe(quality, SmolLM2Quality(5, one, effects), None, lines)
    again = json.loads(json.dumps(found))
    assert again["nano.bits_per_byte"] == 1.25
    assert again["nano.bits_per_byte_error"] == 0.01
    assert again["nano.judged_tokens"] == 100
    assert again["nano.mean_accepted_length"] == 1.5
    assert again["same_text"] is None
    known = again["smollm2"]["known"]
    assert [each["known"] for each in known.values()] == [0.0011, 0.087, 0.261]
    apart = [each["errors_apart"] for each in known.values()]
    assert apart == pytest.approx([115.55, 67.60, 24.56], rel=1e-3)
    assert again["effects"][ZEROED]["agreement"] == pytest.approx(1 - 1.25)
    missed = [line["name"] for line in again["gate"] if not line["met"]]
    assert all(name.startswith("FP4 main KV") for name in missed)
    assert len(missed) == 2
    assert math.isfinite(again["recall"]["by_layer"]["2"])


@pytest.mark.parametrize(
    ("first", "exact", "quick"), [(0.5, True, True), (0.41, False, True), (0.3, False, False)]
)
def test_a_small_sample_misses_a_line_beyond_two_standard_errors(first: float, exact: bool, quick: bool):
    one = Measured(1.25, 0.01)
    effects = tuple(Effect(name, one, one, one, one, 9) for name in (ZEROED, RANDOM_CHOICE))
    drafts = Acceptance(88, Measured(0.9, 0.1), (Measured(first, 0.04),))
    quality = Quality(
        "digest", 100, one, one, 1.3, 1.4, effects, Measured(0.9, 0.01), {2: 0.93, 4: 0.9}, drafts
    )

    def met(is_quick: bool) -> bool:
        lines = gate(quality, None, nano_quality.SLACK[is_quick])
        return next(line.met for line in lines if line.name == "first drafts accepted")

    assert (met(False), met(True)) == (exact, quick)
    said = "\n".join(nano_quality.said(quality, QUICK, nano_quality.SLACK[True]))
    assert "88 drafts; a line is missed 2 standard errors beyond it" in said
    assert "indexer's recall by layer: 2: 0.930, 4: 0.900" in said
