"""The product for one row: y[1, N] = x[1, K] @ weight[N, K].T, which is nothing but reading the weight once.

No tensor core and no shared tile: a program owns a few whole rows of the weight, so nothing is split over programs and nothing is
added up afterwards. As every program goes over all of x, what surrounds the product of a decoder layer is done in passing: the
RMSNorm before it, and the residual sum or SiLU·mul after it. benchmarks/NOTES.md says what else was tried.
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl

from pagecast_kernels.rotated import Heads, angles, arguments, place, rows_of


class GemvConfig(NamedTuple):
    """rows: weight rows of a program; depth: columns a step; stages: of the load pipeline; warps: of a program."""

    rows: int
    depth: int
    stages: int
    warps: int


BEST = GemvConfig(8, 512, 4, 4)
"""Fastest of twelve on an H200 over all products of an 8B step: 3.76 ms, cuBLAS 4.09."""
MOST_REGISTERS = 80
"""Of a thread where heads are rotated: as many programs fit a processor as without."""


@triton.jit
def _weights(weight_ptr, start, column, depth, EVEN: tl.constexpr):
    """A tile of rows that begin at `start`, from `column` on. Each weight is read once: it may leave the cache first."""
    if EVEN:
        return tl.load(weight_ptr + start[:, None] + column[None, :], eviction_policy="evict_first").to(tl.float32)
    else:
        inside = (column < depth)[None, :]
        return tl.load(weight_ptr + start[:, None] + column[None, :], inside, 0.0, eviction_policy="evict_first").to(tl.float32)


@triton.jit
def _gemv(
    weight_ptr, x_ptr, gamma_ptr, bias_ptr, out_ptr, N, K, eps, heads,
    ROWS: tl.constexpr, DEPTH: tl.constexpr, STAGES: tl.constexpr, EVEN: tl.constexpr,
    NORM: tl.constexpr, GATED: tl.constexpr, ADD: tl.constexpr, BIAS: tl.constexpr, HEADS: tl.constexpr,
):  # fmt: skip
    if HEADS is None:
        row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    else:
        row = rows_of(tl.program_id(0), tl.arange(0, ROWS), ROWS // 2, HEADS)
        cos, sin, slot = angles(heads, tl.program_id(0), ROWS // 2, HEADS)
    start = tl.minimum(row, N - 1).to(tl.int64) * K
    other = start + N.to(tl.int64) * K  # GATED: the up row of each gate row
    offset = tl.arange(0, DEPTH)
    acc = tl.zeros([ROWS, DEPTH], tl.float32)
    up = tl.zeros([ROWS, DEPTH], tl.float32)
    squares = tl.zeros([DEPTH], tl.float32)
    for k in tl.range(0, K, DEPTH, num_stages=STAGES):
        column = k + offset
        if EVEN:
            x = tl.load(x_ptr + column).to(tl.float32)
        else:
            x = tl.load(x_ptr + column, column < K, 0.0).to(tl.float32)
        if NORM:
            squares += x * x
            x *= tl.load(gamma_ptr + column, column < K, 0.0).to(tl.float32)
        acc += _weights(weight_ptr, start, column, K, EVEN) * x[None, :]
        if GATED:
            up += _weights(weight_ptr, other, column, K, EVEN) * x[None, :]
    y = tl.sum(acc, 1)
    scale = 1.0
    if NORM:
        # The norm's factor is the same for every column: it may come after the sum.
        scale = tl.rsqrt(tl.sum(squares, 0) / K + eps)
        y *= scale
    if GATED:
        y = y / (1.0 + tl.exp(-y)) * (tl.sum(up, 1) * scale)
    if BIAS:
        y += tl.load(bias_ptr + row, row < N, 0.0).to(tl.float32)
    if ADD:
        y += tl.load(out_ptr + row, row < N, 0.0).to(tl.float32)
    if HEADS is None:
        tl.store(out_ptr + row, y.to(out_ptr.dtype.element_ty), row < N)
    else:
        place(y, cos, sin, slot, heads, out_ptr, tl.program_id(0), ROWS // 2, HEADS)


def _launch(
    x: torch.Tensor, weight: torch.Tensor, out: torch.Tensor, config: GemvConfig,
    gamma: torch.Tensor | None = None, eps: float = 0.0, gated: bool = False, add: bool = False, bias: torch.Tensor | None = None,
    heads: Heads | None = None,
) -> torch.Tensor:  # fmt: skip
    rows = config.rows // 2 if gated else config.rows  # as many weights a step either way
    N, K = weight.shape[0] // 2 if gated else weight.shape[0], weight.shape[1]
    tensors, shape = arguments(heads)
    _gemv[(triton.cdiv(N, rows),)](
        weight, x, gamma, bias, out, N, K, eps, tensors, rows, config.depth, config.stages, K % config.depth == 0, gamma is not None, gated,
        add, bias is not None, shape, num_warps=config.warps, maxnreg=None if heads is None else MOST_REGISTERS,
    )  # fmt: skip
    return out


def gemv(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None, out: torch.Tensor | None = None, config: GemvConfig = BEST
) -> torch.Tensor:
    """x [1, K] @ weight [N, K].T + bias [N] -> [1, N]; contiguous, float32 accumulation. See reference.linear."""
    out = torch.empty((1, weight.shape[0]), dtype=x.dtype, device=x.device) if out is None else out
    return _launch(x, weight, out, config, bias=bias)


def gemv_add(x: torch.Tensor, weight: torch.Tensor, residual: torch.Tensor, config: GemvConfig = BEST) -> torch.Tensor:
    """Adds x [1, K] @ weight [N, K].T to residual [1, N], in place. See reference.linear_add."""
    return _launch(x, weight, residual, config, add=True)


def norm_gemv(
    x: torch.Tensor, gamma: torch.Tensor, eps: float, weight: torch.Tensor, bias: torch.Tensor | None = None,
    out: torch.Tensor | None = None, config: GemvConfig = BEST,
) -> torch.Tensor:  # fmt: skip
    """The product of RMSNorm(x [1, K]) and weight [N, K].T, plus bias [N] -> [1, N]. See reference.norm_linear."""
    out = torch.empty((1, weight.shape[0]), dtype=x.dtype, device=x.device) if out is None else out
    return _launch(x, weight, out, config, gamma, eps, bias=bias)


def norm_gemv_heads(
    x: torch.Tensor, gamma: torch.Tensor, eps: float, weight: torch.Tensor, heads: Heads, bias: torch.Tensor | None = None,
    config: GemvConfig = BEST,
) -> torch.Tensor:  # fmt: skip
    """rope_and_write_kv of norm_gemv, with heads of a size that is a multiple of a program's rows -> q [1, Hq, D]."""
    out = torch.empty((1, heads.num_heads, 2 * heads.shape[3]), dtype=x.dtype, device=x.device)
    return _launch(x, weight, out, config, gamma, eps, bias=bias, heads=heads)


def norm_gemv_silu_mul(
    x: torch.Tensor, gamma: torch.Tensor, eps: float, weight: torch.Tensor, out: torch.Tensor | None = None, config: GemvConfig = BEST
) -> torch.Tensor:
    """SiLU·mul of the product of RMSNorm(x [1, K]) and weight [2I, K].T -> [1, I]. See reference.norm_linear_silu_mul."""
    out = torch.empty((1, weight.shape[0] // 2), dtype=x.dtype, device=x.device) if out is None else out
    return _launch(x, weight, out, config, gamma, eps, gated=True)
