"""Which checkpoint tensor fills which part of which parameter."""

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from pagecast_worker.models.config import ModelConfig
from pagecast_worker.models.names import Names, Piece
from pagecast_worker.parallel import Part


@dataclass(frozen=True, slots=True)
class Source:
    """Where a piece of a parameter comes from: the rows from `row` on of `parameter` are this rank's part of a checkpoint tensor.

    shape: of the whole checkpoint tensor. take: the rows of it that are meant, all of them if None. change: what is done to those.
    part: what this rank holds of the result; None: all. expert: the one that is meant, where the parameter holds those of all.
    """

    name: str
    shape: tuple[int, ...]
    parameter: Tensor
    row: int = 0
    part: Part | None = None
    take: tuple[int, int] | None = None
    change: Callable[[Tensor], Tensor] | None = None
    expert: int | None = None

    def place(self) -> Tensor:
        """What is filled, a view of the parameter."""
        whole = self.parameter if self.expert is None else self.parameter[self.expert]
        return whole.narrow(0, self.row, self.part.size if self.part is not None and self.part.dim == 0 else self.rows())

    def rows(self) -> int:
        """How many rows of the checkpoint tensor are meant, over all ranks."""
        return self.shape[0] if self.take is None else self.take[1] - self.take[0]

    def size(self) -> int:
        """How many of its values are meant."""
        return self.rows() * math.prod(self.shape[1:])

    def held(self) -> int:
        """How many of them this rank holds."""
        if self.part is None:
            return self.size()
        return self.size() // (self.rows() if self.part.dim == 0 else self.shape[self.part.dim]) * self.part.size


def named(names: Names, part: str, prefix: str, rows: int, *rest: int) -> tuple[str, tuple[int, ...], tuple[int, int] | None]:
    """Name, whole shape and rows meant of the tensor that holds a part of `rows` rows."""
    entry = names[part]
    if isinstance(entry, Piece):
        return prefix + entry.name, (rows * entry.of, *rest), (rows * entry.index, rows * (entry.index + 1))
    return prefix + entry, (rows, *rest), None


def rotary_order(config: ModelConfig) -> list[int] | None:
    """Where each element of a head of q and k comes from, so that rotation pairs elements i and i + D / 2; None: all stay in place.

    Attention does not see in which order q and k hold their elements if it is the same one. Elements that are not rotated fill up
    both halves, and the table of angles turns them by none.
    """
    dim, rotated = config.head_dim, config.rotary_dim or config.head_dim
    if rotated == dim and not config.interleaved:
        return None
    half, rest = rotated // 2, (dim - rotated) // 2
    first = [2 * i if config.interleaved else i for i in range(half)]
    second = [i + 1 if config.interleaved else i + half for i in first]
    return [*first, *range(rotated, rotated + rest), *second, *range(rotated + rest, dim)]


def reordered(order: list[int]) -> Callable[[Tensor], Tensor]:
    """The change that puts rows of every head of a q or k tensor [heads · D, ..] into this order."""
    index = torch.tensor(order)
    return lambda value: value.unflatten(0, (-1, len(order))).index_select(1, index).flatten(0, 1)
