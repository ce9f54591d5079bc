"""A mixture of experts (Shazeer et al. 2017): a router chooses a few feed-forward blocks for each token."""

from dataclasses import dataclass
from typing import Any

from torch import Tensor

from pagecast_kernels.routing import Routing
from pagecast_worker.layers.feed_forward import FeedForward
from pagecast_worker.layers.quantized import ExpertsWeight
from pagecast_worker.models.config import Activation


@dataclass(slots=True)
class Grouped:
    """One of the products of all experts: weight[E, N, K]."""

    weight: ExpertsWeight


@dataclass(slots=True)
class Experts:
    """Every rank holds a part of every expert: gate_up[E, 2 I, H] its gate rows, then its up rows, and down[E, H, I] columns, so what
    they give is one summand over ranks. router[E, H] and its bias float32[E] are whole. shared: sees every token.
    """

    router: Tensor
    gate_up: Grouped
    down: Grouped
    routing: Routing
    activation: Activation = "silu"
    bias: Tensor | None = None
    shared: FeedForward | None = None

    def forward(self, ops: Any, x: Tensor) -> Tensor:
        """x[T, H] normed -> [T, H], this rank's summand."""
        return self.add(ops, x, None if self.shared is None else self.shared.forward(ops, x))

    def add(self, ops: Any, x: Tensor, into: Tensor | None) -> Tensor:
        """The chosen experts' summand, added to `into` [T, H] where there is one."""
        return ops.mixture(  # type: ignore[no-any-return]
            x, ops.linear(x, self.router), self.gate_up.weight, self.down.weight, self.routing, bias=self.bias,
            gelu=self.activation == "gelu_tanh", into=into,
        )
