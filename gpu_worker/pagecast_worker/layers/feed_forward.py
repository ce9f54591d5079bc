"""The gated feed-forward block (SwiGLU and GeGLU, Shazeer 2020)."""

from dataclasses import dataclass
from typing import Any

from torch import Tensor

from pagecast_worker.layers.linear import ColumnParallel, RowParallel
from pagecast_worker.layers.quantized import takes
from pagecast_worker.models.config import Activation


@dataclass(slots=True)
class FeedForward:
    """gate_up's weight [2 I, H] holds this rank's gate rows, then its up rows; down's [H, I] gives one summand over ranks."""

    gate_up: ColumnParallel
    down: RowParallel
    activation: Activation = "silu"

    def forward(self, ops: Any, x: Tensor) -> Tensor:
        """x[T, H] normed -> [T, H], this rank's summand."""
        rows = takes(self.down.weight)
        if rows is not None and self.activation == "silu":
            return self.down.forward(ops, ops.linear_silu_mul_rows(x, self.gate_up.weight, self.gate_up.bias, rows))
        gated = self.gate_up.forward_gelu_mul if self.activation == "gelu_tanh" else self.gate_up.forward_silu_mul
        return self.down.forward(ops, gated(ops, x))
