"""Weights [N, K] rounded with the inputs in mind that they will meet.

hessian float32[K, K]: sum of x xᵀ over calibration tokens, so that e H eᵀ is what an error e of a row costs in the output. GPTQ as by
Frantar et al. 2022, in the order of importance but with groups of neighbours; scales for which no input was looked at, as in
quantized_weights.round_to_nearest, come out where the Hessian is the identity.
"""

from collections.abc import Callable

import torch
from torch import Tensor

from pagecast_kernels.quantized_weights import grouped
from pagecast_worker.loading.stored import Stored, fp8_scales, fp8_values

_SHRINK = (1.0, 0.95, 0.9, 0.85, 0.8, 0.75, 0.7)
"""What a symmetric scale is tried at, of the one that holds the largest value."""
_DAMP = 0.01
_BLOCK = 128


def symmetric_scales(weight: Tensor, importance: Tensor, group: int, dtype: torch.dtype) -> Tensor:
    """float32[N, G], rounded to dtype: of several sizes the one whose rounding errors cost least, weighed by importance float32[K]."""
    parts, cost = grouped(weight, group), grouped(importance.unsqueeze(0), group)
    largest = parts.abs().amax(-1).clamp(min=1e-10) / 7.5
    best, chosen = torch.full_like(largest, torch.inf), largest
    for shrink in _SHRINK:
        scales = (largest * shrink).to(dtype).float().clamp(min=1e-10)
        rounded = (parts / scales.unsqueeze(-1)).round_().clamp_(-8, 7).mul_(scales.unsqueeze(-1))
        error = ((rounded - parts).square_() * cost).sum(-1)
        better = error < best
        best, chosen = torch.where(better, error, best), torch.where(better, scales, chosen)
    return chosen


def nearest(weight: Tensor, group: int, dtype: torch.dtype, name: str) -> Stored:
    """int4, symmetric, to the nearest."""
    parts = grouped(weight, group)
    scales = (parts.abs().amax(-1) / 7.5).to(dtype).float().clamp(min=1e-10)
    values = (parts / scales.unsqueeze(-1)).round_().add_(8).clamp_(0, 15).to(torch.uint8)
    return Stored("int4", values.flatten(1)[:, : weight.shape[1]].contiguous(), scales, None, group, None, name)


def gptq(weight: Tensor, hessian: Tensor, group: int, dtype: torch.dtype, name: str) -> Stored:
    """int4, symmetric: columns are rounded one after the other, and what that costs is made good by those still to come."""
    work, hessian = _used(weight, hessian)
    scales = symmetric_scales(work, hessian.diagonal(), group, dtype)

    def nearest_int4(column: Tensor, scale: Tensor) -> tuple[Tensor, Tensor]:
        value = (column / scale).round_().clamp_(-8, 7)
        return (value + 8).to(torch.uint8), value * scale

    values = _in_order(work, hessian, scales, group or weight.shape[1], nearest_int4)
    return Stored("int4", values, scales, None, group, None, name)


def gptq_fp8(weight: Tensor, hessian: Tensor, name: str) -> Stored:
    """The same onto e4m3, with a scale for each row."""
    work, hessian = _used(weight, hessian)
    scales = fp8_scales(work, hessian.diagonal())

    def nearest_fp8(column: Tensor, scale: Tensor) -> tuple[Tensor, Tensor]:
        value = fp8_values(column, scale)
        return value.view(torch.uint8), value.float() * scale

    return Stored("fp8", _in_order(work, hessian, scales, weight.shape[1], nearest_fp8), scales, None, 0, None, name)


def _used(weight: Tensor, hessian: Tensor) -> tuple[Tensor, Tensor]:
    """Both as copies in float32, where inputs that never came have no weight."""
    work, hessian = weight.float().clone(), hessian.clone()
    unused = hessian.diagonal() == 0
    hessian.diagonal()[unused] = 1.0
    work[:, unused] = 0.0
    return work, hessian


def _in_order(
    work: Tensor, hessian: Tensor, scales: Tensor, group: int, rounding: Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]
) -> Tensor:
    """uint8[N, K]: columns of `work` rounded from the most important on. rounding: a column and its scales to stored values, and theirs."""
    rows, columns = work.shape
    diagonal = hessian.diagonal().clone()
    order = diagonal.argsort(descending=True)
    work, hessian = work[:, order], hessian[order][:, order]
    hessian.diagonal().add_(_DAMP * float(diagonal.mean()))
    inverse = torch.linalg.cholesky(torch.cholesky_inverse(torch.linalg.cholesky(hessian)), upper=True)
    own = scales[:, order // group]
    values = torch.empty((rows, columns), dtype=torch.uint8, device=work.device)
    for first in range(0, columns, _BLOCK):
        last = min(first + _BLOCK, columns)
        errors = torch.empty((rows, last - first), device=work.device)
        for column in range(first, last):
            values[:, column], meant = rounding(work[:, column], own[:, column])
            error = (work[:, column] - meant) / inverse[column, column]
            work[:, column:last] -= error.unsqueeze(1) * inverse[column, column:last]
            errors[:, column - first] = error
        work[:, last:] -= errors @ inverse[first:last, last:]
    return values[:, order.argsort()].contiguous()


def asymmetric(weight: Tensor, group: int, name: str) -> Stored:
    """int4 with zero points, scales of float16, to the nearest (AWQ's own numbers)."""
    parts = grouped(weight, group)
    low, high = parts.amin(-1).clamp_(max=0.0), parts.amax(-1).clamp_(min=0.0)
    scales = ((high - low) / 15).clamp_(min=1e-7).half().float().clamp_(min=6e-8)
    zeros = (-low / scales).round_().clamp_(0, 15)
    values = (parts / scales.unsqueeze(-1)).round_().add_(zeros.unsqueeze(-1)).clamp_(0, 15).to(torch.uint8)
    return Stored("int4", values.flatten(1)[:, : weight.shape[1]].contiguous(), scales, zeros, group, None, name)


def awq_scales(weights: list[Tensor], hessian: Tensor, mean: Tensor, group: int) -> Tensor:
    """float32[K]: what the columns of weights [N, K] that share inputs are multiplied by before they are rounded (Lin et al. 2023).

    mean float32[K]: of the inputs' magnitudes. Of 20 powers of it the one is taken whose rounding errors cost least.
    """
    best, chosen = float("inf"), torch.ones_like(mean)
    for step in range(20):
        scales = mean.clamp(min=1e-4).pow(step / 20)
        scales = scales / (scales.amax() * scales.amin()).sqrt()
        cost = 0.0
        for weight in weights:
            error = asymmetric(weight * scales, group, "").dense(torch.float32) / scales - weight
            cost += float(((error @ hessian) * error).sum())
        if cost < best:
            best, chosen = cost, scales
    return chosen
