"""This rank's place in its tensor-parallel group, which part of a tensor it holds, and the collectives that a split model needs.

Weights are split as in Megatron-LM (Shoeybi et al. 2019): projections into heads and into the intermediate size by rows, those back
to the hidden size by columns, whose partial sums `all_reduce` adds; the vocabulary by rows, whose logits `all_gather` joins.
"""

from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from pagecast_worker.executor import LoadError

VOCABULARY_UNIT = 16
"""Every rank's first token id is a multiple of it: random bits are drawn for four ids at once, and rows of logits stay aligned."""

_gather_into = getattr(dist, "all_gather_single", dist.all_gather_into_tensor)
"""One collective under two names: torch 2.13 warns of the older one, and torch 2.11 has no other."""


@dataclass(frozen=True, slots=True)
class Part:
    """What one rank holds of a tensor: indices [start, stop) along dim."""

    dim: int
    start: int
    stop: int

    @property
    def size(self) -> int:
        return self.stop - self.start

    def of(self, tensor: Tensor) -> Tensor:
        """The part of a whole tensor, a view."""
        return tensor.narrow(self.dim, self.start, self.size)


class Collectives(Protocol):
    """What ranks do together. Every rank calls the same ones in the same order with tensors of the same shapes."""

    def all_reduce(self, tensor: Tensor) -> Tensor:
        """Sum over ranks, in place."""

    def add_rms_norm(self, ops: Any, x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> Tensor:
        """ops.add_rms_norm of the sum of x[T, H] over ranks into residual[T, H]; x is lost."""

    def add(self, ops: Any, x: Tensor, residual: Tensor) -> None:
        """residual[T, H] += the sum of x[T, H] over ranks, in place; x is lost."""

    def all_gather(self, tensor: Tensor, size: int) -> Tensor:
        """[..] on each of `size` ranks -> [size, ..]."""

    def tensor(self, value: float) -> Tensor:
        """float32[1] where collectives can take it."""


class ByTorch:
    """torch.distributed's default group: NCCL between GPUs; gloo between CPUs, and where ranks share a GPU."""

    def __init__(self, device: torch.device) -> None:
        self._device = device

    def all_reduce(self, tensor: Tensor) -> Tensor:
        dist.all_reduce(tensor)
        return tensor

    def add_rms_norm(self, ops: Any, x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> Tensor:
        return ops.add_rms_norm(self.all_reduce(x), residual, weight, eps)  # type: ignore[no-any-return]

    def add(self, ops: Any, x: Tensor, residual: Tensor) -> None:
        residual.add_(self.all_reduce(x))

    def all_gather(self, tensor: Tensor, size: int) -> Tensor:
        if tensor.is_cuda and dist.get_backend() == "gloo":
            return self.all_gather(tensor.cpu(), size).to(tensor.device)
        joined = torch.empty((size, *tensor.shape), dtype=tensor.dtype, device=tensor.device)
        _gather_into(joined.view(-1), tensor.reshape(-1))
        return joined

    def tensor(self, value: float) -> Tensor:
        return torch.tensor([value], device=self._device)


class Mute:
    """Collectives of a rank without the others: results have the right shapes and mean nothing. For compiling kernels ahead."""

    def all_reduce(self, tensor: Tensor) -> Tensor:
        return tensor

    def add_rms_norm(self, ops: Any, x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> Tensor:
        return ops.add_rms_norm(x, residual, weight, eps)  # type: ignore[no-any-return]

    def add(self, ops: Any, x: Tensor, residual: Tensor) -> None:
        residual.add_(x)

    def all_gather(self, tensor: Tensor, size: int) -> Tensor:
        return tensor.unsqueeze(0).expand(size, *tensor.shape)

    def tensor(self, value: float) -> Tensor:
        return torch.tensor([value])


@dataclass(frozen=True, slots=True)
class Ranks:
    """rank of size. At size 1 every collective returns its argument, and `collectives` is not used."""

    rank: int = 0
    size: int = 1
    collectives: "Collectives" = field(default_factory=lambda: ByTorch(torch.device("cpu")), compare=False, repr=False)

    def share(self, count: int, what: str) -> int:
        """How many of `count` things this rank holds. Raises LoadError where they do not divide."""
        if count % self.size:
            few = [str(size) for size in range(1, min(count, 64) + 1) if count % size == 0]
            raise LoadError(f"tensor_parallel_size must divide {what}, got {self.size} for {count} ({', '.join(few)} would)")
        return count // self.size

    def copies(self, count: int, what: str) -> int:
        """How many ranks hold the same one of `count` KV heads: 1 while there are enough for all. Raises LoadError."""
        if count % self.size and self.size % count:
            raise LoadError(f"tensor_parallel_size must divide {what} or be a multiple of it, got {self.size} for {count}")
        return max(1, self.size // count)

    def part(self, dim: int, count: int, what: str, copies: int = 1) -> Part:
        """This rank's equal part of `count` indices, of which `copies` neighbouring ranks hold the same. Raises LoadError."""
        size = self.share(count * copies, what)
        start = self.rank // copies * size
        return Part(dim, start, start + size)

    def vocabulary(self, count: int) -> Part:
        """This rank's token ids; the last rank may hold fewer. Raises LoadError where one would hold none."""
        size = self.vocabulary_share(count)
        start = self.rank * size
        if size * (self.size - 1) >= count:
            raise LoadError(f"tensor_parallel_size is too large for vocab_size {count}, got {self.size}")
        return Part(0, start, min(start + size, count))

    def vocabulary_share(self, count: int) -> int:
        """Token ids of every rank but the last."""
        return count if self.size == 1 else -(-count // (self.size * VOCABULARY_UNIT)) * VOCABULARY_UNIT

    def all_reduce(self, tensor: Tensor) -> Tensor:
        """Sum over ranks, in place. Bit for bit the same on every rank."""
        return self.collectives.all_reduce(tensor) if self.size > 1 else tensor

    def add_rms_norm(self, ops: Any, x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> Tensor:
        """ops.add_rms_norm of the ranks' summands x[T, H], which are lost."""
        if self.size == 1:
            return ops.add_rms_norm(x, residual, weight, eps)  # type: ignore[no-any-return]
        return self.collectives.add_rms_norm(ops, x, residual, weight, eps)

    def add(self, ops: Any, x: Tensor, residual: Tensor) -> None:
        """residual += the sum of x over ranks, in place."""
        self.collectives.add(ops, x, residual)

    def all_gather(self, tensor: Tensor) -> Tensor:
        """Ranks' tensors [B, n] of equal shape joined to [B, size · n] in the order of ranks."""
        if self.size == 1:
            return tensor
        return self.collectives.all_gather(tensor, self.size).movedim(0, 1).flatten(1)

    def all_agree(self, yes: bool) -> bool:
        """Whether every rank says yes. Waits for the device."""
        if self.size == 1:
            return yes
        return bool(self.collectives.all_reduce(self.collectives.tensor(float(yes))).item() == self.size)
