"""Products with weights of 4 or 8 bits and activations of 16: nothing but reading the weight, as long as rows are few.

The weight is the operand that a warp group holds in registers: words come in whole tiles, are turned into 16-bit numbers there by
masks and exact subtractions, and meet x from shared memory, so y is computed transposed. Scales are applied in float32 to each
group's sum. The columns are split over SPLITS programs where rows of the weight are too few to fill the chip; each leaves its
part in the workspace and the last to arrive adds them in order, so the result does not depend on who was last.
"""

from dataclasses import dataclass
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.target_info import cuda_capability_geq

from pagecast_kernels import configs
from pagecast_kernels.quantized_weights import DEFAULT_ZEROS, TILE_ROWS, PackedWeight, tile_columns
from pagecast_kernels.shares import arrives_last

INTERPRETED = triton.knobs.runtime.interpret
_UNPACK_4 = """{{
.reg .b32 a, b, t;
prmt.b32 a, $8, $9, 0x5410;
prmt.b32 b, $8, $9, 0x7632;
{}
}}"""


def _nibbles() -> str:
    """Value j of two neighbouring words, as the low bits of two bfloat16 of 128, less what they are biased by."""
    lines = []
    for j in range(8):
        half = "ab"[j // 4]
        lines.append(f"lop3.b32 t, {half}, 0x000f000f, 0x43004300, 0xea;\nsub.rn.bf16x2 ${j}, t, $10;")
        if j % 4 != 3:
            lines.append(f"shr.u32 {half}, {half}, 4;")
    return _UNPACK_4.format("\n".join(lines))


def _halves() -> str:
    """The same as float16 of 1,024."""
    return _nibbles().replace("0x43004300", "0x64006400").replace("sub.rn.bf16x2", "sub.rn.f16x2")


def _bytes(fp8: bool, bf16: bool) -> str:
    """Byte j of two neighbouring words as two 16-bit numbers."""
    lines = ["{", ".reg .b32 t;", ".reg .b16 l, h;", ".reg .f32 f, g;"]
    for j in range(4):
        if fp8:
            lines += [f"prmt.b32 t, $4, $5, 0x00{4 + j}{j};", "mov.b32 {l, h}, t;", "cvt.rn.f16x2.e4m3x2 t, l;"]
        else:
            lines += [f"prmt.b32 t, $4, $5, 0x0{4 + j}0{j};", "lop3.b32 t, t, 0x00ff00ff, 0x64006400, 0xea;", "sub.rn.f16x2 t, t, $6;"]
        if bf16:
            lines += ["mov.b32 {l, h}, t;", "cvt.f32.f16 f, l;", "cvt.f32.f16 g, h;", f"cvt.rn.bf16x2.f32 ${j}, g, f;"]
        else:
            lines.append(f"mov.b32 ${j}, t;")
    return "\n".join([*lines, "}"])


def _signed() -> str:
    """Byte j of two neighbouring words, biased by 128, as two bfloat16: its lower seven bits with 128, less 128 or 256 by its highest."""
    lines = ["{", ".reg .b32 t, low, less;"]
    for j in range(4):
        lines += [
            f"prmt.b32 t, $4, $5, 0x0{4 + j}0{j};", "lop3.b32 low, t, 0x007f007f, 0x43004300, 0xea;",
            "lop3.b32 less, t, 0x00800080, 0x43804380, 0x6a;", f"sub.rn.bf16x2 ${j}, low, less;",
        ]  # fmt: skip
    return "\n".join([*lines, "}"])


def _nibbles_before_hopper() -> str:
    """The same where bfloat16 cannot be subtracted: t · 1 + -bias, rounded once like t - bias."""
    constants = ".reg .b32 one, less;\nmov.b32 one, 0x3f803f80;\nxor.b32 less, $10, 0x80008000;\n"
    text = _nibbles().replace(".reg .b32 a, b, t;\n", ".reg .b32 a, b, t;\n" + constants)
    return text.replace("sub.rn.bf16x2", "fma.rn.bf16x2").replace("t, $10;", "t, one, less;")


_ASM_4_BF16, _ASM_4_F16 = tl.constexpr(_nibbles()), tl.constexpr(_halves())
_ASM_4_BF16_BEFORE_HOPPER = tl.constexpr(_nibbles_before_hopper())
_ASM_INT8_BF16, _ASM_INT8_F16 = tl.constexpr(_bytes(False, True)), tl.constexpr(_bytes(False, False))
_ASM_SIGNED_BF16 = tl.constexpr(_signed())
_ASM_FP8_BF16, _ASM_FP8_F16 = tl.constexpr(_bytes(True, True)), tl.constexpr(_bytes(True, False))


class ProductConfig(NamedTuple):
    """rows: of x in a program; tiles: weight tiles of 64 rows in a program; splits: programs that share a row of the weight.

    warps: fewer than four take tensor-core instructions of one warp, which lose less where rows are few.
    """

    rows: int
    tiles: int
    splits: int
    stages: int
    warps: int = 4


@dataclass(frozen=True)
class SplitWorkspace:
    """Device memory of one launch at a time. counters int32, zero between launches; parts float32."""

    counters: Tensor
    parts: Tensor

    def check(self, grid: tuple[int, int, int], size: int) -> None:
        """Raises ValueError where a launch of programs with `size` sums each needs more."""
        outputs = grid[0] * grid[1]
        if outputs > self.counters.numel() or outputs * grid[2] * size > self.parts.numel():
            held = f"{self.counters.numel()} counters and {self.parts.numel()} sums"
            raise ValueError(f"the workspace holds {held}, too few for {grid} programs of {size}")


def split_workspace(device: torch.device | str) -> SplitWorkspace:
    """Enough for every launch of the launch table."""
    return SplitWorkspace(torch.zeros(16384, dtype=torch.int32, device=device), torch.empty(1 << 23, dtype=torch.float32, device=device))


@triton.jit
def _nibble_columns(p, zero, BF16: tl.constexpr, ASM: tl.constexpr):
    """Eight times [R, 16]: value j of each word less its zero, exact."""
    if not ASM:
        dtype: tl.constexpr = tl.bfloat16 if BF16 else tl.float16
        bias: tl.constexpr = 128.0 if BF16 else 1024.0
        z = zero.to(tl.float32) - bias
        return (
            ((p & 15).to(tl.float32) - z).to(dtype), ((p >> 4 & 15).to(tl.float32) - z).to(dtype),
            ((p >> 8 & 15).to(tl.float32) - z).to(dtype), ((p >> 12 & 15).to(tl.float32) - z).to(dtype),
            ((p >> 16 & 15).to(tl.float32) - z).to(dtype), ((p >> 20 & 15).to(tl.float32) - z).to(dtype),
            ((p >> 24 & 15).to(tl.float32) - z).to(dtype), ((p >> 28 & 15).to(tl.float32) - z).to(dtype),
        )  # fmt: skip
    elif BF16 and not cuda_capability_geq(9, 0):
        return tl.inline_asm_elementwise(
            _ASM_4_BF16_BEFORE_HOPPER, "=r,=r,=r,=r,=r,=r,=r,=r,r,r,r", [p, zero], (tl.bfloat16,) * 8, is_pure=True, pack=2
        )
    elif BF16:
        return tl.inline_asm_elementwise(
            _ASM_4_BF16, "=r,=r,=r,=r,=r,=r,=r,=r,r,r,r", [p, zero], (tl.bfloat16,) * 8, is_pure=True, pack=2
        )
    else:
        return tl.inline_asm_elementwise(
            _ASM_4_F16, "=r,=r,=r,=r,=r,=r,=r,=r,r,r,r", [p, zero], (tl.float16,) * 8, is_pure=True, pack=2
        )


@triton.jit
def _byte_columns(p, zero, FP8: tl.constexpr, BF16: tl.constexpr, ASM: tl.constexpr, ZEROS: tl.constexpr):
    """Four times [R, 16]: byte j of each word, less its zero; not ZEROS: which is 128, unless they are e4m3."""
    if not ASM:
        dtype: tl.constexpr = tl.bfloat16 if BF16 else tl.float16
        b0, b1, b2, b3 = p & 255, p >> 8 & 255, p >> 16 & 255, p >> 24 & 255
        if FP8:
            return (
                b0.to(tl.uint8).to(tl.float8e4nv, bitcast=True).to(dtype), b1.to(tl.uint8).to(tl.float8e4nv, bitcast=True).to(dtype),
                b2.to(tl.uint8).to(tl.float8e4nv, bitcast=True).to(dtype), b3.to(tl.uint8).to(tl.float8e4nv, bitcast=True).to(dtype),
            )  # fmt: skip
        else:
            z = zero.to(tl.float32) - 1024.0
            return (b0 - z).to(dtype), (b1 - z).to(dtype), (b2 - z).to(dtype), (b3 - z).to(dtype)
    elif FP8:
        if BF16:
            return tl.inline_asm_elementwise(_ASM_FP8_BF16, "=r,=r,=r,=r,r,r,r", [p, zero], (tl.bfloat16,) * 4, is_pure=True, pack=2)
        else:
            return tl.inline_asm_elementwise(_ASM_FP8_F16, "=r,=r,=r,=r,r,r,r", [p, zero], (tl.float16,) * 4, is_pure=True, pack=2)
    elif BF16 and not ZEROS and cuda_capability_geq(9, 0):
        return tl.inline_asm_elementwise(_ASM_SIGNED_BF16, "=r,=r,=r,=r,r,r", [p], (tl.bfloat16,) * 4, is_pure=True, pack=2)
    elif BF16:
        return tl.inline_asm_elementwise(_ASM_INT8_BF16, "=r,=r,=r,=r,r,r,r", [p, zero], (tl.bfloat16,) * 4, is_pure=True, pack=2)
    else:
        return tl.inline_asm_elementwise(_ASM_INT8_F16, "=r,=r,=r,=r,r,r,r", [p, zero], (tl.float16,) * 4, is_pure=True, pack=2)


@triton.jit
def _beside(a, b):
    """Columns of b after those of a: [R, C] twice -> [R, 2 C]."""
    return tl.join(a, b).permute(0, 2, 1).reshape(a.shape[0], 2 * a.shape[1])


@triton.jit
def in_rows(p, TILES: tl.constexpr):
    """Words of tiles [TILES, 1024] as they lie in memory, as [64 · TILES, 16]."""
    return p.reshape(TILES, 2, 4, 8, 4, 2, 2).permute(0, 2, 1, 3, 5, 4, 6).reshape(64 * TILES, 16)


@triton.jit
def columns_of(
    p, zero, part: tl.constexpr, PART: tl.constexpr, BITS: tl.constexpr, FP8: tl.constexpr, BF16: tl.constexpr, ASM: tl.constexpr,
    ZEROS: tl.constexpr,
):  # fmt: skip
    """[R, PART] in 16 bits: the part-th PART columns of a tile of words [R, 16], less their zeros; ZEROS: those of a kind's own are not
    looked at."""
    if BITS == 4:
        w0, w1, w2, w3, w4, w5, w6, w7 = _nibble_columns(p, zero, BF16, ASM)
        if PART == 128:
            w = _beside(_beside(_beside(w0, w1), _beside(w2, w3)), _beside(_beside(w4, w5), _beside(w6, w7)))
        elif PART == 64:
            w = _beside(_beside(w0, w1), _beside(w2, w3)) if part == 0 else _beside(_beside(w4, w5), _beside(w6, w7))
        elif part < 2:
            w = _beside(w0, w1) if part == 0 else _beside(w2, w3)
        else:
            w = _beside(w4, w5) if part == 2 else _beside(w6, w7)
    else:
        w0, w1, w2, w3 = _byte_columns(p, zero, FP8, BF16, ASM, ZEROS)
        if PART == 64:
            w = _beside(_beside(w0, w1), _beside(w2, w3))
        else:
            w = _beside(w0, w1) if part == 0 else _beside(w2, w3)
    return w


@triton.jit
def _x_tile(x_ptr, m, M, column, K, x_stride, WIDTH: tl.constexpr, EVEN: tl.constexpr):
    """x [rows, WIDTH] from `column` on; zeros outside."""
    k = column + tl.arange(0, WIDTH)
    if EVEN:
        return tl.load(x_ptr + m[:, None] * x_stride + k[None, :], (m < M)[:, None], 0.0)
    else:
        return tl.load(x_ptr + m[:, None] * x_stride + k[None, :], (m < M)[:, None] & (k < K)[None, :], 0.0)


@triton.jit
def _write(acc, out_ptr, bias_ptr, row, m, N, M, BIAS: tl.constexpr, GATED: tl.constexpr):
    """out[m, row] = acc[row, m] + bias[row]; GATED: of rows paired eight by eight, silu(gate) · up."""
    if GATED:
        HALF: tl.constexpr = acc.shape[0] // 2
        if BIAS:
            acc += tl.load(bias_ptr + row, row < N, 0.0).to(tl.float32)[:, None]
        gate, up = tl.split(acc.reshape(HALF // 8, 2, 8, acc.shape[1]).permute(0, 2, 3, 1))
        y = (gate / (1.0 + tl.exp(-gate)) * up).reshape(HALF, acc.shape[1])
        place = tl.program_id(0) * HALF + tl.arange(0, HALF)
        inside = (place < N // 2)[:, None] & (m < M)[None, :]
        tl.store(out_ptr + m[None, :].to(tl.int64) * (N // 2) + place[:, None], y.to(out_ptr.dtype.element_ty), inside)
    else:
        inside = (row < N)[:, None] & (m < M)[None, :]
        if BIAS:
            acc += tl.load(bias_ptr + row, row < N, 0.0).to(tl.float32)[:, None]
        tl.store(out_ptr + m[None, :].to(tl.int64) * N + row[:, None], acc.to(out_ptr.dtype.element_ty), inside)


@triton.jit
def finish_split(
    acc, out_ptr, bias_ptr, parts_ptr, counter_ptr, row, m, N, M, SPLITS: tl.constexpr, BIAS: tl.constexpr, GATED: tl.constexpr
):
    """Write out[m, row] = acc[row, m] (+ bias), where SPLITS programs hold a part each: the last to arrive adds all, in order."""
    if SPLITS > 1:
        SIZE: tl.constexpr = acc.shape[0] * acc.shape[1]
        inside = (row < N)[:, None] & (m < M)[None, :]
        r, c = tl.arange(0, acc.shape[0]), tl.arange(0, acc.shape[1])
        place = tl.program_id(1) * tl.num_programs(0) + tl.program_id(0)
        own = parts_ptr + place.to(tl.int64) * (SPLITS * SIZE) + c[None, :] * acc.shape[0] + r[:, None]
        tl.store(own + tl.program_id(2) * SIZE, acc, inside)
        tl.debug_barrier()
        if arrives_last(counter_ptr + place, 0, SPLITS - 1):
            total = tl.zeros(acc.shape, tl.float32)
            for split in tl.static_range(SPLITS):
                total += tl.load(own + split * SIZE, inside, 0.0, cache_modifier=".cg")
            _write(total, out_ptr, bias_ptr, row, m, N, M, BIAS, GATED)
            tl.store(counter_ptr + place, 0)
    else:
        _write(acc, out_ptr, bias_ptr, row, m, N, M, BIAS, GATED)


@triton.jit(do_not_specialize=["M"])
def _packed_product(
    x_ptr, words_ptr, scales_ptr, zeros_ptr, bias_ptr, out_ptr, parts_ptr, counter_ptr, M, N, K, x_stride, scale_stride, column_tiles,
    BITS: tl.constexpr, FP8: tl.constexpr, GROUP: tl.constexpr, ZEROS: tl.constexpr, BIAS: tl.constexpr, GATED: tl.constexpr,
    BF16: tl.constexpr, EVEN: tl.constexpr, ASM: tl.constexpr,
    ROWS: tl.constexpr, TILES: tl.constexpr, SPLITS: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    WIDTH: tl.constexpr = 512 // BITS
    PART: tl.constexpr = WIDTH if GROUP == 0 or GROUP > WIDTH else GROUP
    R: tl.constexpr = 64 * TILES
    dtype: tl.constexpr = tl.bfloat16 if BF16 else tl.float16
    offset: tl.constexpr = (128.0 if BF16 else 1024.0) if BITS == 4 else (0.0 if FP8 else 1024.0)
    default: tl.constexpr = offset + (8.0 if BITS == 4 else (0.0 if FP8 else 128.0))
    share = (column_tiles + SPLITS - 1) // SPLITS
    begin = tl.program_id(2) * share
    end = tl.minimum(begin + share, column_tiles)
    tile, word = tl.arange(0, TILES), tl.arange(0, 1024)
    row = tl.program_id(0) * R + tl.arange(0, R)
    m = tl.program_id(1) * ROWS + tl.arange(0, ROWS)
    first = words_ptr + (tl.program_id(0).to(tl.int64) * TILES + tile)[:, None] * column_tiles * 1024 + word[None, :]
    acc = tl.zeros([R, ROWS], tl.float32)
    zero = tl.full([R, 16], default, tl.float32).to(dtype if BITS == 4 else tl.float16)
    for at in tl.range(begin, end, num_stages=STAGES):
        p = in_rows(tl.load(first + at * 1024), TILES)
        for part in tl.static_range(WIDTH // PART):
            column = at * WIDTH + part * PART
            x = _x_tile(x_ptr, m, M, column, K, x_stride, PART, EVEN).trans()
            if ZEROS:
                z = tl.load(zeros_ptr + column // GROUP * scale_stride + row) if GROUP else tl.load(zeros_ptr + row)
                zero = tl.broadcast_to((z + offset).to(zero.dtype)[:, None], (R, 16))
            w = columns_of(p, zero, part, PART, BITS, FP8, BF16, ASM, ZEROS)
            if GROUP:
                scale = tl.load(scales_ptr + column // GROUP * scale_stride + row)
                acc += tl.dot(w, x) * scale[:, None]
            else:
                acc = tl.dot(w, x, acc)
    if not GROUP:
        acc *= tl.load(scales_ptr + row)[:, None]
    finish_split(acc, out_ptr, bias_ptr, parts_ptr, counter_ptr, row, m, N, M, SPLITS, BIAS, GATED)


WIDE = (
    ProductConfig(16, 1, 1, 5), ProductConfig(32, 2, 1, 3), ProductConfig(64, 2, 1, 3), ProductConfig(128, 2, 1, 3, 8),
    ProductConfig(256, 1, 1, 3),
)  # fmt: skip
"""Launches by rows of x for what `is_wide`: up to 256 rows meet words that are read and turned into 16 bits once. The last one takes
104 KiB of shared memory. Measured on an H200, 30 November 2026 (benchmarks/NOTES.md)."""


WIDE_TILES = 256
"""Tiles of 64 rows from which on."""


def is_wide(weight: PackedWeight) -> bool:
    """Whether a weight is like an output head's: many rows of 8 bits, with one scale each."""
    return weight.kind == "int8" and not weight.group and weight.words.shape[0] >= WIDE_TILES


def wide_config(rows: int, row_tiles: int, device: torch.device) -> ProductConfig:
    """Launch of packed_product for what `is_wide`."""
    table = WIDE if configs.shared_memory(device) >= 104 << 10 else WIDE[:-1]
    config = next((config for config in table if config.rows >= rows), table[-1])
    return config if row_tiles % config.tiles == 0 else config._replace(tiles=1, warps=4)


def packed_config(rows: int, row_tiles: int, column_tiles: int) -> ProductConfig:
    """Launch of packed_product, as measured on an H200 over the products of an 8B step (benchmarks/NOTES.md)."""
    even, deep = row_tiles % 2 == 0, column_tiles >= 64
    if rows <= 16:
        if row_tiles >= 256 and even:
            return ProductConfig(16, 2, 1, 5)
        splits = _power_below(512 // row_tiles if deep else 400 // row_tiles, column_tiles // 2)
        return ProductConfig(16, 1, splits, 3 if deep else 5)
    own = 32 if rows <= 32 else 64
    tiles_of_x = -(-rows // own)
    if row_tiles >= 256:
        return ProductConfig(own, 2 if even and tiles_of_x <= 2 else 1, 1, 3)
    if deep and tiles_of_x > 1 and even:
        return ProductConfig(own, 2, _power_below(8 // tiles_of_x, column_tiles // 2), 3)
    return ProductConfig(own, 1, _power_below(4 // tiles_of_x, column_tiles // 2), 3)


def _power_below(wanted: int, most: int) -> int:
    """The largest power of two that is neither above 16 nor above either; at least 1."""
    return 1 << max(min(wanted, most, 16), 1).bit_length() - 1


def packed_product(
    x: Tensor, weight: PackedWeight, bias: Tensor | None = None, *, gated: bool = False, workspace: SplitWorkspace | None = None,
    out: Tensor | None = None, config: ProductConfig | None = None,
) -> Tensor:  # fmt: skip
    """See reference_quantized.packed_product. x bfloat16 or float16 [M, K], contiguous last axis. bias is in the order of the tiles.

    Without a workspace one is allocated by a call that needs it. config overrides the launch table.
    """
    if gated != weight.paired:
        raise ValueError(f"gated must be {weight.paired} as the weight is packed, got {gated}")
    if weight.kind == "fp8":
        configs.check_e4m3(x.device)
    rows, columns = x.shape
    width = weight.rows // 2 if gated else weight.rows
    out = torch.empty((rows, width), dtype=x.dtype, device=x.device) if out is None else out
    if not rows:
        return out
    row_tiles, column_tiles, _ = weight.words.shape
    if config is None:
        config = wide_config(rows, row_tiles, x.device) if is_wide(weight) else packed_config(rows, row_tiles, column_tiles)
    if row_tiles % config.tiles:
        raise ValueError(f"tiles must divide {row_tiles}, got {config.tiles}")
    grid = (row_tiles // config.tiles, triton.cdiv(rows, config.rows), config.splits)
    if config.splits > 1:
        workspace = split_workspace(x.device) if workspace is None else workspace
        workspace.check(grid, config.rows * config.tiles * TILE_ROWS)
    parts, counters = (None, None) if workspace is None else (workspace.parts, workspace.counters)
    _packed_product[grid](
        x, weight.words, weight.scales, weight.zeros, bias, out, parts, counters, rows, weight.rows, columns, x.stride(0),
        weight.scales.stride(0), column_tiles,
        4 if weight.kind == "int4" else 8, weight.kind == "fp8", weight.group, weight.zeros is not None, bias is not None, gated,
        x.dtype == torch.bfloat16, columns == column_tiles * tile_columns(weight.kind), not INTERPRETED,
        config.rows, config.tiles, config.splits, config.stages, num_warps=config.warps,
    )  # fmt: skip
    return out


@triton.jit
def _unpack_tiles(
    words_ptr, scales_ptr, zeros_ptr, out_ptr, N, K, scale_stride, column_tiles,
    BITS: tl.constexpr, FP8: tl.constexpr, GROUP: tl.constexpr, ZEROS: tl.constexpr, ZERO: tl.constexpr, PAIRED: tl.constexpr,
):  # fmt: skip
    """One tile of the weight, de-quantized."""
    WIDTH: tl.constexpr = 512 // BITS
    tile = tl.program_id(0).to(tl.int64) * column_tiles + tl.program_id(1)
    p = tl.load(words_ptr + tile * 1024 + tl.arange(0, 1024))
    p = p.reshape(2, 4, 8, 4, 2, 2).permute(1, 0, 2, 4, 3, 5).reshape(64, 16)
    if BITS == 4:
        low = _beside(_beside(p & 15, p >> 4 & 15), _beside(p >> 8 & 15, p >> 12 & 15))
        q = _beside(low, _beside(_beside(p >> 16 & 15, p >> 20 & 15), _beside(p >> 24 & 15, p >> 28 & 15)))
    else:
        q = _beside(_beside(p & 255, p >> 8 & 255), _beside(p >> 16 & 255, p >> 24 & 255))
    row = tl.program_id(0) * 64 + tl.arange(0, 64)
    column = tl.program_id(1) * WIDTH + tl.arange(0, WIDTH)
    if GROUP == 0 or GROUP >= WIDTH:
        first = tl.program_id(1) * WIDTH
        at = (row + (first // GROUP * scale_stride if GROUP else 0))[:, None]
    else:
        at = (column // GROUP * scale_stride)[None, :] + row[:, None]
    if FP8:
        value = q.to(tl.uint8).to(tl.float8e4nv, bitcast=True).to(tl.float32)
    elif ZEROS:
        value = q.to(tl.float32) - tl.load(zeros_ptr + at)
    else:
        value = q.to(tl.float32) - ZERO
    value *= tl.load(scales_ptr + at)
    place = row
    if PAIRED:
        place = row // 16 * 8 + row % 8 + row % 16 // 8 * (N // 2)
    inside = (row < N)[:, None] & (column < K)[None, :]
    tl.store(out_ptr + place[:, None].to(tl.int64) * K + column[None, :], value.to(out_ptr.dtype.element_ty), inside)


def unpack_weight(weight: PackedWeight, out: Tensor) -> Tensor:
    """De-quantize into out [rows, columns], contiguous. See quantized_weights.dequantized."""
    if weight.kind == "fp8":
        configs.check_e4m3(out.device)
    row_tiles, column_tiles, _ = weight.words.shape
    _unpack_tiles[(row_tiles, column_tiles)](
        weight.words, weight.scales, weight.zeros, out, weight.rows, weight.columns, weight.scales.stride(0), column_tiles,
        4 if weight.kind == "int4" else 8, weight.kind == "fp8", weight.group, weight.zeros is not None, float(DEFAULT_ZEROS[weight.kind]),
        weight.paired, num_warps=4,
    )  # fmt: skip
    return out
