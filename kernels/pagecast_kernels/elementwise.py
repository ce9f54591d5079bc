"""SiLU·mul and GELU·mul, embedding gather and block copies: each moves its bytes once, with wide accesses."""

import torch
import triton
import triton.language as tl
from torch import Tensor

_COLUMNS = 1024  # elements a program moves: eight 16-byte accesses of bf16 a warp, four warps


@triton.jit
def _gate_mul(gate_up_ptr, out_ptr, inner, GELU: tl.constexpr, COLUMNS: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    inside = column < inner
    gate = tl.load(gate_up_ptr + row * 2 * inner + column, inside, 0.0).to(tl.float32)
    up = tl.load(gate_up_ptr + row * 2 * inner + inner + column, inside, 0.0).to(tl.float32)
    if GELU:
        # 0.5 · x · (1 + tanh(z)) is x · sigmoid(2z).
        steep = 1.5957691216057308 * (gate + 0.044715 * gate * gate * gate)
    else:
        steep = gate
    tl.store(out_ptr + row * inner + column, gate / (1.0 + tl.exp(-steep)) * up, inside)


def silu_mul(gate_up: Tensor, out: Tensor | None = None) -> Tensor:
    """See reference.silu_mul. gate_up is contiguous."""
    return _launch_gate_mul(gate_up, False, out)


def gelu_mul(gate_up: Tensor, out: Tensor | None = None) -> Tensor:
    """See reference.gelu_mul. gate_up is contiguous."""
    return _launch_gate_mul(gate_up, True, out)


def _launch_gate_mul(gate_up: Tensor, gelu: bool, out: Tensor | None) -> Tensor:
    tokens, inner = gate_up.shape[0], gate_up.shape[1] // 2
    out = torch.empty((tokens, inner), dtype=gate_up.dtype, device=gate_up.device) if out is None else out
    if tokens:
        _gate_mul[(tokens, triton.cdiv(inner, _COLUMNS))](gate_up, out, inner, gelu, _COLUMNS, num_warps=4)
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
