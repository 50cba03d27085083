"""The model and one worker's engine: no Ray, no HTTP.

The public names are loaded on first use, so that `engine.chat` can be imported without torch.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from protocol.openmp import spin_briefly

if TYPE_CHECKING:
    from engine.config import EngineConfig
    from engine.engine import Engine
    from engine.model.registry import load_model
    from engine.request import Request
    from protocol.sampling import SamplingParams, Structure

__all__ = ["Engine", "EngineConfig", "Request", "SamplingParams", "Structure", "load_model"]

_HOMES = {
    "Engine": "engine.engine",
    "EngineConfig": "engine.config",
    "Request": "engine.request",
    "SamplingParams": "protocol.sampling",
    "Structure": "protocol.sampling",
    "load_model": "engine.model.registry",
}


spin_briefly()  # before anything here loads torch


def __getattr__(name: str) -> Any:
    if name in _HOMES:
        return getattr(import_module(_HOMES[name]), name)
    raise AttributeError(f"module 'engine' has no attribute {name!r}")
