"""Products of 8-bit activations and 8-bit weights, each row of both with a scale: e4m3 through float32, int8 through int32 sums.

Few rows are nothing but reading the weight and are computed transposed, the columns split over programs as in quantized_products.
Many rows of e4m3 go to the library's scaled product.
"""

import functools

import torch
import triton
import triton.language as tl
from torch import Tensor

from pagecast_kernels import configs
from pagecast_kernels.quantized_products import INTERPRETED, ProductConfig, SplitWorkspace, finish_split, split_workspace

LIBRARY_FROM = 65
"""Rows from which on e4m3 products go to the library."""


@triton.jit(do_not_specialize=["M"])
def _scaled_product(
    x_ptr, x_scale_ptr, weight_ptr, weight_scale_ptr, bias_ptr, out_ptr, parts_ptr, counter_ptr, M, N, K,
    FP8: tl.constexpr, BIAS: tl.constexpr, EVEN: tl.constexpr, WIDEN: tl.constexpr,
    ROWS: tl.constexpr, R: tl.constexpr, DEPTH: tl.constexpr, SPLITS: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    steps = tl.cdiv(K, DEPTH)
    share = (steps + SPLITS - 1) // SPLITS
    begin = tl.program_id(2) * share
    end = tl.minimum(begin + share, steps)
    row = tl.program_id(0) * R + tl.arange(0, R)
    m = tl.program_id(1) * ROWS + tl.arange(0, ROWS)
    k = tl.arange(0, DEPTH)
    w_at = weight_ptr + tl.minimum(row, N - 1).to(tl.int64)[:, None] * K + k[None, :]
    x_at = x_ptr + m.to(tl.int64)[:, None] * K + k[None, :]
    acc = tl.zeros([R, ROWS], tl.float32 if FP8 else tl.int32)
    for step in tl.range(begin, end, num_stages=STAGES):
        if EVEN:
            w = tl.load(w_at + step * DEPTH)
            x = tl.load(x_at + step * DEPTH, (m < M)[:, None], 0.0)
        else:
            inside = (step * DEPTH + k < K)[None, :]
            w = tl.load(w_at + step * DEPTH, inside, 0.0)
            x = tl.load(x_at + step * DEPTH, (m < M)[:, None] & inside, 0.0)
        if WIDEN:
            acc = tl.dot(w.to(tl.float16), x.trans().to(tl.float16), acc.to(tl.float32)).to(acc.dtype)
        elif FP8:
            # Tensor cores keep some 14 bits of a sum of e4m3 products; it is carried on in float32.
            acc = tl.dot(w, x.trans(), acc, max_num_imprecise_acc=DEPTH)
        else:
            acc = tl.dot(w, x.trans(), acc, out_dtype=tl.int32)
    scale = tl.load(weight_scale_ptr + row, row < N, 0.0)[:, None] * tl.load(x_scale_ptr + m, m < M, 0.0)[None, :]
    finish_split(acc.to(tl.float32) * scale, out_ptr, bias_ptr, parts_ptr, counter_ptr, row, m, N, M, SPLITS, BIAS, False)


def scaled_config(rows: int, columns: int, depth: int) -> ProductConfig:
    """Launch of the Triton product, as measured on an H200 over the products of an 8B step (benchmarks/NOTES.md)."""
    own = 16 if rows <= 16 else 32 if rows <= 32 else 64 if rows <= 64 else 128
    tiles = -(-columns // 64) * -(-rows // own)
    if tiles >= 256 or depth < 1024:
        return ProductConfig(own, 1, 1, 3)
    return ProductConfig(own, 1, 4 if own <= 16 else 2 if tiles <= 64 else 1, 5)


@functools.cache
def has_library(device: torch.device) -> bool:
    """Whether the device has e4m3 products of its own (compute capability 8.9 and later)."""
    return device.type == "cuda" and torch.cuda.get_device_capability(device) >= (8, 9)


def scaled_product(
    x: Tensor, x_scale: Tensor, weight: Tensor, weight_scale: Tensor, bias: Tensor | None = None, *, dtype: torch.dtype,
    workspace: SplitWorkspace | None = None, out: Tensor | None = None, config: ProductConfig | None = None,
) -> Tensor:  # fmt: skip
    """See reference_quantized.scaled_product. Everything is contiguous; config overrides the launch table, and the library."""
    (rows, depth), columns = x.shape, weight.shape[0]
    fp8 = weight.dtype == torch.float8_e4m3fn
    if fp8:
        configs.check_e4m3(x.device)
    fits = fp8 and dtype == torch.bfloat16 and depth % 16 == 0 and columns % 16 == 0
    if fits and config is None and rows >= LIBRARY_FROM and has_library(x.device):
        y = torch._scaled_mm(x, weight.t(), scale_a=x_scale[:, None], scale_b=weight_scale[None, :], out_dtype=dtype, use_fast_accum=True)
        y = y if bias is None else y.add_(bias)
        return y if out is None else out.copy_(y)
    out = torch.empty((rows, columns), dtype=dtype, device=x.device) if out is None else out
    if not rows:
        return out
    config = scaled_config(rows, columns, depth) if config is None else config
    own = 64 * config.tiles
    grid = (triton.cdiv(columns, own), triton.cdiv(rows, config.rows), config.splits)
    if config.splits > 1:
        workspace = split_workspace(x.device) if workspace is None else workspace
        workspace.check(grid, own * config.rows)
    parts, counters = (None, None) if workspace is None else (workspace.parts, workspace.counters)
    _scaled_product[grid](
        x, x_scale, weight, weight_scale, bias, out, parts, counters, rows, columns, depth,
        fp8, bias is not None, depth % 128 == 0, INTERPRETED, config.rows, own, 128, config.splits, config.stages,
        num_warps=8 if own * config.rows >= 16384 else config.warps,
    )  # fmt: skip
    return out
