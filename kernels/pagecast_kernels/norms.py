"""RMSNorm, and residual add with RMSNorm: one program holds one row of H values in registers and reads it once."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from pagecast_kernels import configs


@triton.jit
def _rms_norm(x_ptr, residual_ptr, weight_ptr, out_ptr, hidden, x_stride, eps, ADD: tl.constexpr, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, BLOCK)
    inside = column < hidden
    weight = tl.load(weight_ptr + column, inside, 0.0).to(tl.float32)
    x = tl.load(x_ptr + row * x_stride + column, inside, 0.0).to(tl.float32)
    if ADD:
        x += tl.load(residual_ptr + row * hidden + column, inside, 0.0).to(tl.float32)
        tl.store(residual_ptr + row * hidden + column, x, inside)
    scale = tl.rsqrt(tl.sum(x * x, 0) / hidden + eps)
    tl.store(out_ptr + row * hidden + column, x * scale * weight, inside)


def _launch(x: Tensor, residual: Tensor | None, weight: Tensor, eps: float, out: Tensor | None) -> Tensor:
    tokens, hidden = x.shape
    out = torch.empty((tokens, hidden), dtype=x.dtype, device=x.device) if out is None else out
    if tokens:
        block = triton.next_power_of_2(hidden)
        _rms_norm[(tokens,)](
            x, residual, weight, out, hidden, x.stride(0), eps, residual is not None, block, num_warps=configs.row_warps(block)
        )
    return out


def rms_norm(x: Tensor, weight: Tensor, eps: float, out: Tensor | None = None) -> Tensor:
    """See reference.rms_norm. The last axis of x is contiguous, its rows may be strided."""
    return _launch(x, None, weight, eps, out)


def add_rms_norm(x: Tensor, residual: Tensor, weight: Tensor, eps: float, out: Tensor | None = None) -> Tensor:
    """See reference.add_rms_norm. residual is contiguous."""
    return _launch(x, residual, weight, eps, out)
