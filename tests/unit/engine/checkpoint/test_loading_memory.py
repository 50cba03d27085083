"""Loading takes memory for the model and one shard, measured by the kernel in a process of its own."""

import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from bench.random_deepseek import Size, config_json, write_folder
from engine.checkpoint.conversion import convert
from engine.checkpoint.inventory import v41_entries
from engine.model.deepseek.config import DeepseekConfig

ROOT = Path(__file__).parents[4]
MIB = 1 << 20
SHARD_BYTES = 12 * MIB
SLACK_BYTES = 16 * MIB  # weights on their way, and what the allocator keeps of those before
SIZE = Size(
    vocabulary=1024, hidden=512, heads=8, query_rank=128, inner=256, experts=16, engram_rows_a_head=512,
)  # fmt: skip
LITTLE = replace(SIZE, hidden=64, inner=32, experts=2, experts_per_token=1, engram_rows_a_head=32)


@pytest.fixture(scope="module")
def bfloat16(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model of 184 MiB in sixteen shards."""
    folder = tmp_path_factory.mktemp("loading") / "bfloat16"
    write_folder(folder, config_json(SIZE), SHARD_BYTES)
    write_folder(folder.with_name("little"), config_json(LITTLE))
    return folder


@pytest.fixture(params=["bfloat16", "released"])
def folder(request: pytest.FixtureRequest, bfloat16: Path) -> Path:
    """As it was written, and in the release's formats, of half the bytes and less."""
    if request.param == "bfloat16":
        return bfloat16
    released = bfloat16.with_name("released")
    convert(bfloat16, released, shard_bytes=SHARD_BYTES)
    return released


def model_bytes() -> int:
    """Matrices whose values all are bfloat16's stay such; tables, the embedding and the rest are float32."""
    entries = v41_entries(DeepseekConfig.from_dict(config_json(SIZE)))
    narrow = {"dense", "expert", "plain"}
    return sum(
        e.num_values * (2 if e.kind in narrow and len(e.shape) > 1 and e.name != "embed.weight" else 4)
        for e in entries
    )


def test_the_peak_is_the_model_and_one_shard(folder: Path, cpu_library: Path) -> None:
    shards = [path.stat().st_size for path in folder.glob("*.safetensors")]
    assert len(shards) >= 4
    assert sum(shards) > 3 * max(shards) + SLACK_BYTES  # so that two more shards would show
    peak = loading_peak(folder)
    assert 0.95 * model_bytes() < peak < model_bytes() + max(shards) + SLACK_BYTES


def loading_peak(folder: Path) -> int:
    command = [sys.executable, str(Path(__file__).with_name("loading_process.py"))]
    command += [str(folder), str(folder.with_name("little"))]
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, env=environment, stdout=subprocess.PIPE, text=True, check=True)
    return int(done.stdout)
