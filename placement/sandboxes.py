"""Placing sandboxes: the names that the other planes and the simulations use."""

from placement.bins import Admission, Answer, Bin, BinState, sandbox_bins
from placement.placer import Placer, SandboxChoice, Step, placer_of
from placement.simulation import Arrival, Simulation, simulate

__all__ = [
    "Admission",
    "Answer",
    "Arrival",
    "Bin",
    "BinState",
    "Placer",
    "SandboxChoice",
    "Simulation",
    "Step",
    "placer_of",
    "sandbox_bins",
    "simulate",
]
