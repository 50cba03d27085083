"""Amounts of what a machine gives: the currency between placement, sandboxes and workers."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Resources:
    """A vector of amounts. Used both for what a bin has and for what a thing asks for."""

    cpus: float = 0.0
    memory_bytes: int = 0
    pids: int = 0
    disk_bytes: int = 0
    gpus: int = 0
