import subprocess
import sys
from pathlib import Path

import pytest

from kernels import triton_door
from protocol.errors import MissingCapability


def test_missing_triton_is_named(monkeypatch):
    monkeypatch.setattr(triton_door.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(MissingCapability, match=r"kernels\.rope.*triton.*not installed.*pip install"):
        triton_door.require_triton("rope")


def test_cpu_path_does_not_import_triton():
    program = """
import sys, torch
from kernels.paged_attention import paged_attention
from kernels.q4_1_gemv import q4_1_gemv
from kernels.rms_norm import rms_norm
from kernels.rope import rope
rms_norm(torch.ones(1, 2), torch.ones(2), 0.0)
rope(torch.ones(1, 1, 2), torch.ones(1, dtype=torch.int64), 10.0)
assert not any(name.endswith("_triton") for name in sys.modules), "a kernel was imported"
"""
    root = Path(__file__).parents[3]
    subprocess.run([sys.executable, "-c", program], cwd=root, check=True)
