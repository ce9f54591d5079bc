"""The gated feed-forward block (SwiGLU, Shazeer 2020)."""

from dataclasses import dataclass
from typing import Any

from torch import Tensor

from pagecast_worker.parallel import Ranks


@dataclass(slots=True)
class FeedForward:
    """gate_up[2 I, H] holds this rank's gate rows, then its up rows; down[H, I] gives a partial sum over ranks."""

    gate_up: Tensor
    down: Tensor
    ranks: Ranks

    def forward(self, ops: Any, x: Tensor) -> Tensor:
        """x[T, H] normed -> [T, H]."""
        return self.ranks.all_reduce(ops.linear(ops.linear_silu_mul(x, self.gate_up), self.down))
