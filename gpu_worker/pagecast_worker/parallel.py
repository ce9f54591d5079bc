"""This rank's place in its tensor-parallel group and the two collectives that a split model needs.

Weights are split as in Megatron-LM (Shoeybi et al. 2019): projections into heads and into the intermediate size by rows, those back
to the hidden size by columns, whose partial sums `all_reduce` adds; the vocabulary by rows, whose logits `all_gather` joins.
"""

from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from pagecast_worker.executor import LoadError


@dataclass(frozen=True, slots=True)
class Ranks:
    """rank of size. At size 1 every collective returns its argument; above, torch.distributed's default group must be open."""

    rank: int = 0
    size: int = 1

    def share(self, count: int, what: str) -> int:
        """How many of `count` things this rank holds. Raises LoadError where they do not divide."""
        if count % self.size:
            raise LoadError(f"tensor_parallel_size must divide {what}, got {self.size} for {count}")
        return count // self.size

    def part(self, tensor: Tensor, dim: int, what: str) -> Tensor:
        """This rank's slice of a full tensor along dim, a view."""
        size = self.share(tensor.shape[dim], what)
        return tensor.narrow(dim, self.rank * size, size)

    def all_reduce(self, tensor: Tensor) -> Tensor:
        """Sum over ranks, in place."""
        if self.size > 1:
            dist.all_reduce(tensor)
        return tensor

    def all_gather(self, tensor: Tensor) -> Tensor:
        """Ranks' tensors [.., n] joined along the last dimension in the order of ranks."""
        if self.size == 1:
            return tensor
        parts = [torch.empty_like(tensor) for _ in range(self.size)]
        dist.all_gather(parts, tensor.contiguous())
        return torch.cat(parts, -1)
