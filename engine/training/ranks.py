"""Data-parallel processes of one machine: each has its own sequences, and all take the mean of the gradients.

Two processes of one thread each use two cores best: a small mixture's products are too short to share.
"""

from dataclasses import dataclass

import torch
from torch import Tensor
from torch import distributed as dist

from engine.training.parameters import Parameters


@dataclass(frozen=True, slots=True)
class Ranks:
    """This process among `size` of them. One process needs no group."""

    rank: int = 0
    size: int = 1

    def mean(self, tensors: Parameters) -> None:
        """The mean over all ranks, in place. Every rank gives the same names. Blocks for the slowest."""
        if self.size == 1 or not tensors:
            return
        names = sorted(tensors)
        flat = torch.cat([tensors[name].reshape(-1) for name in names])
        self.add_up(flat)
        flat /= self.size
        start = 0
        for name in names:
            count = tensors[name].numel()
            tensors[name].copy_(flat[start : start + count].view_as(tensors[name]))
            start += count

    def agreed(self, flag: bool) -> bool:
        """True on all ranks where it is true on any."""
        told = torch.tensor([float(flag)])
        self.add_up(told)
        return bool(told.item() > 0)

    def add_up(self, tensor: Tensor) -> None:
        """The sum over all ranks, in place."""
        if self.size > 1:
            dist.all_reduce(tensor)  # pyright: ignore[reportUnknownMemberType]


def join(rank: int, size: int, address: str) -> Ranks:
    """Blocks until all have come. `address` is host:port of the first rank's store, on loopback."""
    if size > 1:
        dist.init_process_group("gloo", init_method=f"tcp://{address}", rank=rank, world_size=size)
    return Ranks(rank, size)


def leave(ranks: Ranks) -> None:
    if ranks.size > 1:
        dist.destroy_process_group()
