"""The gated feed-forward block (SwiGLU, Shazeer 2020)."""

from dataclasses import dataclass
from typing import Any

from torch import Tensor

from pagecast_worker.layers.linear import ColumnParallel, RowParallel


@dataclass(slots=True)
class FeedForward:
    """gate_up's weight [2 I, H] holds this rank's gate rows, then its up rows; down's [H, I] gives one summand over ranks."""

    gate_up: ColumnParallel
    down: RowParallel

    def forward(self, ops: Any, x: Tensor) -> Tensor:
        """x[T, H] normed -> [T, H], this rank's summand."""
        return self.down.forward(ops, self.gate_up.forward_silu_mul(ops, x))
