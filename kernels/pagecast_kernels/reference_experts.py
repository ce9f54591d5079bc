"""Plain torch twins of the operators of a mixture of experts (see experts)."""

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from pagecast_kernels.quantized_weights import PackedExperts, ScaledExperts, dequantized
from pagecast_kernels.routing import Routing

Weight = Tensor | PackedExperts | ScaledExperts


def route(logits: Tensor, bias: Tensor | None, routing: Routing) -> tuple[Tensor, Tensor]:
    """For logits[T, E]: weights float32[T, k] and experts int64[T, k], best first, the lower id first where they tie.

    bias float32[E] counts for the choice alone, not for the weights. Where logits are not numbers so are the weights.
    """
    wide = logits.double() if logits.dtype == torch.float64 else logits.float()
    scores = wide.sigmoid() if routing.sigmoid else wide.softmax(-1)
    choice = (scores if bias is None else scores + bias).nan_to_num(-torch.inf, neginf=-torch.inf)
    if routing.chosen_groups < routing.groups:
        grouped = choice.unflatten(-1, (routing.groups, -1))
        best = grouped.topk(routing.group_top, -1).values.sum(-1)
        kept = torch.zeros_like(best, dtype=torch.bool).scatter_(1, best.topk(routing.chosen_groups, -1).indices, True)
        choice = grouped.masked_fill(~kept.unsqueeze(-1), -torch.inf).flatten(1)
    ids = choice.sort(dim=-1, descending=True, stable=True).indices[:, : routing.chosen]
    weights = scores.gather(1, ids)
    if routing.renormalise:
        weights = weights / (weights.sum(-1, keepdim=True) + 1e-20)
    return weights * routing.scale, ids


def expert_product(x: Tensor, weight: Weight, expert: int) -> Tensor:
    """x[T, K] · weight[expert, N, K]ᵀ in x's type. For weights of 8 bits that meet such activations x is rounded row by row."""
    if isinstance(weight, PackedExperts):
        own = x if weight.order is None else x[:, weight.order[expert].long()]
        return F.linear(own, dequantized(weight.expert(expert), x.dtype))
    if isinstance(weight, ScaledExperts):
        from pagecast_kernels.reference_quantized import quantize_rows, scaled_product

        return scaled_product(*quantize_rows(x, weight.values.dtype), weight.values[expert], weight.scales[expert], dtype=x.dtype)
    return F.linear(x, weight[expert])


def mixture(
    x: Tensor, logits: Tensor, gate_up: Any, down: Any, routing: Routing, *, bias: Tensor | None = None, gelu: bool = False,
    into: Tensor | None = None, workspace: object = None, product: Callable[[Tensor, Any, int], Tensor] = expert_product,
) -> Tensor:  # fmt: skip
    """The chosen experts' outputs for x[T, H], weighted and summed. Returns [T, H].

    logits[T, E]: the router's; gate_up[E, 2I, H] and down[E, H, I]: each expert's feed-forward (see linear_silu_mul), plain or
    quantized. into: the sum is added to it in place. product: of some rows with one expert's weight.
    """
    weights, ids = route(logits, bias, routing)
    total = torch.zeros(x.shape, dtype=weights.dtype, device=x.device)
    for expert in ids.unique().tolist():
        token, place = torch.nonzero(ids == expert, as_tuple=True)
        gate, up = product(x[token], gate_up, expert).chunk(2, -1)
        gated = (F.gelu(gate, approximate="tanh") if gelu else F.silu(gate)) * up
        part = product(gated, down, expert).to(total.dtype) * weights[token, place].unsqueeze(1)
        total.index_add_(0, token, part)
    return total.to(x.dtype) if into is None else into.add_(total.to(into.dtype))
