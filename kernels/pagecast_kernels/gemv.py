"""The product for one row: y[1, N] = x[1, K] @ weight[N, K].T, which is nothing but reading the weight once.

No tensor core and no shared tile: a program owns a few whole rows of the weight, so nothing is split and nothing is added up
afterwards. With a programmatic launch a program asks L2 for its rows while the kernel before it still runs.
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl


class GemvConfig(NamedTuple):
    """rows: weight rows of a program; depth: columns a step; stages: of the load pipeline; prefetch as in gemm.GemmConfig."""

    rows: int
    depth: int
    stages: int
    warps: int
    prefetch: int = -1


@triton.jit
def _gemv(
    weight_ptr, x_ptr, out_ptr, N, K,
    ROWS: tl.constexpr, DEPTH: tl.constexpr, STAGES: tl.constexpr, EVEN: tl.constexpr, PREFETCH: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    safe = tl.minimum(row, N - 1).to(tl.int64) * K
    if PREFETCH >= 0:
        tl.extra.cuda.gdc_launch_dependents()
        if PREFETCH > 0:
            tl.inline_asm_elementwise(
                f"cp.async.bulk.prefetch.L2.global [$1], {PREFETCH}; mov.u32 $0, 0;", "=r,l", [weight_ptr + safe],
                dtype=tl.int32, is_pure=False, pack=1,
            )  # fmt: skip
        tl.extra.cuda.gdc_wait()
    column = tl.arange(0, DEPTH)
    acc = tl.zeros([ROWS, DEPTH], tl.float32)
    for k in tl.range(0, K, DEPTH, num_stages=STAGES):
        if EVEN:
            w = tl.load(weight_ptr + safe[:, None] + (k + column)[None, :], eviction_policy="evict_first")
            x = tl.load(x_ptr + k + column)
        else:
            inside = k + column < K
            w = tl.load(weight_ptr + safe[:, None] + (k + column)[None, :], inside[None, :], 0.0, eviction_policy="evict_first")
            x = tl.load(x_ptr + k + column, inside, 0.0)
        acc += w.to(tl.float32) * x.to(tl.float32)[None, :]
    tl.store(out_ptr + row, tl.sum(acc, 1).to(out_ptr.dtype.element_ty), row < N)


def gemv_with(x: torch.Tensor, weight: torch.Tensor, config: GemvConfig, out: torch.Tensor | None = None) -> torch.Tensor:
    """x [1, K] @ weight [N, K].T -> [1, N] with the given launch; contiguous, K a multiple of 8, float32 accumulation."""
    N, K = weight.shape
    out = torch.empty((1, N), dtype=x.dtype, device=x.device) if out is None else out
    _gemv[(triton.cdiv(N, config.rows),)](
        weight, x, out, N, K, config.rows, config.depth, config.stages, K % config.depth == 0, min(config.prefetch, 2 * K),
        num_warps=config.warps, launch_pdl=config.prefetch >= 0,
    )  # fmt: skip
    return out
