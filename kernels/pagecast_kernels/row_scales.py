"""RMSNorm's factor of a row, for kernels that come after a product whose rows were not normed: they multiply by it in passing.

The norm's weight is folded into the product's, and the factor commutes with a product. Every program goes over its row of the residual
stream anew, so launches are cut such that few programs share a row.
"""

from dataclasses import dataclass

import triton
import triton.language as tl

from pagecast_kernels.configs import log2_ceil


@triton.jit
def row_scale(row_ptr, hidden, eps, BLOCK: tl.constexpr):
    """1 / sqrt(mean(x²) + eps) of a row of `hidden` values."""
    column = tl.arange(0, BLOCK)
    x = tl.load(row_ptr + column, column < hidden, 0.0).to(tl.float32)
    return tl.rsqrt(tl.sum(x * x, 0) / hidden + eps)


@dataclass(frozen=True)
class Launch:
    """From so many rows on: heads of a program of rope_and_write_kv, and columns of one of silu_mul, and values to a thread of each."""

    rows: int
    heads: int
    head_values: int
    columns: int
    column_values: int


LAUNCHES = (Launch(1, 16, 16, 2048, 8), Launch(256, 64, 32, 4096, 8), Launch(512, 64, 32, 8192, 16), Launch(2048, 64, 64, 8192, 32))
"""Rows are powers of two. Of few rows each is spread over many programs, as there are processors enough; of many it is read by few.
Fastest of eight launches of the one and nine of the other within a layer of the 8B shape at 16 to 16,384 rows, H200, 30 November 2026."""


def launch_for(rows: int) -> Launch:
    """The launch for so many rows."""
    return next(launch for launch in reversed(LAUNCHES) if rows >= launch.rows)


def columns_and_warps(rows: int, inner: int) -> tuple[int, int]:
    """Of a program of silu_mul, whose rows have `inner` columns."""
    launch = launch_for(rows)
    columns = min(launch.columns, 1 << log2_ceil(inner))
    return columns, min(max(columns // launch.column_values // 32, 1), 32)


def heads_and_warps(rows: int, heads: int, lanes: int) -> tuple[int, int]:
    """Of a program of rope_and_write_kv, whose rows have `heads` heads of `lanes` values, a power of two."""
    launch = launch_for(rows)
    together = min(launch.heads, 1 << log2_ceil(heads))
    return together, min(max(together * lanes // launch.head_values // 32, 1), 32)
