"""The Triton kernels equal their references, case by case, in Triton's interpreter."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

# float32: some last places of a sum taken in another order. bfloat16: the interpreter truncates where a
# GPU rounds, so one last place (2^-7).
TOLERANCES = {"float32": 2e-6, "float16": 2e-3, "bfloat16": 8e-3}
OPERATIONS = {"rms_norm": 5, "rope": 4, "paged_attention": 3, "q4_1_gemv": 3}


@pytest.fixture(scope="module")
def differences() -> dict[str, float]:
    pytest.importorskip("triton")
    program = Path(__file__).with_name("interpret_kernels.py")
    root = Path(__file__).parents[3]
    done = subprocess.run(
        [sys.executable, "-W", "error", program],
        env={**os.environ, "TRITON_INTERPRET": "1", "PYTHONPATH": str(root)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


@pytest.mark.parametrize("dtype", TOLERANCES)
@pytest.mark.parametrize("operation", OPERATIONS)
def test_kernel_equals_reference(differences, operation, dtype):
    cases = {
        name: value
        for name, value in differences.items()
        if name.startswith(f"{operation}/") and name.endswith(f"/{dtype}")
    }
    assert len(cases) == OPERATIONS[operation]
    assert {name: value for name, value in cases.items() if value > TOLERANCES[dtype]} == {}
