"""The product for one row with a weight of 4 or 8 bits: y[1, N] = x[1, K] @ weight[N, K].T, as in gemv but for how weights are read.

No tensor core and no split: a program owns a few rows of the weight, and what surrounds the product of a decoder layer is done in
passing. Values of 4 bits become floats without a conversion: as low bits of a bfloat16 of 128 they are 128 + v, and two such side by
side are, read as one float32, the upper one and 2^-16 of the lower, which is taken from the lower one's x. What they are biased by
comes off with the sum of x. e4m3 weights meet x rounded to e4m3, by the largest value of its row, in every program anew.
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from pagecast_kernels import configs
from pagecast_kernels.quantized_weights import PackedWeight


class PackedGemvConfig(NamedTuple):
    """rows: of the weight in a program; tiles: tiles of 128 columns a step; stages: of the load pipeline; warps: of a program."""

    rows: int
    tiles: int
    stages: int
    warps: int


class ScaledGemvConfig(NamedTuple):
    """rows: of the weight in a program; depth: columns a step; stages: of the load pipeline; warps: of a program."""

    rows: int
    depth: int
    stages: int
    warps: int


PACKED = PackedGemvConfig(8, 8, 3, 2)
SCALED = ScaledGemvConfig(8, 2048, 3, 4)
_ABOVE = tl.constexpr(128.259765625)
"""What a value in the upper half reads as too much: 128, and 0x4300 · 2^-16 of the lower half less 128 · 2^-16 taken from its x."""


@triton.jit
def _sixteenth(x_ptr, gamma_ptr, column, K, EVEN: tl.constexpr, NORM: tl.constexpr):
    """x at `column`, its square if it is to be normed, and what meets the weight."""
    if EVEN:
        x = tl.load(x_ptr + column).to(tl.float32)
    else:
        x = tl.load(x_ptr + column, column < K, 0.0).to(tl.float32)
    square = x * x
    if NORM:
        if EVEN:
            x *= tl.load(gamma_ptr + column).to(tl.float32)
        else:
            x *= tl.load(gamma_ptr + column, column < K, 0.0).to(tl.float32)
    return x, square


@triton.jit
def _times(p, j: tl.constexpr, upper, lower):
    """Values j and j + 4 of words times their x, biased."""
    two = (p >> (4 * j)) & 0x000F000F | 0x43004300
    return two.to(tl.float32, bitcast=True) * upper + (two << 16).to(tl.float32, bitcast=True) * lower


@triton.jit
def _group_sums(part, above, below, scales_ptr, zeros_ptr, at, inside, ZEROS: tl.constexpr):
    """[R, PAIRS]: sums of two words' values less their zeros, scaled."""
    if ZEROS:
        zero = tl.load(zeros_ptr + at, inside, 0.0)
        total = tl.sum(part - _ABOVE * above - 128.0 * below, 2) - zero * tl.sum(above + below, 2)
    else:
        total = tl.sum(part - (_ABOVE + 8.0) * above - 136.0 * below, 2)
    return total * tl.load(scales_ptr + at, inside, 0.0)


@triton.jit
def _finish(y, up, out_ptr, bias_ptr, row, place, N, GATED: tl.constexpr, ADD: tl.constexpr, BIAS: tl.constexpr):
    """out[place] = y (+ bias[row]) (+ out[place]), or silu(y) · up."""
    if GATED:
        y = y / (1.0 + tl.exp(-y)) * up
    if BIAS:
        y += tl.load(bias_ptr + row, place < N, 0.0).to(tl.float32)
    if ADD:
        y += tl.load(out_ptr + place, place < N, 0.0).to(tl.float32)
    tl.store(out_ptr + place, y.to(out_ptr.dtype.element_ty), place < N)


