"""Rotary embedding, optional q/k norm and the write of K and V into the paged cache, in one pass over qkv.

On the way in, qkv may be scaled as RMSNorm of the rows that it was made from would have done it, and get a bias. On Hopper the launch
after, if it is one that waits by itself, as decode attention does, is made ready beside this one.

A program takes one token and HEADS heads of its q|k|v row as two tiles, the first and the second half of each head, so that
rotation needs no exchange between threads. Heads of q go to `out_q`, heads of k and v to the token's slot.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents

from pagecast_kernels import configs
from pagecast_kernels.row_scales import heads_and_warps, row_scale

_HEADS = 8


@triton.jit
def _scale_heads(first, second, weight_ptr, lane, inside, eps, HALF: tl.constexpr):
    """RMS-normalise each head, given as its two halves [HEADS, lanes]."""
    scale = tl.rsqrt((tl.sum(first * first, 1) + tl.sum(second * second, 1)) / (2 * HALF) + eps)[:, None]
    low = tl.load(weight_ptr + lane, inside, 0.0).to(tl.float32)
    high = tl.load(weight_ptr + HALF + lane, inside, 0.0).to(tl.float32)
    return first * scale * low[None, :], second * scale * high[None, :]


@triton.jit
def _fitting(x):
    """x within the range of e4m3, which has no infinity."""
    return tl.minimum(tl.maximum(x, -448.0), 448.0)


@triton.jit
def _rope_and_write_kv(
    qkv_ptr,
    cos_sin_ptr,
    positions_ptr,
    slots_ptr,
    k_ptr,
    v_ptr,
    residual_ptr,
    bias_ptr,
    q_norm_ptr,
    k_norm_ptr,
    k_scale_ptr,
    v_scale_ptr,
    q_ptr,
    qkv_stride,
    hidden,
    eps,
    ROW_SCALED: tl.constexpr,
    BIAS: tl.constexpr,
    Q_NORM: tl.constexpr,
    K_NORM: tl.constexpr,
    SCALED: tl.constexpr,
    NUM_HEADS: tl.constexpr,
    NUM_KV_HEADS: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    HALF: tl.constexpr,
    LANES: tl.constexpr,
    HEADS: tl.constexpr,
    HIDDEN: tl.constexpr,
    TELLS: tl.constexpr,
):
    if TELLS:
        gdc_launch_dependents()
    token = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1) * HEADS + tl.arange(0, HEADS)
    lane = tl.arange(0, LANES)
    inside = lane < HALF
    held_head = (head < NUM_HEADS + 2 * NUM_KV_HEADS)[:, None]
    held = held_head & inside[None, :]
    source = qkv_ptr + token * qkv_stride + head[:, None] * (2 * HALF) + lane[None, :]
    first_raw = tl.load(source, held, 0.0)
    second_raw = tl.load(source + HALF, held, 0.0)
    position = tl.load(positions_ptr + token).to(tl.int64)
    slot = tl.load(slots_ptr + token).to(tl.int64)
    cos = tl.load(cos_sin_ptr + position * (2 * HALF) + lane, inside, 0.0)[None, :]
    sin = tl.load(cos_sin_ptr + position * (2 * HALF) + HALF + lane, inside, 0.0)[None, :]

    is_q = (head < NUM_HEADS)[:, None]
    first, second = first_raw.to(tl.float32), second_raw.to(tl.float32)
    if ROW_SCALED:
        row = row_scale(residual_ptr + token * hidden, hidden, eps, HIDDEN)
        first, second = first * row, second * row
    if BIAS:
        bias = bias_ptr + head[:, None] * (2 * HALF) + lane[None, :]
        first += tl.load(bias, held, 0.0).to(tl.float32)
        second += tl.load(bias + HALF, held, 0.0).to(tl.float32)
    if ROW_SCALED or BIAS:
        first_raw, second_raw = first, second
    if Q_NORM:
        low, high = _scale_heads(first, second, q_norm_ptr, lane, inside, eps, HALF)
        first_q, second_q = tl.where(is_q, low, first), tl.where(is_q, high, second)
    else:
        first_q, second_q = first, second
    if K_NORM:
        low, high = _scale_heads(first, second, k_norm_ptr, lane, inside, eps, HALF)
        first_q, second_q = tl.where(is_q, first_q, low), tl.where(is_q, second_q, high)
    first, second = first_q * cos - second_q * sin, second_q * cos + first_q * sin

    q_target = q_ptr + token * (NUM_HEADS * 2 * HALF) + head[:, None] * (2 * HALF) + lane[None, :]
    tl.store(q_target, first, held & is_q)
    tl.store(q_target + HALF, second, held & is_q)
    is_v = (head >= NUM_HEADS + NUM_KV_HEADS)[:, None]
    kv_head = (head - tl.where(head >= NUM_HEADS + NUM_KV_HEADS, NUM_HEADS + NUM_KV_HEADS, NUM_HEADS))[:, None]
    run = (slot // BLOCK_SIZE * NUM_KV_HEADS + kv_head) * BLOCK_SIZE + slot % BLOCK_SIZE
    target = run * (2 * HALF) + lane[None, :]
    written = held & (slot >= 0)
    if SCALED:
        is_k = held_head & ~is_q & ~is_v
        scale = tl.load(k_scale_ptr + kv_head, is_k, 1.0) * tl.load(v_scale_ptr + kv_head, held_head & is_v, 1.0)
        first, second = _fitting(first / scale), _fitting(second / scale)
        first_v, second_v = _fitting(first_raw.to(tl.float32) / scale), _fitting(second_raw.to(tl.float32) / scale)
    else:
        first_v, second_v = first_raw, second_raw
    tl.store(k_ptr + target, first.to(k_ptr.dtype.element_ty), written & ~is_q & ~is_v)
    tl.store(k_ptr + target + HALF, second.to(k_ptr.dtype.element_ty), written & ~is_q & ~is_v)
    tl.store(v_ptr + target, first_v.to(v_ptr.dtype.element_ty), written & is_v)
    tl.store(v_ptr + target + HALF, second_v.to(v_ptr.dtype.element_ty), written & is_v)


def rope_and_write_kv(
    qkv: Tensor,
    cos_sin: Tensor,
    positions: Tensor,
    slot_mapping: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    num_heads: int,
    num_kv_heads: int,
    head_dim: int,
    q_norm: Tensor | None = None,
    k_norm: Tensor | None = None,
    eps: float = 1e-6,
    out_q: Tensor | None = None,
    k_scale: Tensor | None = None,
    v_scale: Tensor | None = None,
    residual: Tensor | None = None,
    bias: Tensor | None = None,
) -> Tensor:
    """See reference.rope_and_write_kv. Rows of qkv may be strided; all else is contiguous."""
    if k_scale is not None:
        configs.check_e4m3(qkv.device)
    tokens, half = qkv.shape[0], head_dim // 2
    out_q = torch.empty((tokens, num_heads, head_dim), dtype=qkv.dtype, device=qkv.device) if out_q is None else out_q
    if not tokens:
        return out_q
    heads, lanes = num_heads + 2 * num_kv_heads, triton.next_power_of_2(half)
    together, warps, hidden = _HEADS, 1 if half <= 64 else 2, 1
    if residual is not None:
        hidden = residual.shape[1]
        together, warps = heads_and_warps(tokens, heads, 2 * lanes)
    _rope_and_write_kv[(tokens, triton.cdiv(heads, together))](
        qkv, cos_sin, positions, slot_mapping, k_cache, v_cache, residual, bias, q_norm, k_norm, k_scale, v_scale, out_q, qkv.stride(0),
        hidden, eps, residual is not None, bias is not None, q_norm is not None, k_norm is not None, k_scale is not None, num_heads,
        num_kv_heads, k_cache.shape[2], half, lanes, together, triton.next_power_of_2(hidden), configs.is_hopper(qkv.device),
        num_warps=warps,
    )  # fmt: skip
    return out_q
