"""Activations of 8 bits with a scale for each row, made by the kernels that hold the row anyway: norms, SiLU·mul, or a pass of its own.

One program holds one row in registers, so its largest value is known before anything is written.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from pagecast_kernels import configs


@triton.jit
def _store_row(value, out_ptr, scale_ptr, row, width, column, inside, FP8: tl.constexpr):
    top: tl.constexpr = 448.0 if FP8 else 127.5
    scale = tl.maximum(tl.max(tl.abs(value), 0) / top, 1e-10)
    value = value / scale
    if FP8:
        stored = tl.minimum(tl.maximum(value, -448.0), 448.0).to(tl.float8e4nv)
    else:
        stored = tl.minimum((value + 12582912.0) - 12582912.0, 127.0).to(tl.int8)  # rounds to the nearest even integer
    tl.store(out_ptr + row * width + column, stored, inside)
    tl.store(scale_ptr + row, scale)


@triton.jit
def _quantize_rows(
    x_ptr, residual_ptr, weight_ptr, out_ptr, scale_ptr, width, x_stride, eps,
    NORM: tl.constexpr, ADD: tl.constexpr, GATE: tl.constexpr, FP8: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, BLOCK)
    inside = column < width
    raw = tl.load(x_ptr + row * x_stride + column, inside, 0.0)
    x = raw.to(tl.float32)
    if GATE:
        x = x / (1.0 + tl.exp(-x)) * tl.load(x_ptr + row * x_stride + width + column, inside, 0.0).to(tl.float32)
    if ADD:
        x += tl.load(residual_ptr + row * width + column, inside, 0.0).to(tl.float32)
        tl.store(residual_ptr + row * width + column, x, inside)
    if NORM:
        weight = tl.load(weight_ptr + column, inside, 0.0).to(tl.float32)
        x = x * tl.rsqrt(tl.sum(x * x, 0) / width + eps) * weight
    # What is quantized is what a model in the input's type would have held.
    _store_row(x.to(raw.dtype).to(tl.float32), out_ptr, scale_ptr, row, width, column, inside, FP8)


def _launch(
    x: Tensor, dtype: torch.dtype, width: int, residual: Tensor | None, weight: Tensor | None, eps: float, gate: bool
) -> tuple[Tensor, Tensor]:
    if dtype == torch.float8_e4m3fn:
        configs.check_e4m3(x.device)
    rows = x.shape[0]
    out = torch.empty((rows, width), dtype=dtype, device=x.device)
    scale = torch.empty(rows, dtype=torch.float32, device=x.device)
    if rows:
        block = triton.next_power_of_2(width)
        _quantize_rows[(rows,)](
            x, residual, weight, out, scale, width, x.stride(0), eps, weight is not None, residual is not None, gate,
            dtype == torch.float8_e4m3fn, block, num_warps=configs.row_warps(block),
        )  # fmt: skip
    return out, scale


def quantize_rows(x: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """See reference_quantized.quantize_rows. Rows of x may be strided."""
    return _launch(x, dtype, x.shape[1], None, None, 0.0, False)


def rms_norm_quantized(x: Tensor, weight: Tensor, eps: float, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """See reference_quantized.rms_norm_quantized."""
    return _launch(x, dtype, x.shape[1], None, weight, eps, False)


def add_rms_norm_quantized(x: Tensor, residual: Tensor, weight: Tensor, eps: float, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """See reference_quantized.add_rms_norm_quantized."""
    return _launch(x, dtype, x.shape[1], residual, weight, eps, False)


def silu_mul_quantized(gate_up: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """See reference_quantized.silu_mul_quantized. gate_up is contiguous."""
    return _launch(gate_up, dtype, gate_up.shape[1] // 2, None, None, 0.0, True)
