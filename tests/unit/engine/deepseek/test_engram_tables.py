"""Engram tables on disk are read by a thread of their own, to the bits of tables in memory."""

import threading
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
import torch
from golden_sets import FOLDER, golden_config, golden_ids, golden_model, golden_tensors, run_chunks
from thread_shortage import run_short
from tokenizers import Tokenizer

from engine.errors import BrokenModelFile
from engine.model.deepseek.engram_hash import compress_ids
from engine.model.deepseek.hyper_connections import Stream
from engine.model.deepseek.model import DeepseekModel
from engine.model.deepseek.quantisation import e4m3_bytes, e4m3_values
from engine.model.deepseek.rows import Rows
from engine.model.tensor_source import RowSource, TensorsInMemory
from kernels.operations import select_operations
from protocol.errors import ResourceShortage

PATIENCE_S = 20.0  # for what comes at once, or never


class E4m3Rows:
    """A memory-mapped table, and which threads have read it."""

    def __init__(self, path: Path, table: torch.Tensor) -> None:
        path.write_bytes(e4m3_bytes(table).numpy().tobytes())
        self.bytes = np.memmap(path, np.uint8, "r", shape=tuple(table.shape))
        self.readers: set[str] = set()

    def rows(self, ids):
        self.readers.add(threading.current_thread().name)
        return e4m3_values(torch.from_numpy(self.bytes[ids.numpy()]))


class HeldRows(E4m3Rows):
    """A table that says when reading it begins, and may be made to wait until it is let go on."""

    def __init__(self, path: Path, table: torch.Tensor) -> None:
        super().__init__(path, table)
        self.begun, self.may_go_on = threading.Event(), threading.Event()
        self.may_go_on.set()

    def rows(self, ids):
        self.begun.set()
        assert self.may_go_on.wait(PATIENCE_S), "nobody let the look-up go on"
        return super().rows(ids)


class OnDisk(TensorsInMemory):
    """A source that leaves tables where they are."""

    def __init__(self, folder: Path) -> None:
        super().__init__(golden_tensors("a"), "a")
        self.folder, self.tables = folder, {}

    def take_rows(self, name, shape):
        table = self.tables[name] = HeldRows(self.folder / name, self.take(name, shape))
        return table


@dataclass(slots=True)
class Layers:
    """An observer that acts when a layer has run."""

    act: Callable[[int], None]

    def left(self, layer: int, stream: Stream, rows: Rows) -> None:
        self.act(layer)

    def selected(self, layer: int, groups_TK: torch.Tensor, blocks: object, rows: Rows) -> None:
        """Of no interest here."""


@pytest.fixture
def source(tmp_path):
    return OnDisk(tmp_path)


@pytest.fixture
def model(source, cpu_library):
    tokenizer = Tokenizer.from_file(str(FOLDER / "a" / "tokenizer.json"))
    found = DeepseekModel(golden_config("a"), source, select_operations(1), compress_ids(tokenizer))
    source.check_all_taken()
    yield found
    found.close()


def test_a_mapped_table_gives_the_bits_of_one_in_memory(source, model):
    assert isinstance(source, RowSource)
    ids = golden_ids("a")[:40]
    expected = golden_model("a").logits(ids)
    assert torch.equal(model.logits(ids), expected)
    assert torch.equal(model.head(run_chunks(model, ids, 3)), expected)
    assert len(source.tables) == 2
    for table in source.tables.values():
        assert all(name.startswith("engram") for name in table.readers)


@pytest.mark.parametrize("layer", [1, 3])
def test_look_ups_begin_before_layer_0(source, model, layer):
    """Of each layer's table: it is being read, or has been, when layer 0 has run."""
    table, begun = source.tables[f"layers.{layer}.engram.embed.weight"], []

    def act(left: int) -> None:
        if left == 0:
            begun.append(table.begun.wait(PATIENCE_S))

    model.logits(golden_ids("a")[:5], observer=Layers(act))
    assert begun == [True]


def test_look_ups_are_waited_for_at_their_layer(source, model):
    """The table of layer 3 gives nothing before layer 2 has run: the layers before run without it."""
    table, ids = source.tables["layers.3.engram.embed.weight"], golden_ids("a")[:20]
    expected = golden_model("a").logits(ids)

    def act(left: int) -> None:
        if left == 2:
            assert table.begun.wait(PATIENCE_S)
            table.may_go_on.set()

    table.may_go_on.clear()
    assert torch.equal(model.logits(ids, observer=Layers(act)), expected)


def test_closing_a_model_ends_its_thread(model):
    model.logits(golden_ids("a")[:5])
    assert any(t.name.startswith("engram") for t in threading.enumerate())
    model.close()
    assert not any(t.name.startswith("engram") for t in threading.enumerate())


def test_no_step_starts_its_thread(model, monkeypatch):
    """It is there when the tables are: within a step nobody could say that there is none."""
    assert "engram_0" in [t.name for t in threading.enumerate()]
    run_short(monkeypatch, "none")
    ids = golden_ids("a")[:5]
    assert torch.equal(model.logits(ids), golden_model("a").logits(ids))


def test_a_model_whose_tables_nobody_could_read_is_not_loaded(source, cpu_library, shortage):
    tokenizer = Tokenizer.from_file(str(FOLDER / "a" / "tokenizer.json"))
    with pytest.raises(ResourceShortage, match="no thread that reads the Engram tables"):
        DeepseekModel(golden_config("a"), source, select_operations(1), compress_ids(tokenizer))


@pytest.mark.parametrize("compressed", [None, torch.arange(298)])
def test_ids_of_another_tokenizer_are_refused(compressed):
    tensors = TensorsInMemory(golden_tensors("a"), "a")
    with pytest.raises(BrokenModelFile, match=r"vocab_size. is 241, expected (0|298), what the"):
        DeepseekModel(golden_config("a"), tensors, select_operations(1, "torch"), compressed)


def test_a_missing_tensor_is_named_with_its_shape():
    tensors = {k: t for k, t in golden_tensors("b").items() if k != "layers.8.attn.indexer.wq_b.weight"}
    with pytest.raises(BrokenModelFile, match=r"no tensor 'layers.8.attn.indexer.wq_b.weight'.*\[512, 24\]"):
        DeepseekModel(golden_config("b"), TensorsInMemory(tensors, "b"), select_operations(1, "torch"))


def test_a_misshapen_tensor_is_named_with_both_shapes():
    tensors = {**golden_tensors("b"), "norm.weight": torch.ones(31)}
    with pytest.raises(BrokenModelFile, match=r"'norm.weight' has shape \[31\], expected \[32\]"):
        DeepseekModel(golden_config("b"), TensorsInMemory(tensors, "b"), select_operations(1, "torch"))
