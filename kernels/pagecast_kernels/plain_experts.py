"""Plain torch twins of the operators of a mixture of experts (see experts)."""

import torch
import torch.nn.functional as F
from torch import Tensor

from pagecast_kernels.routing import Routing


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


def mixture(
    x: Tensor, logits: Tensor, gate_up: Tensor, down: Tensor, routing: Routing, *, bias: Tensor | None = None, gelu: bool = False,
    into: Tensor | None = None, workspace: object = None,
) -> Tensor:  # fmt: skip
    """The chosen experts' outputs for x[T, H], weighted and summed. Returns [T, H].

    logits[T, E]: the router's; gate_up[E, 2I, H] and down[E, H, I]: each expert's feed-forward (see linear_silu_mul). into: the sum
    is added to it in place.
    """
    weights, ids = route(logits, bias, routing)
    total = torch.zeros(x.shape, dtype=weights.dtype, device=x.device)
    for expert in ids.unique().tolist():
        token, place = torch.nonzero(ids == expert, as_tuple=True)
        gate, up = F.linear(x[token], gate_up[expert]).chunk(2, -1)
        gated = (F.gelu(gate, approximate="tanh") if gelu else F.silu(gate)) * up
        part = F.linear(gated, down[expert]).to(total.dtype) * weights[token, place].unsqueeze(1)
        total.index_add_(0, token, part)
    return total.to(x.dtype) if into is None else into.add_(total.to(into.dtype))
