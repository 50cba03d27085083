"""The Triton kernels compile to machine code for Hopper, within its registers, on a host without a GPU."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

KERNELS = [
    f"{name}/{dtype}"
    for name in ("rms_norm", "rope", "paged_attention", "q4_1_gemv")
    for dtype in ("fp32", "bf16")
]


@pytest.fixture(scope="module")
def report(tmp_path_factory):
    pytest.importorskip("triton")
    program = Path(__file__).with_name("compile_kernels.py")
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    environment |= {
        "PYTHONPATH": str(Path(__file__).parents[3]),
        "TRITON_CACHE_DIR": str(tmp_path_factory.mktemp("triton")),
        "TRITON_DEFAULT_FP_FUSION": "1",
    }
    done = subprocess.run(
        [sys.executable, "-W", "error", program, "90"],
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


@pytest.mark.parametrize("kernel", KERNELS)
def test_compiles_without_spills(report, kernel):
    made = report[kernel]
    assert made["target"].startswith("sm_90")
    assert made["cubin_bytes"] > 0
    assert made["local"] == 0
    assert made["stack"] == 0
    assert made["reg"] < 255


@pytest.mark.parametrize("kernel", ["paged_attention/bf16", "q4_1_gemv/bf16"])
def test_bfloat16_products_run_on_tensor_cores(report, kernel):
    assert report[kernel]["tensor_cores"]