@triton.jit(do_not_specialize=["row_stride"])
def _packed_gemv(
    words_ptr, scales_ptr, zeros_ptr, x_ptr, gamma_ptr, bias_ptr, out_ptr, N, K, group_stride, row_stride, column_tiles, eps,
    ROWS: tl.constexpr, TILES: tl.constexpr, STAGES: tl.constexpr, EVEN: tl.constexpr, ZEROS: tl.constexpr,
    NORM: tl.constexpr, GATED: tl.constexpr, ADD: tl.constexpr, BIAS: tl.constexpr,
):  # fmt: skip
    # A tile of the weight holds a row after the other, 64 bytes each: those of lower halves of 16, then those of upper halves.
    IN_TILE: tl.constexpr = 32 if GATED else 64
    PAIRS: tl.constexpr = 8 * TILES
    number = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    tile, within = number // IN_TILE, number % IN_TILE
    row = tile * 64 + within % 32 // 8 * 16 + within // 32 * 8 + within % 8
    place = number if GATED else row
    pair, one = tl.arange(0, PAIRS), tl.arange(0, 2)
    beside = pair // 8
    first = words_ptr + (tile.to(tl.int64) * column_tiles * 1024 + within * 16)[:, None, None] + one[None, None, :]
    first += (beside * 1024 + pair % 8 * 2)[None, :, None]
    column = (beside * 128 + pair % 2 * 8 + pair % 8 // 2 * 2)[None, :, None] + one[None, None, :]
    # Strides that are not known to be 1: scales are to lie in threads as the sums do.
    scale_at = (row * row_stride)[:, None] + (beside * group_stride)[None, :]
    acc, other = tl.zeros([ROWS, PAIRS], tl.float32), tl.zeros([ROWS, PAIRS], tl.float32)
    squares = tl.zeros([1, PAIRS, 2], tl.float32)
    for at in tl.range(0, column_tiles, TILES, num_stages=STAGES):
        inside = (at + beside < column_tiles)[None, :]
        if EVEN:
            p = tl.load(first + at * 1024, eviction_policy="evict_first")
        else:
            p = tl.load(first + at * 1024, inside[:, :, None], 0, eviction_policy="evict_first")
        q = p
        if GATED:
            if EVEN:
                q = tl.load(first + (at * 1024 + 512), eviction_policy="evict_first")
            else:
                q = tl.load(first + (at * 1024 + 512), inside[:, :, None], 0, eviction_policy="evict_first")
        part, part_up = tl.zeros([ROWS, PAIRS, 2], tl.float32), tl.zeros([ROWS, PAIRS, 2], tl.float32)
        above, below = tl.zeros([1, PAIRS, 2], tl.float32), tl.zeros([1, PAIRS, 2], tl.float32)
        for j in tl.static_range(4):
            lower, lower_square = _sixteenth(x_ptr, gamma_ptr, at * 128 + 16 * j + column, K, EVEN, NORM)
            upper, upper_square = _sixteenth(x_ptr, gamma_ptr, at * 128 + 16 * (j + 4) + column, K, EVEN, NORM)
            if NORM:
                squares += lower_square + upper_square
            above += upper
            below += lower
            lower -= upper * 0.0000152587890625
            part += _times(p, j, upper, lower)
            if GATED:
                part_up += _times(q, j, upper, lower)
        scaled = scale_at + at * group_stride
        acc += _group_sums(part, above, below, scales_ptr, zeros_ptr, scaled, inside, ZEROS)
        if GATED:
            other += _group_sums(part_up, above, below, scales_ptr, zeros_ptr, scaled + 8 * row_stride, inside, ZEROS)
    y, up = tl.sum(acc, 1), tl.sum(other, 1)
    if NORM:
        # The norm's factor is the same for every column: it may come after the sum.
        factor = tl.rsqrt(tl.sum(tl.sum(squares, 2)) / K + eps)
        y *= factor
        up *= factor
    _finish(y, up, out_ptr, bias_ptr, row, place, N, GATED, ADD, BIAS)


def takes_packed(weight: PackedWeight) -> bool:
    """Whether packed_gemv knows this kind of weight: 4 bits, a scale for 128 columns or a whole row."""
    return weight.kind == "int4" and weight.group in (0, 128)


def packed_gemv(
    x: Tensor, weight: PackedWeight, *, gamma: Tensor | None = None, eps: float = 0.0, bias: Tensor | None = None,
    residual: Tensor | None = None, config: PackedGemvConfig = PACKED,
) -> Tensor:  # fmt: skip
    """x [1, K], by RMSNorm with gamma [K] where there is one, times weight [N, K].T, plus bias [N] -> [1, N], or added to residual
    in place; SiLU·mul of it [1, N / 2] where the weight's rows are paired. See reference_quantized.packed_product."""
    if not takes_packed(weight):
        raise ValueError(f"the weight must be int4 in groups of 128 or whole rows, got {weight.kind} in groups of {weight.group}")
    width = weight.rows // 2 if weight.paired else weight.rows
    out = torch.empty((1, width), dtype=x.dtype, device=x.device) if residual is None else residual
    column_tiles = weight.words.shape[1]
    rows = config.rows // 2 if weight.paired else config.rows  # as many weights a step either way
    _packed_gemv[(triton.cdiv(width, rows) if weight.paired else weight.words.shape[0] * (64 // rows),)](
        weight.words, weight.scales, weight.zeros, x, gamma, bias, out, width, x.shape[1], weight.scales.stride(0) if weight.group else 0,
        weight.scales.stride(1), column_tiles, eps, rows, config.tiles, config.stages, x.shape[1] % (128 * config.tiles) == 0,
        weight.zeros is not None, gamma is not None, weight.paired, residual is not None, bias is not None, num_warps=config.warps,
    )  # fmt: skip
    return out


@triton.jit
def _normed(x_ptr, gamma_ptr, column, K, factor, EVEN: tl.constexpr, NORM: tl.constexpr):
    """x at `column`, times gamma and `factor` where it is normed, as the model's type would hold it."""
    if EVEN:
        raw = tl.load(x_ptr + column)
    else:
        raw = tl.load(x_ptr + column, column < K, 0.0)
    x = raw.to(tl.float32)
    if NORM:
        x = x * factor * tl.load(gamma_ptr + column, column < K, 0.0).to(tl.float32)
    return x.to(raw.dtype).to(tl.float32)


@triton.jit
def _weights(weight_ptr, start, column, K, EVEN: tl.constexpr):
    """A tile of rows that begin at `start`."""
    if EVEN:
        return tl.load(weight_ptr + start[:, None] + column[None, :], eviction_policy="evict_first").to(tl.float32)
    else:
        inside = (column < K)[None, :]
        return tl.load(weight_ptr + start[:, None] + column[None, :], inside, 0.0, eviction_policy="evict_first").to(tl.float32)


@triton.jit
def _sixteens(product):
    """Sums of sixteen columns: what a thread reads at a time."""
    return tl.sum(product.reshape(product.shape[0], product.shape[1] // 16, 16), 2)


@triton.jit
def _scaled_gemv(
    weight_ptr, scale_ptr, x_ptr, gamma_ptr, bias_ptr, out_ptr, N, K, eps,
    ROWS: tl.constexpr, DEPTH: tl.constexpr, STAGES: tl.constexpr, EVEN: tl.constexpr,
    NORM: tl.constexpr, GATED: tl.constexpr, ADD: tl.constexpr, BIAS: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    kept = tl.minimum(row, N - 1)
    start = kept.to(tl.int64) * K
    offset = tl.arange(0, DEPTH)
    squares, largest = tl.zeros([DEPTH], tl.float32), tl.zeros([DEPTH], tl.float32)
    for k in tl.range(0, K, DEPTH, num_stages=1):
        x = tl.load(x_ptr + k + offset, k + offset < K, 0.0).to(tl.float32)
        if NORM:
            squares += x * x
            x *= tl.load(gamma_ptr + k + offset, k + offset < K, 0.0).to(tl.float32)
        largest = tl.maximum(largest, tl.abs(x))
    most, factor = tl.max(largest, 0), 1.0
    if NORM:
        factor = tl.rsqrt(tl.sum(squares, 0) / K + eps)
        most *= factor
    x_scale = tl.maximum(most.to(x_ptr.dtype.element_ty).to(tl.float32) / 448.0, 1e-10)
    acc, other = tl.zeros([ROWS, DEPTH // 16], tl.float32), tl.zeros([ROWS, DEPTH // 16], tl.float32)
    for k in tl.range(0, K, DEPTH, num_stages=STAGES):
        column = k + offset
        x = _normed(x_ptr, gamma_ptr, column, K, factor, EVEN, NORM) / x_scale
        x = tl.minimum(tl.maximum(x, -448.0), 448.0).to(tl.float8e4nv).to(tl.float32)
        acc += _sixteens(_weights(weight_ptr, start, column, K, EVEN) * x[None, :])
        if GATED:
            other += _sixteens(_weights(weight_ptr, start + N.to(tl.int64) * K, column, K, EVEN) * x[None, :])
    y, up = tl.sum(acc, 1) * (tl.load(scale_ptr + kept) * x_scale), 0.0
    if GATED:
        up = tl.sum(other, 1) * (tl.load(scale_ptr + N + kept) * x_scale)
    _finish(y, up, out_ptr, bias_ptr, row, row, N, GATED, ADD, BIAS)


def scaled_gemv(
    x: Tensor, weight: Tensor, scales: Tensor, *, gamma: Tensor | None = None, eps: float = 0.0, bias: Tensor | None = None,
    gated: bool = False, residual: Tensor | None = None, config: ScaledGemvConfig = SCALED,
) -> Tensor:  # fmt: skip
    """The same for float8_e4m3fn weight [N, K] with scales float32 [N], x rounded as by quantize_rows. gated: rows are gates, then ups."""
    configs.check_e4m3(x.device)
    width, depth = weight.shape[0] // 2 if gated else weight.shape[0], weight.shape[1]
    out = torch.empty((1, width), dtype=x.dtype, device=x.device) if residual is None else residual
    rows = config.rows // 2 if gated else config.rows
    _scaled_gemv[(triton.cdiv(width, rows),)](
        weight, scales, x, gamma, bias, out, width, depth, eps, rows, config.depth, config.stages, depth % config.depth == 0,
        gamma is not None, gated, residual is not None, bias is not None, num_warps=config.warps,
    )  # fmt: skip
    return out
