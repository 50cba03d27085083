"""Loads a folder's text model, and prints what that took at its peak, in bytes. A process of its own."""

import sys
from pathlib import Path

import torch

from bench import resident_memory
from bench.random_deepseek import compressed_ids
from engine.checkpoint.source import open_checkpoint
from engine.model.deepseek.config import DeepseekConfig
from engine.model.deepseek.model import DeepseekModel
from kernels.operations import select_operations


def main(folder: str, warm: str) -> None:
    torch.set_num_threads(1)
    load(Path(warm))  # libraries, and what they keep
    resident_memory.reset_peak()
    before = resident_memory.now_bytes()
    model = load(Path(folder))
    sys.stdout.write(f"{resident_memory.peak_bytes() - before}\n")
    model.close()


def load(folder: Path) -> DeepseekModel:
    source = open_checkpoint(folder)
    config = source.family.config
    assert isinstance(config, DeepseekConfig)
    model = DeepseekModel(config, source, select_operations(1), compressed_ids(config))
    source.check_all_taken()
    return model


if __name__ == "__main__":
    main(*sys.argv[1:])
