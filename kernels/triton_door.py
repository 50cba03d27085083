"""The one place that decides whether Triton is there: it is an optional dependency, imported at first use."""

import importlib.util

from protocol.errors import MissingCapability


def require_triton(operation: str) -> None:
    """Raise `MissingCapability` where a CUDA tensor needs a kernel and the package is absent.

    Not a silent fall-back to the reference: on a GPU that would be slow without a word. Does not import
    Triton, so it costs microseconds.
    """
    if importlib.util.find_spec("triton") is None:
        raise MissingCapability(
            f"kernels.{operation}: the tensor is on a CUDA device and the package 'triton' is not installed",
            hint="pip install triton, or run the engine on the CPU",
        )
