"""Plain torch twins of the quantized operators: what their kernels are tested against, and what a CPU runs.

Terms as in `reference`. Stored values are as in quantized_weights; activations of 8 bits have one scale a row.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from pagecast_kernels import reference
from pagecast_kernels.quantized_weights import FP8_MAX, PackedWeight, dequantized, paired_order


def packed_product(
    x: Tensor, weight: PackedWeight, bias: Tensor | None = None, *, gated: bool = False, out: Tensor | None = None
) -> Tensor:
    """x[M, K] · ((values - zeros) · scales)[N, K]ᵀ + bias[N]. Returns [M, N] in x's dtype; the weight is rounded to it before.

    gated: silu_mul of that, for a weight whose rows are paired; its bias is in the order of the tiles.
    """
    if bias is not None and weight.paired:
        bias = bias[paired_order(weight.rows).argsort()]
    y = F.linear(x, dequantized(weight, x.dtype), bias)
    y = reference.silu_mul(y) if gated else y
    return y if out is None else out.copy_(y)


def quantize_rows(x: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """x[M, K] as float8_e4m3fn or int8 [M, K] and scales float32 [M]: a row's largest magnitude becomes 448, or 127.5.

    A row of zeros has the scale 1e-10. int8 rounds to the nearest even integer and holds -128 to 127.
    """
    top = FP8_MAX if dtype == torch.float8_e4m3fn else 127.5
    wide = x.float()
    scale = (wide.abs().amax(-1) / top).clamp(min=1e-10)
    value = wide / scale.unsqueeze(-1)
    if dtype == torch.int8:
        return value.round().clamp(-128, 127).to(torch.int8), scale
    return value.clamp(-FP8_MAX, FP8_MAX).to(dtype), scale


def rms_norm_quantized(x: Tensor, weight: Tensor, eps: float, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """quantize_rows(rms_norm(x, weight))."""
    return quantize_rows(reference.rms_norm(x, weight, eps), dtype)


def add_rms_norm_quantized(x: Tensor, residual: Tensor, weight: Tensor, eps: float, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """quantize_rows(add_rms_norm(x, residual, weight)); the residual is updated in place."""
    return quantize_rows(reference.add_rms_norm(x, residual, weight, eps), dtype)


def silu_mul_quantized(gate_up: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """quantize_rows(silu_mul(gate_up))."""
    return quantize_rows(reference.silu_mul(gate_up), dtype)


def scaled_product(
    x: Tensor, x_scale: Tensor, weight: Tensor, weight_scale: Tensor, bias: Tensor | None = None, *, dtype: torch.dtype,
    out: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """(x[M, K] · weight[N, K]ᵀ) · x_scale[M] · weight_scale[N] + bias[N], for e4m3 or int8 of both. Returns [M, N] in dtype.

    Sums are float64's for int8, whose products float32 does not hold, and float32's for e4m3.
    """
    wide = torch.float64 if weight.dtype == torch.int8 else torch.float32
    y = (x.to(wide) @ weight.to(wide).t()) * x_scale.unsqueeze(1) * weight_scale
    y = (y if bias is None else y + bias).to(dtype)
    return y if out is None else out.copy_(y)
