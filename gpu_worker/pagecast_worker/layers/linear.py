"""Products whose weights are split over ranks (Megatron-LM, Shoeybi et al. 2019).

A column-parallel product comes first in a block: every rank has all of x and computes some outputs. A row-parallel product ends the
block: every rank has some inputs, and its result is one summand of the block's. Whoever uses that result adds the summands up, by
`Ranks.all_reduce` or together with what follows (`Ranks.add_rms_norm`).
"""

from dataclasses import dataclass
from typing import Any

from torch import Tensor

from pagecast_worker.layers.quantized import Weight
from pagecast_worker.parallel import Ranks


@dataclass(slots=True)
class ColumnParallel:
    """weight[N, K] and bias[N] hold this rank's outputs."""

    weight: Weight
    bias: Tensor | None = None

    def forward(self, ops: Any, x: Tensor) -> Tensor:
        """x[T, K] -> [T, N]."""
        return ops.linear(x, self.weight, self.bias)  # type: ignore[no-any-return]

    def forward_silu_mul(self, ops: Any, x: Tensor) -> Tensor:
        """Where N are gate outputs, then as many up outputs: x[T, K] -> silu(gate) · up, [T, N / 2]."""
        if self.bias is not None:
            return ops.silu_mul(self.forward(ops, x))  # type: ignore[no-any-return]
        return ops.linear_silu_mul(x, self.weight)  # type: ignore[no-any-return]

    def forward_gelu_mul(self, ops: Any, x: Tensor) -> Tensor:
        """The same with gelu."""
        if self.bias is not None:
            return ops.gelu_mul(self.forward(ops, x))  # type: ignore[no-any-return]
        return ops.linear_gelu_mul(x, self.weight)  # type: ignore[no-any-return]


@dataclass(slots=True)
class RowParallel:
    """weight[N, K] holds the columns of this rank's inputs; bias[N] is the whole one on every rank, and rank 0 alone adds it."""

    weight: Weight
    ranks: Ranks
    bias: Tensor | None = None

    def forward(self, ops: Any, x: Tensor) -> Tensor:
        """x[T, K] -> [T, N], this rank's summand."""
        y: Tensor = ops.linear(x, self.weight)
        return y if self.bias is None or self.ranks.rank else y.add_(self.bias)
