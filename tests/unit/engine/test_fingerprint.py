"""A fingerprint of every byte: weights that differ anywhere share no KV."""

from pathlib import Path

import pytest
from engine_runs import small_engine

from bench.equivalence_cells.subject import change_weights
from engine import Engine, EngineConfig, Request, SamplingParams, load_model
from engine.gguf_file import open_gguf
from engine.model_path import NANO


@pytest.fixture
def copy(tmp_path: Path) -> Path:
    """nano, but for the middle of one tensor."""
    return change_weights(NANO, tmp_path / "copy")


def mark_of(path: Path) -> str:
    model = load_model(str(path), threads=1)
    try:
        return model.fingerprint
    finally:
        model.close()


def test_a_folder_that_differs_in_the_middle_of_a_tensor_is_another(copy: Path, cpu_library: Path) -> None:
    assert mark_of(copy) != mark_of(NANO) == mark_of(NANO)


def test_a_gguf_that_differs_in_the_middle_of_a_tensor_is_another(
    tiny_model: Path, tmp_path: Path, cpu_library: Path
) -> None:
    data, marks = tiny_model.read_bytes(), {small_engine(tiny_model).fingerprint}
    tensors = open_gguf(tiny_model).tensors.values()
    widest = max(tensors, key=lambda tensor: tensor.data.nbytes)
    for number, place in enumerate((0, widest.data.nbytes // 2, widest.data.nbytes - 1)):
        changed = bytearray(data)
        changed[widest.first + place] ^= 1
        path = tmp_path / f"{number}.gguf"
        path.write_bytes(changed)
        marks.add(small_engine(path).fingerprint)
    assert len(marks) == 4


def test_a_copy_with_another_middle_finds_no_kv_in_the_folder_of_the_original(
    copy: Path, tmp_path: Path, cpu_library: Path
) -> None:
    request = Request("r", tuple(range(40, 240)), SamplingParams(max_tokens=2, ignore_eos=True))
    found: list[bool] = []
    for path in (NANO, copy, NANO):
        settings = {"host_bytes": 1 << 26, "disk_path": str(tmp_path / "kv")}
        engine = Engine(EngineConfig.model_validate({"model": str(path), "threads": 1, "tiers": settings}))
        engine.add(request)
        while engine.has_work:
            engine.step()
        found.append(engine.statistics().scheduler.loaded_blocks > 0)
        engine.close()
    assert found == [False, False, True]
