"""Program of test_triton_compiled: every kernel compiled to machine code for a GPU that is not there.

Runs in a process of its own, without TRITON_INTERPRET. The interpreter knows neither the compiler's type
rules nor registers; this does. Prints one JSON object: case name -> what the compiler made.
"""

import json
import re
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from kernels.paged_attention_triton import TILE_POSITIONS, paged_attention_kernel
from kernels.q4_1_gemv_triton import TILE_OUTPUTS, TILE_ROWS, q4_1_gemv_kernel
from kernels.rms_norm_triton import rms_norm_kernel
from kernels.rope_triton import rope_kernel


def main() -> None:
    capability = int(sys.argv[1])
    report = {}
    for dtype in ("fp32", "bf16"):
        report[f"rms_norm/{dtype}"] = compile_kernel(
            rms_norm_kernel,
            {"x_ptr": f"*{dtype}", "weight_ptr": "*fp32", "out_ptr": f"*{dtype}", "eps": "fp32"},
            {"BLOCK_D": 1024},
            capability,
        )
        report[f"rope/{dtype}"] = compile_kernel(
            rope_kernel,
            {
                "x_ptr": f"*{dtype}",
                "positions_ptr": "*i64",
                "frequencies_ptr": "*fp32",
                "out_ptr": f"*{dtype}",
            },
            {"HALF_D": 32, "BLOCK_H": 16, "BLOCK_P": 32},
            capability,
        )
        report[f"paged_attention/{dtype}"] = compile_kernel(
            paged_attention_kernel,
            {
                **dict.fromkeys(("q_ptr", "k_ptr", "v_ptr", "out_ptr"), f"*{dtype}"),
                **dict.fromkeys(("tables_ptr", "lengths_ptr"), "*i32"),
                "scale": "fp32",
            },
            {
                **{"NUM_HEADS": 9, "GROUP": 3, "HEAD_DIM": 64, "BLOCK_SIZE": 16},
                **{"BLOCK_R": 16, "BLOCK_D": 64, "BLOCK_L": TILE_POSITIONS, "WIDEN": False},
            },
            capability,
        )
        report[f"q4_1_gemv/{dtype}"] = compile_kernel(
            q4_1_gemv_kernel,
            {"x_ptr": f"*{dtype}", "bytes_ptr": "*u8", "halves_ptr": "*fp16", "out_ptr": f"*{dtype}"},
            {"BLOCK_M": TILE_ROWS, "BLOCK_N": TILE_OUTPUTS, "WIDEN": False},
            capability,
        )
    print(json.dumps(report))


def compile_kernel(kernel: Any, types: dict[str, str], constants: dict[str, Any], capability: int) -> Any:
    """Arguments that neither `types` nor `constants` names are 32-bit integers."""
    signature = {
        name: "constexpr" if name in constants else types.get(name, "i32") for name in kernel.arg_names
    }
    made = triton.compile(
        ASTSource(fn=kernel, signature=signature, constexprs=constants),
        target=GPUTarget("cuda", capability, 32),
        options={"num_warps": 4, "num_stages": 3},
    )
    return {
        "cubin_bytes": len(made.asm["cubin"]),
        "shared_bytes": made.metadata.shared,
        "tensor_cores": "mma" in made.asm["ptx"],
        "target": re.search(r"\.target (\w+)", made.asm["ptx"])[1],
        **resource_usage(made.asm["cubin"]),
    }


def resource_usage(cubin: bytes) -> dict[str, int]:
    """Registers a thread, and bytes a thread of stack and of spilled local memory."""
    tool = Path(triton.__file__).parent / "backends/nvidia/bin/cuobjdump"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        text = subprocess.run(
            [tool, "--dump-resource-usage", file.name], check=True, capture_output=True, text=True
        ).stdout
    return {key.lower(): int(re.search(rf"{key}:(\d+)", text)[1]) for key in ("REG", "STACK", "LOCAL")}


if __name__ == "__main__":
    main()
