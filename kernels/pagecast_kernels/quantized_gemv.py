"""The product for one row with a weight of 4 or 8 bits: y[1, N] = x[1, K] @ weight[N, K].T, as in gemv but for how weights are read.

Tensor cores want eight columns where one row of x gives one. So a program takes its few rows of the weight from several places of x at
a time: rows of the tile are rows of the weight at each of those slices, columns are the slices of x, and what is wanted lies where both
are of the same slice. So all of K falls to one program, nothing is split over programs and added up through memory, and what surrounds
the product of a decoder layer is done in passing. The norm's factor comes after the sum. e4m3 weights meet x rounded to e4m3 by the
largest value of each slice of 128.
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from pagecast_kernels import configs
from pagecast_kernels.quantized_products import INTERPRETED, columns_of
from pagecast_kernels.quantized_weights import PackedWeight, tile_columns
from pagecast_kernels.rotated import Heads, angles, arguments, place, rows_of


class OneRowConfig(NamedTuple):
    """rows: of the weight in a program, a power of two, of packed ones 16, 32 or 64; slices: of 128 columns a step, of 64 where packed
    values have 8 bits; stages: of the load pipeline; warps: of a program, of which four take tensor-core instructions together."""

    rows: int
    slices: int
    stages: int
    warps: int


class Launches(NamedTuple):
    """By shape of the weight: of 16,384 rows and more; else of 8,192 columns and more; else."""

    wide: OneRowConfig
    deep: OneRowConfig
    small: OneRowConfig

    def of(self, rows: int, columns: int) -> OneRowConfig:
        """For a weight [rows, columns]."""
        return self.wide if rows >= 16384 else self.deep if columns >= 8192 else self.small


PACKED = Launches(OneRowConfig(32, 8, 3, 4), OneRowConfig(16, 8, 4, 4), OneRowConfig(16, 8, 3, 4))
"""Of packed_gemv with 4 bits, measured on an H200, 30 November 2026."""
BYTES = Launches(OneRowConfig(32, 8, 3, 4), OneRowConfig(16, 8, 4, 4), OneRowConfig(16, 8, 3, 4))
"""Of packed_gemv with 8 bits: a step takes as many bytes."""
SCALED = Launches(OneRowConfig(16, 8, 3, 4), OneRowConfig(16, 8, 4, 4), OneRowConfig(16, 8, 3, 4))
"""Of scaled_gemv, likewise."""


@triton.jit
def _factor(x_ptr, K, eps, WIDTH: tl.constexpr):
    """What RMSNorm multiplies x [K] with."""
    squares = tl.zeros([WIDTH], tl.float32)
    for k in range(0, K, WIDTH):
        column = k + tl.arange(0, WIDTH)
        x = tl.load(x_ptr + column, column < K, 0.0).to(tl.float32)
        squares += x * x
    return tl.rsqrt(tl.sum(squares, 0) / K + eps)


@triton.jit
def _slices(ptr, at, K, SLICES: tl.constexpr, COLUMNS: tl.constexpr, EVEN: tl.constexpr, WIDTH: tl.constexpr = 128):
    """Slices of x or gamma from the at-th on, [COLUMNS, WIDTH], of which SLICES are any."""
    slice = tl.arange(0, COLUMNS)
    k = (at + slice)[:, None] * WIDTH + tl.arange(0, WIDTH)[None, :]
    if EVEN and COLUMNS == SLICES:
        return tl.load(ptr + k)
    else:
        return tl.load(ptr + k, (k < K) & (slice < SLICES)[:, None], 0.0)


@triton.jit
def _squares(x_ptr, at, K, SLICES: tl.constexpr, EVEN: tl.constexpr, WIDTH: tl.constexpr = 128):
    """Squares of these slices, in the threads one after the other: the product wants x in every warp."""
    k = at * WIDTH + tl.arange(0, SLICES * WIDTH)
    if EVEN:
        x = tl.load(x_ptr + k).to(tl.float32)
    else:
        x = tl.load(x_ptr + k, k < K, 0.0).to(tl.float32)
    return x * x


@triton.jit
def _own(acc, SLICES: tl.constexpr):
    """Sums [rows] of acc [SLICES · rows, columns] where a row's slice is the column's."""
    ROWS: tl.constexpr = acc.shape[0] // SLICES
    slice = tl.arange(0, acc.shape[0]) // ROWS
    own = tl.where(slice[:, None] == tl.arange(0, acc.shape[1])[None, :], acc, 0.0)
    return tl.sum(tl.sum(own, 1).reshape(SLICES, ROWS), 0)


@triton.jit
def _finish(
    y, out_ptr, bias_ptr, first, N, TOGETHER: tl.constexpr, GATED: tl.constexpr, ADD: tl.constexpr, BIAS: tl.constexpr
):
    """out = y (+ bias) (+ out) from `first` on, or silu(gate) · up of y, where TOGETHER gates and as many ups come in turn."""
    if GATED:
        HALF: tl.constexpr = y.shape[0] // 2
        gate, up = tl.split(y.reshape(HALF // TOGETHER, 2, TOGETHER).permute(0, 2, 1))
        y = (gate / (1.0 + tl.exp(-gate)) * up).reshape(HALF)
    place = first + tl.arange(0, y.shape[0])
    if BIAS:
        y += tl.load(bias_ptr + place, place < N, 0.0).to(tl.float32)
    if ADD:
        y += tl.load(out_ptr + place, place < N, 0.0).to(tl.float32)
    tl.store(out_ptr + place, y.to(out_ptr.dtype.element_ty), place < N)


@triton.jit
def _packed_gemv(
    words_ptr, scales_ptr, zeros_ptr, x_ptr, gamma_ptr, bias_ptr, out_ptr, N, K, scale_stride, column_tiles, eps, heads,
    ROWS: tl.constexpr, SLICES: tl.constexpr, STAGES: tl.constexpr, EVEN: tl.constexpr, GROUP: tl.constexpr,
    ZEROS: tl.constexpr, NORM: tl.constexpr, GATED: tl.constexpr, ADD: tl.constexpr, BIAS: tl.constexpr, ASM: tl.constexpr,
    HEADS: tl.constexpr, BITS: tl.constexpr,
):  # fmt: skip
    # A tile of the weight: the first eight rows of each 16, 64 bytes each, then the others. Threads read 16 bytes of a row at a time.
    R: tl.constexpr = SLICES * ROWS
    COLUMNS: tl.constexpr = SLICES if SLICES > 8 else 8
    dtype: tl.constexpr = x_ptr.dtype.element_ty
    WIDTH: tl.constexpr = 512 // BITS
    offset: tl.constexpr = 128.0 if dtype == tl.bfloat16 and BITS == 4 else 1024.0
    biased: tl.constexpr = dtype if BITS == 4 else tl.float16
    program = tl.program_id(0)
    slice, half, word = tl.arange(0, SLICES), tl.arange(0, 2), tl.arange(0, ROWS * 8)
    of_row = tl.arange(0, R)
    row_slice = of_row // ROWS
    if HEADS is None:
        start = words_ptr + (program * ROWS // 64).to(tl.int64) * column_tiles * 1024 + program * ROWS % 64 * 8
        apart = 512
        row = program * ROWS + of_row % ROWS
    else:  # eight rows of a head's first tile, and of its second
        start = words_ptr + (program // 8).to(tl.int64) * 2 * column_tiles * 1024 + program % 2 * 512 + program % 8 // 2 * 128
        apart = column_tiles * 1024
        row = rows_of(program, of_row % ROWS, 8, HEADS)
        cos, sin, slot = angles(heads, program, 8, HEADS)
    first = start + slice[:, None, None] * 1024 + half[None, :, None] * apart + word[None, None, :]
    factor = 1.0
    if NORM and dtype == tl.float16:
        factor = _factor(x_ptr, K, eps, SLICES * WIDTH)  # Without it x times gamma may not fit.
    acc = tl.zeros([R, COLUMNS], tl.float32)
    squares = tl.zeros([SLICES * WIDTH], tl.float32)
    zero = tl.full([R, 16], offset + (8.0 if BITS == 4 else 128.0), tl.float32).to(biased)
    if ZEROS and not GROUP:
        zero = tl.broadcast_to((tl.load(zeros_ptr + row) + offset).to(biased)[:, None], (R, 16))
    for at in tl.range(0, column_tiles, SLICES, num_stages=STAGES):
        inside = at + slice < column_tiles
        if EVEN:
            p = tl.load(first + at * 1024, eviction_policy="evict_first")
        else:
            p = tl.load(first + at * 1024, inside[:, None, None], 0, eviction_policy="evict_first")
        p = p.reshape(SLICES, 2, ROWS // 16, 8, 16).permute(0, 2, 1, 3, 4).reshape(R, 16)
        x = _slices(x_ptr, at, K, SLICES, COLUMNS, EVEN, WIDTH)
        if NORM:
            gamma = _slices(gamma_ptr, at, K, SLICES, COLUMNS, EVEN, WIDTH)
            if dtype == tl.float16:
                x = (x.to(tl.float32) * factor * gamma.to(tl.float32)).to(dtype)
            else:
                x *= gamma
                squares += _squares(x_ptr, at, K, SLICES, EVEN, WIDTH)
        # Of sixteen columns each thread holds four that lie side by side in memory; x is put into that order.
        x = x.reshape(COLUMNS, WIDTH // 16, 2, 4, 2).permute(0, 1, 3, 2, 4).reshape(COLUMNS, WIDTH)
        here = at + row_slice
        if ZEROS and GROUP:
            z = tl.load(zeros_ptr + here // (GROUP // WIDTH) * scale_stride + row, here < column_tiles, 8.0)
            zero = tl.broadcast_to((z + offset).to(biased)[:, None], (R, 16))
        w = columns_of(p, zero, 0, WIDTH, BITS, False, dtype == tl.bfloat16, ASM, ZEROS)
        if GROUP:
            scale = tl.load(scales_ptr + here // (GROUP // WIDTH) * scale_stride + row, here < column_tiles, 0.0)
            acc += tl.dot(w, x.trans()) * scale[:, None]
        else:
            acc = tl.dot(w, x.trans(), acc)
    y = _own(acc, SLICES)
    unit = tl.arange(0, ROWS)
    own = program * ROWS + unit if HEADS is None else rows_of(program, unit, 8, HEADS)
    if not GROUP:
        y *= tl.load(scales_ptr + own)
    if NORM and dtype == tl.bfloat16:
        y *= tl.rsqrt(tl.sum(squares, 0) / K + eps)
    if HEADS is None:
        width: tl.constexpr = ROWS // 2 if GATED else ROWS
        _finish(y, out_ptr, bias_ptr, program * width, N, 8, GATED, ADD, BIAS)
    else:
        if BIAS:
            y += tl.load(bias_ptr + own).to(tl.float32)
        place(y, cos, sin, slot, heads, out_ptr, program, 8, HEADS)


def knows_packed(weight: PackedWeight) -> bool:
    """Whether packed_gemv can take this kind of weight: integers, with a scale for 128 columns or a whole row."""
    return weight.kind in ("int4", "int8") and weight.group in (0, 128)


def packed_gemv(
    x: Tensor, weight: PackedWeight, *, gamma: Tensor | None = None, eps: float = 0.0, bias: Tensor | None = None,
    residual: Tensor | None = None, out: Tensor | None = None, config: OneRowConfig | None = None, heads: Heads | None = None,
) -> Tensor:  # fmt: skip
    """x [1, K], by RMSNorm with gamma [K] where there is one, times weight [N, K].T, plus bias [N] -> [1, N], or added to residual
    in place; SiLU·mul of it [1, N / 2] where the weight's rows are paired; with heads, of 128, rope_and_write_kv of it -> q [1, Hq, 128].
    See reference_quantized.packed_product."""
    if not knows_packed(weight):
        raise ValueError(f"the weight must be int4 or int8 in groups of 128 or whole rows, got {weight.kind} in groups of {weight.group}")
    table = PACKED if weight.kind == "int4" else BYTES
    config = table.of(weight.rows if heads is None else 0, weight.columns) if config is None else config
    width = weight.rows // 2 if weight.paired else weight.rows
    tensors, shape = arguments(heads)
    results = (1, width) if shape is None else (1, shape[0], 2 * shape[3])
    if residual is not None or out is None:
        out = torch.empty(results, dtype=x.dtype, device=x.device) if residual is None else residual
    column_tiles, depth = weight.words.shape[1], x.shape[1]
    _packed_gemv[(triton.cdiv(weight.rows, config.rows),)](
        weight.words, weight.scales, weight.zeros, x, gamma, bias, out, width, depth, weight.scales.stride(0), column_tiles, eps, tensors,
        config.rows, config.slices, config.stages, depth % (tile_columns(weight.kind) * config.slices) == 0, weight.group,
        weight.zeros is not None, gamma is not None, weight.paired, residual is not None, bias is not None, not INTERPRETED, shape,
        4 if weight.kind == "int4" else 8, num_warps=config.warps,
    )  # fmt: skip
    return out


@triton.jit
def _scaled_gemv(
    weight_ptr, scale_ptr, x_ptr, gamma_ptr, bias_ptr, out_ptr, N, K, eps, heads,
    ROWS: tl.constexpr, SLICES: tl.constexpr, STAGES: tl.constexpr, EVEN: tl.constexpr,
    NORM: tl.constexpr, GATED: tl.constexpr, ADD: tl.constexpr, BIAS: tl.constexpr, WIDEN: tl.constexpr,
    HEADS: tl.constexpr,
):  # fmt: skip
    R: tl.constexpr = SLICES * ROWS
    COLUMNS: tl.constexpr = SLICES if SLICES > 8 else 8
    OUTPUTS: tl.constexpr = ROWS // 2 if GATED else ROWS
    begin = tl.program_id(0) * OUTPUTS
    unit, of_row = tl.arange(0, ROWS), tl.arange(0, R)
    if HEADS is None:
        row = tl.minimum(begin + of_row % ROWS % OUTPUTS, N - 1) + of_row % ROWS // OUTPUTS * N
    else:
        row = rows_of(tl.program_id(0), of_row % ROWS, ROWS // 2, HEADS)
        cos, sin, slot = angles(heads, tl.program_id(0), ROWS // 2, HEADS)
    first = weight_ptr + row.to(tl.int64)[:, None] * K
    column = (of_row // ROWS * 128)[:, None] + tl.arange(0, 128)[None, :]
    acc = tl.zeros([R, COLUMNS], tl.float32)
    squares = tl.zeros([SLICES * 128], tl.float32)
    for at in tl.range(0, tl.cdiv(K, 128), SLICES, num_stages=STAGES):
        k = at * 128 + column
        if EVEN:
            w = tl.load(first + k, eviction_policy="evict_first")
        else:
            w = tl.load(first + k, k < K, 0.0, eviction_policy="evict_first")
        x = _slices(x_ptr, at, K, SLICES, COLUMNS, EVEN).to(tl.float32)
        if NORM:
            x *= _slices(gamma_ptr, at, K, SLICES, COLUMNS, EVEN).to(tl.float32)
            squares += _squares(x_ptr, at, K, SLICES, EVEN)
        most = tl.maximum(tl.max(tl.abs(x), 1), 1e-20)
        x = tl.minimum(tl.maximum(x * (448.0 / most)[:, None], -448.0), 448.0).to(tl.float8e4nv)
        if WIDEN:
            part = tl.dot(w.to(tl.float16), x.to(tl.float16).trans())
        else:
            part = tl.dot(w, x.trans())
        acc += part * (most / 448.0)[None, :]
    if HEADS is None:
        own = tl.minimum(begin + unit % OUTPUTS, N - 1) + unit // OUTPUTS * N
    else:
        own = rows_of(tl.program_id(0), unit, ROWS // 2, HEADS)
    y = _own(acc, SLICES) * tl.load(scale_ptr + own)
    if NORM:
        y *= tl.rsqrt(tl.sum(squares, 0) / K + eps)
    if HEADS is None:
        _finish(y, out_ptr, bias_ptr, begin, N, OUTPUTS, GATED, ADD, BIAS)
    else:
        if BIAS:
            y += tl.load(bias_ptr + own).to(tl.float32)
        place(y, cos, sin, slot, heads, out_ptr, tl.program_id(0), ROWS // 2, HEADS)


def scaled_gemv(
    x: Tensor, weight: Tensor, scales: Tensor, *, gamma: Tensor | None = None, eps: float = 0.0, bias: Tensor | None = None,
    gated: bool = False, residual: Tensor | None = None, config: OneRowConfig | None = None, heads: Heads | None = None,
) -> Tensor:  # fmt: skip
    """The same for float8_e4m3fn weight [N, K] with scales float32 [N]. gated: rows are gates, then ups. Heads' sizes are multiples of
    a program's rows."""
    configs.check_e4m3(x.device)
    width, depth = weight.shape[0] // 2 if gated else weight.shape[0], weight.shape[1]
    config = SCALED.of(weight.shape[0] if heads is None else 0, weight.shape[1]) if config is None else config
    tensors, shape = arguments(heads)
    results = (1, width) if shape is None else (1, shape[0], 2 * shape[3])
    out = torch.empty(results, dtype=x.dtype, device=x.device) if residual is None else residual
    _scaled_gemv[(triton.cdiv(weight.shape[0], config.rows),)](
        weight, scales, x, gamma, bias, out, width, depth, eps, tensors,
        config.rows, config.slices, config.stages, depth % (128 * config.slices) == 0,
        gamma is not None, gated, residual is not None, bias is not None, INTERPRETED, shape,
        num_warps=config.warps,
    )  # fmt: skip
    return out
