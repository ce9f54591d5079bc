"""RMSNorm's factor of a row, and what a product made of rows that were not normed times it: what `row_scales` is for, in plain torch."""

import torch
from torch import Tensor


def row_scale(x: Tensor, eps: float) -> Tensor:
    """1 / sqrt(mean(x²) + eps) of each row of x[T, H]: what RMSNorm multiplies it by, but for its weight. Returns [T, 1].

    float32, or float64 where x is."""
    wide = x if x.dtype == torch.float64 else x.float()
    return torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)


def scaled_qkv(qkv: Tensor, residual: Tensor | None, bias: Tensor | None, eps: float) -> Tensor:
    """qkv[T, N] times the row_scale of residual[T, H], plus bias[N], each where it is given, in qkv's type."""
    qkv = qkv if residual is None else (qkv * row_scale(residual, eps)).to(qkv.dtype)
    return qkv if bias is None else qkv + bias.to(qkv.dtype)
