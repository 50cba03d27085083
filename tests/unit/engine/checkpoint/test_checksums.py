"""A folder's sums: bytes in the middle of a tensor, which no header and no fingerprint tells, are refused."""

import os
import shutil
from pathlib import Path

import pytest

from engine import load_model
from engine.checkpoint.checksums import SUMS, check_sums, write_sums
from engine.errors import BrokenModelFile
from engine.model_path import NANO


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / "model.safetensors").write_bytes(os.urandom(5000))
    (tmp_path / "README.md").write_text("anybody's")
    write_sums(tmp_path)
    return tmp_path


def test_a_shipped_model_whose_weights_changed_is_refused_by_its_file(tmp_path: Path):
    copy = Path(shutil.copytree(NANO, tmp_path / "nano"))
    with (copy / "model.safetensors").open("r+b") as stream:
        stream.seek(10_000_000)
        stream.write(bytes(2000))
    with pytest.raises(BrokenModelFile, match=rf"model\.safetensors: its bytes are not those that {SUMS}"):
        load_model(str(copy), threads=1)
    (copy / SUMS).unlink()
    load_model(str(copy), threads=1).close()


def test_only_what_decides_the_model_counts(folder: Path):
    (folder / "README.md").write_text("another")
    check_sums(folder)
    (folder / "model.safetensors").unlink()  # of another worker's part, say
    check_sums(folder)
    (folder / "config.json").write_text("[]")
    with pytest.raises(BrokenModelFile, match=r"config\.json"):
        check_sums(folder)


@pytest.mark.parametrize("line", ["", "abc  config.json", f"{'0' * 64}  ../config.json", "\udcff"])
def test_a_line_that_is_no_sum_is_refused(folder: Path, line: str):
    (folder / SUMS).write_bytes(f"{line}\n".encode("utf-8", "surrogateescape"))
    with pytest.raises(BrokenModelFile, match="line 1"):
        check_sums(folder)
