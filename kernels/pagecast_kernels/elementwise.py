"""SiLU·mul and GELU·mul, embedding gather and block copies: each moves its bytes once, with wide accesses."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from pagecast_kernels.row_scales import columns_and_warps, row_scale

_COLUMNS = 1024  # elements a program moves: eight 16-byte accesses of bf16 a warp, four warps


@triton.jit
def activated(gate, GELU: tl.constexpr):
    """SiLU of float32 values, or GELU by its tanh form."""
    if GELU:
        # 0.5 · x · (1 + tanh(z)) is x · sigmoid(2z).
        steep = 1.5957691216057308 * (gate + 0.044715 * gate * gate * gate)
    else:
        steep = gate
    return gate / (1.0 + tl.exp(-steep))


@triton.jit
def _gate_mul(
    gate_up_ptr, residual_ptr, out_ptr, inner, hidden, eps,
    GELU: tl.constexpr, SCALED: tl.constexpr, COLUMNS: tl.constexpr, HIDDEN: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    inside = column < inner
    gate = tl.load(gate_up_ptr + row * 2 * inner + column, inside, 0.0).to(tl.float32)
    up = tl.load(gate_up_ptr + row * 2 * inner + inner + column, inside, 0.0).to(tl.float32)
    if SCALED:
        scale = row_scale(residual_ptr + row * hidden, hidden, eps, HIDDEN)
        gate, up = gate * scale, up * scale
    tl.store(out_ptr + row * inner + column, activated(gate, GELU) * up, inside)


def silu_mul(gate_up: Tensor, out: Tensor | None = None, residual: Tensor | None = None, eps: float = 1e-6) -> Tensor:
    """See reference.silu_mul. gate_up and residual are contiguous."""
    return _launch_gate_mul(gate_up, False, out, residual, eps)


def gelu_mul(gate_up: Tensor, out: Tensor | None = None) -> Tensor:
    """See reference.gelu_mul. gate_up is contiguous."""
    return _launch_gate_mul(gate_up, True, out)


def _launch_gate_mul(gate_up: Tensor, gelu: bool, out: Tensor | None, residual: Tensor | None = None, eps: float = 0.0) -> Tensor:
    tokens, inner = gate_up.shape[0], gate_up.shape[1] // 2
    out = torch.empty((tokens, inner), dtype=gate_up.dtype, device=gate_up.device) if out is None else out
    if not tokens:
        return out
    hidden, columns, warps = 1, _COLUMNS, 4
    if residual is not None:
        hidden = residual.shape[1]
        columns, warps = columns_and_warps(tokens, inner)
    _gate_mul[(tokens, triton.cdiv(inner, columns))](
        gate_up, residual, out, inner, hidden, eps, gelu, residual is not None, columns, triton.next_power_of_2(hidden), num_warps=warps
    )
    return out


@triton.jit
def _embedding(ids_ptr, weight_ptr, out_ptr, start, size, hidden, COLUMNS: tl.constexpr):
    token = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    local = tl.load(ids_ptr + token).to(tl.int64) - start
    inside = column < hidden
    held = (local >= 0) & (local < size)
    value = tl.load(weight_ptr + local * hidden + column, inside & held, 0.0)
    tl.store(out_ptr + token * hidden + column, value, inside)


def embedding(token_ids: Tensor, weight: Tensor, *, start: int = 0, out: Tensor | None = None) -> Tensor:
    """See reference.embedding. weight is contiguous."""
    tokens, (size, hidden) = token_ids.shape[0], weight.shape
    out = torch.empty((tokens, hidden), dtype=weight.dtype, device=weight.device) if out is None else out
    if tokens:
        _embedding[(tokens, triton.cdiv(hidden, _COLUMNS))](token_ids, weight, out, start, size, hidden, _COLUMNS, num_warps=4)
    return out


@triton.jit
def _copy_blocks(k_ptr, v_ptr, src_ptr, dst_ptr, k_elements, v_elements, COLUMNS: tl.constexpr):
    pair = tl.program_id(0)
    source = tl.load(src_ptr + pair).to(tl.int64)
    target = tl.load(dst_ptr + pair).to(tl.int64)
    column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    k = tl.load(k_ptr + source * k_elements + column, column < k_elements)
    v = tl.load(v_ptr + source * v_elements + column, column < v_elements)
    tl.store(k_ptr + target * k_elements + column, k, column < k_elements)
    tl.store(v_ptr + target * v_elements + column, v, column < v_elements)


def copy_blocks(k_cache: Tensor, v_cache: Tensor, src: Tensor, dst: Tensor) -> None:
    """See reference.copy_blocks. Caches are contiguous."""
    k_elements, v_elements = k_cache[0].numel(), v_cache[0].numel()
    if src.shape[0]:
        grid = (src.shape[0], triton.cdiv(max(k_elements, v_elements), _COLUMNS))
        _copy_blocks[grid](k_cache, v_cache, src, dst, k_elements, v_elements, _COLUMNS, num_warps=4)
