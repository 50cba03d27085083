"""The full pass against golden vectors of an independent implementation (tests/data/v41_golden/README.md)."""

import pytest
import torch
from golden_sets import (
    FOLDER,
    LOGITS_TOLERANCE,
    SETS,
    STREAM_TOLERANCE,
    Recorder,
    array,
    golden_config,
    golden_ids,
    golden_model,
    read,
)  # fmt: skip
from tokenizers import Tokenizer

from engine.model.deepseek.engram_hash import EngramHash, compress_ids

KINDS = ("c", "torch")


@pytest.fixture(scope="module", params=[(name, kind) for name in SETS for kind in KINDS], ids="-".join)
def run(request, cpu_library):
    """A set's name, its full logits, and what an observer saw."""
    name, kind = request.param
    recorder = Recorder()
    logits = golden_model(name, kind=kind).logits(golden_ids(name), observer=recorder)
    return name, logits, recorder


def test_logits_match(run):
    name, logits, _ = run
    assert (logits - array(name, "logits.npy")).abs().max() < LOGITS_TOLERANCE[name]


def test_streams_and_premixes_match_after_every_layer(run):
    name, _, recorder = run
    positions = read(name, "topk.json")["positions"]
    streams, premixes = array(name, "stream.npy"), array(name, "premix.npy")
    for layer in range(len(streams)):
        (found,) = recorder.streams[layer]
        assert (found.x[positions] - streams[layer]).abs().max() < STREAM_TOLERANCE[name], layer
        assert (found.premix[positions] - premixes[layer]).abs().max() < 1e-5, layer


def test_selected_groups_and_candidate_blocks_match(run):
    name, _, recorder = run
    expected = read(name, "topk.json")
    for layer, sets in expected["layers"].items():
        (groups,) = recorder.groups[int(layer)]
        assert [_taken(groups[p]) for p in expected["positions"]] == sets, layer
    (blocks,) = recorder.blocks[6]
    assert [_taken(blocks[p]) for p in expected["positions"]] == expected["candidate_blocks"]["6"]


def test_engram_ids_multipliers_primes_and_rows_match():
    expected, ids = read("a", "engram.json"), torch.tensor(golden_ids("a"))
    compressed = compress_ids(Tokenizer.from_file(str(FOLDER / "a" / "tokenizer.json")))
    assert compressed.tolist() == expected["compressed_ids"]
    padded = torch.cat((torch.full((3,), expected["pad_compressed_id"]), compressed[ids]))
    looked_back = torch.stack([padded[3 - i : len(padded) - i] for i in range(4)], 1)
    for layer, hashed in zip(("1", "3"), EngramHash.of(golden_config("a")), strict=True):
        assert list(hashed.multipliers) == expected["multipliers"][layer]
        assert hashed.primes.tolist() == expected["primes"][layer]
        assert hashed.rows(looked_back)[expected["positions"]].tolist() == expected["rows"][layer]


def _taken(row):
    return [index for index in row.tolist() if index >= 0]
