"""The product for one row: y[1, N] = x[1, K] @ weight[N, K].T, which is nothing but reading the weight once.

No tensor core and no shared tile: a program owns a few whole rows of the weight, so nothing is split over programs and nothing is
added up afterwards. benchmarks/NOTES.md says what else was tried.
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl


class GemvConfig(NamedTuple):
    """rows: weight rows of a program; depth: columns a step; stages: of the load pipeline; warps: of a program."""

    rows: int
    depth: int
    stages: int
    warps: int


BEST = GemvConfig(8, 512, 4, 4)
"""Fastest of twelve on an H200 over all products of an 8B step: 3.76 ms, cuBLAS 4.09."""


@triton.jit
def _gemv(weight_ptr, x_ptr, out_ptr, N, K, ROWS: tl.constexpr, DEPTH: tl.constexpr, STAGES: tl.constexpr, EVEN: tl.constexpr):
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    start = tl.minimum(row, N - 1).to(tl.int64) * K
    column = tl.arange(0, DEPTH)
    acc = tl.zeros([ROWS, DEPTH], tl.float32)
    for k in tl.range(0, K, DEPTH, num_stages=STAGES):
        if EVEN:
            w = tl.load(weight_ptr + start[:, None] + (k + column)[None, :], eviction_policy="evict_first")
            x = tl.load(x_ptr + k + column)
        else:
            inside = k + column < K
            w = tl.load(weight_ptr + start[:, None] + (k + column)[None, :], inside[None, :], 0.0, eviction_policy="evict_first")
            x = tl.load(x_ptr + k + column, inside, 0.0)
        acc += w.to(tl.float32) * x.to(tl.float32)[None, :]
    tl.store(out_ptr + row, tl.sum(acc, 1).to(out_ptr.dtype.element_ty), row < N)


def gemv(x: torch.Tensor, weight: torch.Tensor, out: torch.Tensor | None = None, config: GemvConfig = BEST) -> torch.Tensor:
    """x [1, K] @ weight [N, K].T -> [1, N]; contiguous, float32 accumulation. See reference.linear."""
    N, K = weight.shape
    out = torch.empty((1, N), dtype=x.dtype, device=x.device) if out is None else out
    even = K % config.depth == 0
    _gemv[(triton.cdiv(N, config.rows),)](weight, x, out, N, K, config.rows, config.depth, config.stages, even, num_warps=config.warps)
    return out
