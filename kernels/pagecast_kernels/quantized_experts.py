"""The grouped products of a mixture whose experts' weights are quantized: a tile of an expert's list times rows of its weight.

As in quantized_products the weight is the operand that tensor cores take from registers, so y is computed transposed, and as in
experts a program finds its tile from the lists' lengths on the device. Weights of 4 or 8 bits meet activations of 16; e4m3 and int8
meet activations of their own type, a scale for each row of both.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from pagecast_kernels import configs, elementwise, expert_configs, quantized_rows
from pagecast_kernels.elementwise import activated
from pagecast_kernels.expert_lists import tile_ends, tile_pairs
from pagecast_kernels.quantized_products import INTERPRETED, columns_of, in_rows
from pagecast_kernels.quantized_weights import TILE_ROWS, PackedExperts, ScaledExperts, tile_columns


@triton.jit(do_not_specialize=["tokens"])
def _packed_experts(
    x_ptr, words_ptr, scales_ptr, zeros_ptr, order_ptr, pair_scales_ptr, counts_ptr, lists_ptr, out_ptr, tokens, N, K, groups, padded_rows,
    column_tiles, EXPERTS: tl.constexpr, EXPERT_LANES: tl.constexpr, CHOSEN: tl.constexpr, FIRST: tl.constexpr, GATED: tl.constexpr,
    BITS: tl.constexpr, FP8: tl.constexpr, GROUP: tl.constexpr, ZEROS: tl.constexpr, ORDER: tl.constexpr, BF16: tl.constexpr,
    EVEN: tl.constexpr, ASM: tl.constexpr, ROWS: tl.constexpr, TILES: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """FIRST: x[token] meets the weight, of whose rows paired eight by eight GATED leaves silu(gate) · up; else x[pair] does, and the
    product is multiplied by the pair's scale."""
    WIDTH: tl.constexpr = 512 // BITS
    PART: tl.constexpr = WIDTH if GROUP == 0 or GROUP > WIDTH else GROUP
    R: tl.constexpr = 64 * TILES
    dtype: tl.constexpr = tl.bfloat16 if BF16 else tl.float16
    offset: tl.constexpr = (128.0 if BF16 else 1024.0) if BITS == 4 else (0.0 if FP8 else 1024.0)
    default: tl.constexpr = offset + (8.0 if BITS == 4 else (0.0 if FP8 else 128.0))
    blocks = padded_rows // R
    tile, block = tl.program_id(0) // blocks, tl.program_id(0) % blocks
    ends = tile_ends(counts_ptr, EXPERTS, EXPERT_LANES, ROWS)
    if tile >= tl.max(ends, 0):
        return
    expert, pair, held = tile_pairs(tile, ends, counts_ptr, lists_ptr, tokens, ROWS)
    far = expert.to(tl.int64)
    row = block * R + tl.arange(0, R)
    source = x_ptr + (pair // CHOSEN if FIRST else pair).to(tl.int64)[:, None] * K
    tiles = far * (padded_rows // 64) + block * TILES + tl.arange(0, TILES)
    first = words_ptr + tiles[:, None] * column_tiles * 1024 + tl.arange(0, 1024)[None, :]
    own = far * groups * padded_rows + row
    zero = tl.full([R, 16], default, tl.float32).to(dtype if BITS == 4 else tl.float16)
    acc = tl.zeros([R, ROWS], tl.float32)
    for at in tl.range(0, column_tiles, num_stages=STAGES):
        p = in_rows(tl.load(first + at * 1024), TILES)
        for part in tl.static_range(WIDTH // PART):
            column = at * WIDTH + part * PART
            k = column + tl.arange(0, PART)
            seen = held[:, None] if EVEN else held[:, None] & (k < K)[None, :]
            if ORDER:
                k = tl.load(order_ptr + far * K + k, k < K, 0)
            x = tl.load(source + k[None, :], seen, 0.0).trans()
            if ZEROS:
                z = tl.load(zeros_ptr + own + (column // GROUP * padded_rows if GROUP else 0))
                zero = tl.broadcast_to((z + offset).to(zero.dtype)[:, None], (R, 16))
            w = columns_of(p, zero, part, PART, BITS, FP8, BF16, ASM, ZEROS)
            if GROUP:
                acc += tl.dot(w, x) * tl.load(scales_ptr + own + column // GROUP * padded_rows)[:, None]
            else:
                acc = tl.dot(w, x, acc)
    if not GROUP:
        acc *= tl.load(scales_ptr + own)[:, None]
    if GATED:
        HALF: tl.constexpr = R // 2
        gate, up = tl.split(acc.reshape(HALF // 8, 2, 8, ROWS).permute(0, 2, 3, 1))
        y = (gate / (1.0 + tl.exp(-gate)) * up).reshape(HALF, ROWS)
        place = block * HALF + tl.arange(0, HALF)
        width = N // 2
    else:
        y = acc
        if not FIRST:
            y *= tl.load(pair_scales_ptr + pair, held, 0.0)[None, :]
        place = row
        width = N
    tl.store(out_ptr + pair.to(tl.int64)[None, :] * width + place[:, None], y.to(dtype), (place < width)[:, None] & held[None, :])


@triton.jit(do_not_specialize=["tokens"])
def _scaled_experts(
    x_ptr, x_scale_ptr, weight_ptr, weight_scale_ptr, pair_scales_ptr, counts_ptr, lists_ptr, out_ptr, tokens, N, K,
    EXPERTS: tl.constexpr, EXPERT_LANES: tl.constexpr, CHOSEN: tl.constexpr, FIRST: tl.constexpr, GELU: tl.constexpr,
    FP8: tl.constexpr, EVEN: tl.constexpr, WIDEN: tl.constexpr,
    ROWS: tl.constexpr, R: tl.constexpr, DEPTH: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """FIRST: out[pair] = activation(gate) · up of x[token], N gate rows and as many up rows; else x[pair] @ weightᵀ times its scale."""
    blocks = tl.cdiv(N, R)
    tile, block = tl.program_id(0) // blocks, tl.program_id(0) % blocks
    ends = tile_ends(counts_ptr, EXPERTS, EXPERT_LANES, ROWS)
    if tile >= tl.max(ends, 0):
        return
    expert, pair, held = tile_pairs(tile, ends, counts_ptr, lists_ptr, tokens, ROWS)
    row, k = block * R + tl.arange(0, R), tl.arange(0, DEPTH)
    inside = row < N
    source = pair // CHOSEN if FIRST else pair
    x_at = x_ptr + source.to(tl.int64)[:, None] * K + k[None, :]
    rows = expert.to(tl.int64) * (2 * N if FIRST else N)
    near = tl.minimum(row, N - 1)
    w_at = weight_ptr + (rows + near)[:, None] * K + k[None, :]
    up_at = weight_ptr + (rows + N + near)[:, None] * K + k[None, :]
    acc = tl.zeros([R, ROWS], tl.float32 if FP8 else tl.int32)
    up = tl.zeros([R, ROWS], tl.float32 if FP8 else tl.int32)
    for step in tl.range(0, K, DEPTH, num_stages=STAGES):
        rest = (k < K - step)[None, :]
        x = tl.load(x_at + step, held[:, None] if EVEN else held[:, None] & rest, 0.0).trans()
        w = tl.load(w_at + step) if EVEN else tl.load(w_at + step, rest, 0.0)
        acc = _accumulated(w, x, acc, FP8, WIDEN, DEPTH)
        if FIRST:
            w = tl.load(up_at + step) if EVEN else tl.load(up_at + step, rest, 0.0)
            up = _accumulated(w, x, up, FP8, WIDEN, DEPTH)
    x_scale = tl.load(x_scale_ptr + source, held, 0.0)
    y = acc.to(tl.float32) * tl.load(weight_scale_ptr + rows + row, inside, 0.0)[:, None] * x_scale[None, :]
    if FIRST:
        y = activated(y, GELU)
        up_scale = tl.load(weight_scale_ptr + rows + N + row, inside, 0.0)
        y *= up.to(tl.float32) * up_scale[:, None] * x_scale[None, :]
    else:
        y *= tl.load(pair_scales_ptr + pair, held, 0.0)[None, :]
    at = out_ptr + pair.to(tl.int64)[None, :] * N + row[:, None]
    tl.store(at, y.to(out_ptr.dtype.element_ty), inside[:, None] & held[None, :])


@triton.jit
def _accumulated(w, x, acc, FP8: tl.constexpr, WIDEN: tl.constexpr, DEPTH: tl.constexpr):
    """acc + w @ x; WIDEN: by way of float16, for the interpreter."""
    if WIDEN:
        return tl.dot(w.to(tl.float16), x.to(tl.float16), acc.to(tl.float32)).to(acc.dtype)
    elif FP8:
        # Tensor cores keep some 14 bits of a sum of e4m3 products; it is carried on in float32.
        return tl.dot(w, x, acc, max_num_imprecise_acc=DEPTH)
    else:
        return tl.dot(w, x, acc, out_dtype=tl.int32)


def packed_product(
    x: Tensor, weight: PackedExperts, scales: Tensor, counts: Tensor, lists: Tensor, chosen: int, first: bool, gelu: bool,
    config: expert_configs.Experts | None = None,
) -> Tensor:  # fmt: skip
    """One of a mixture's two products. x bfloat16 or float16, contiguous: [T, K] where it is the first, whose SiLU·mul (gelu: GELU·mul)
    is returned, else [T · chosen, K]. scales float32[T, chosen], counts and lists as experts.route gives them. Returns [T · chosen, ..].
    """
    if weight.kind == "fp8":
        configs.check_e4m3(x.device)
    experts, tokens = lists.shape
    pairs, row_tiles, column_tiles = tokens * chosen, *weight.words.shape[1:3]
    config = expert_configs.packed_experts(pairs, experts, row_tiles, x.device) if config is None else config
    tiles = config.columns // TILE_ROWS
    if row_tiles % tiles:
        raise ValueError(f"columns must be {TILE_ROWS} times a divisor of {row_tiles}, got {config.columns}")
    gated = first and weight.paired and not gelu
    if weight.paired and not gated:
        raise ValueError("weights whose rows are paired give SiLU·mul alone")
    out = torch.empty((pairs, weight.rows // 2 if gated else weight.rows), dtype=x.dtype, device=x.device)
    most = min(pairs // config.rows + min(pairs, experts), pairs)
    _packed_experts[(most * (row_tiles // tiles),)](
        x, weight.words, weight.scales, weight.zeros, weight.order, scales, counts, lists, out, tokens, weight.rows, weight.columns,
        weight.scales.shape[1], row_tiles * TILE_ROWS, column_tiles, experts, triton.next_power_of_2(experts), chosen, first, gated,
        4 if weight.kind == "int4" else 8, weight.kind == "fp8", weight.group, weight.zeros is not None, weight.order is not None,
        x.dtype == torch.bfloat16, weight.columns == column_tiles * tile_columns(weight.kind), not INTERPRETED,
        config.rows, tiles, config.stages, num_warps=config.warps,
    )  # fmt: skip
    if not first or gated:
        return out
    return elementwise.gelu_mul(out) if gelu else elementwise.silu_mul(out)


def scaled_product(
    x: Tensor, weight: ScaledExperts, scales: Tensor, counts: Tensor, lists: Tensor, chosen: int, first: bool, gelu: bool,
    config: expert_configs.Experts | None = None,
) -> Tensor:  # fmt: skip
    """The same with weights and activations of 8 bits; x is rounded here, row by row."""
    experts, tokens = lists.shape
    pairs, fp8 = tokens * chosen, weight.values.dtype == torch.float8_e4m3fn
    config = expert_configs.scaled_experts(pairs, experts) if config is None else config
    columns, depth = weight.shape[1] // 2 if first else weight.shape[1], weight.shape[2]
    rows, row_scales = quantized_rows.quantize_rows(x, weight.values.dtype)
    out = torch.empty((pairs, columns), dtype=x.dtype, device=x.device)
    most = min(pairs // config.rows + min(pairs, experts), pairs)
    _scaled_experts[(most * triton.cdiv(columns, config.columns),)](
        rows, row_scales, weight.values, weight.scales, scales, counts, lists, out, tokens, columns, depth, experts,
        triton.next_power_of_2(experts), chosen, first, gelu, fp8, depth % config.depth == 0, INTERPRETED,
        config.rows, config.columns, config.depth, config.stages, num_warps=config.warps,
    )  # fmt: skip
    return out
