"""The grouped products of a mixture whose experts have many rows each: the weight's rows are a product's rows, pairs its columns.

What bounds them is how often tiles come from the L2 cache, and what a program does before and after its products, which is why two
programs fit a processor. A program takes ROWS + EXTRA pairs of an expert's list in two products that share what is fetched of the
weight: tiles need not be powers of two, and a list slightly longer than ROWS does not read the expert's weights twice. The second
product is left out where the list has ended.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from pagecast_kernels.elementwise import activated
from pagecast_kernels.expert_configs import Experts
from pagecast_kernels.expert_lists import tile_span


@triton.jit
def _pairs_at(list_at, begin, count, x_ptr, K, CHOSEN: tl.constexpr, FIRST: tl.constexpr, ROWS: tl.constexpr, DEPTH: tl.constexpr):
    """Pairs begin .. + ROWS behind list_at, which of them there are of count, and where their inputs lie."""
    slot = begin + tl.arange(0, ROWS)
    held = slot < count
    pair = tl.load(list_at + slot, held, 0)
    source = pair // CHOSEN if FIRST else pair
    return pair, held, x_ptr + source.to(tl.int64)[:, None] * K + tl.arange(0, DEPTH)[None, :]


@triton.jit
def _store(acc, up, pair, held, row, scales_ptr, out_ptr, N, FIRST: tl.constexpr, GELU: tl.constexpr):
    """acc [rows of the weight, pairs]: activated and gated by up, or times the pairs' scales."""
    if FIRST:
        acc = activated(acc, GELU) * up
    else:
        acc *= tl.load(scales_ptr + pair, held, 0.0)[None, :]
    value = acc.to(out_ptr.dtype.element_ty).trans()
    tl.store(out_ptr + pair.to(tl.int64)[:, None] * N + row[None, :], value, held[:, None] & (row < N)[None, :])


@triton.jit
def _tile_product(
    x_ptr, weight, scales_ptr, list_at, out_ptr, count, expert, block, N, K,
    CHOSEN: tl.constexpr, FIRST: tl.constexpr, GELU: tl.constexpr, EVEN: tl.constexpr, COPIED: tl.constexpr,
    ROWS: tl.constexpr, EXTRA: tl.constexpr, R: tl.constexpr, DEPTH: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """R rows of the expert's weight by the tile's first ROWS pairs and, unless EXTRA is 0, by so many behind them."""
    pair, held, x_at = _pairs_at(list_at, 0, count, x_ptr, K, CHOSEN, FIRST, ROWS, DEPTH)
    row, k = block * R + tl.arange(0, R), tl.arange(0, DEPTH)
    first = expert * (2 * N if FIRST else N)
    if not COPIED:
        near = tl.minimum(row, N - 1)
        w_at = weight + (first + near).to(tl.int64)[:, None] * K + k[None, :]
        up_at = weight + (first + N + near).to(tl.int64)[:, None] * K + k[None, :]
    acc = tl.zeros([R, ROWS], tl.float32)
    up = tl.zeros([R, ROWS], tl.float32)
    if EXTRA:
        more_pair, more_held, more_at = _pairs_at(list_at, ROWS, count, x_ptr, K, CHOSEN, FIRST, EXTRA, DEPTH)
        more = tl.zeros([R, EXTRA], tl.float32)
        more_up = tl.zeros([R, EXTRA], tl.float32)
    for step in tl.range(0, K, DEPTH, num_stages=STAGES):
        rest = (k < K - step)[None, :]
        x = tl.load(x_at + step, held[:, None] if EVEN else held[:, None] & rest, 0.0).trans()
        if COPIED:
            w = weight.load([first + block * R, step])
        else:
            w = tl.load(w_at + step) if EVEN else tl.load(w_at + step, rest, 0.0)
        acc = tl.dot(w, x, acc)
        if EXTRA:
            also = tl.load(more_at + step, more_held[:, None] if EVEN else more_held[:, None] & rest, 0.0).trans()
            more = tl.dot(w, also, more)
        if FIRST:
            if COPIED:
                w = weight.load([first + N + block * R, step])
            else:
                w = tl.load(up_at + step) if EVEN else tl.load(up_at + step, rest, 0.0)
            up = tl.dot(w, x, up)
            if EXTRA:
                more_up = tl.dot(w, also, more_up)
    _store(acc, up, pair, held, row, scales_ptr, out_ptr, N, FIRST, GELU)
    if EXTRA:
        _store(more, more_up, more_pair, more_held, row, scales_ptr, out_ptr, N, FIRST, GELU)


@triton.jit(do_not_specialize=["tokens"])
def _wide_experts(
    x_ptr, weight, scales_ptr, counts_ptr, lists_ptr, out_ptr, tokens, N, K,
    EXPERTS: tl.constexpr, EXPERT_LANES: tl.constexpr, CHOSEN: tl.constexpr, FIRST: tl.constexpr, GELU: tl.constexpr,
    EVEN: tl.constexpr, COPIED: tl.constexpr, ROWS: tl.constexpr, SHORT: tl.constexpr, EXTRA: tl.constexpr,
    R: tl.constexpr, DEPTH: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """FIRST: out[pair] = activation(gate) · up of x[token], N gate rows and as many up rows; else x[pair] @ weightᵀ times its scale.
    weight: [E, 2 N or N, K], COPIED: its descriptor as [E · rows, K] by boxes of R x DEPTH. SHORT, unless 0: what tiles of so few
    pairs are computed with."""
    blocks = tl.cdiv(N, R)
    tile, block = tl.program_id(0) // blocks, tl.program_id(0) % blocks
    expert, place, count = tile_span(tile, counts_ptr, EXPERTS, EXPERT_LANES, ROWS + EXTRA)
    if count <= 0:
        return
    list_at = lists_ptr + expert.to(tl.int64) * tokens + place
    if EXTRA and count > ROWS:
        _tile_product(
            x_ptr, weight, scales_ptr, list_at, out_ptr, count, expert, block, N, K,
            CHOSEN, FIRST, GELU, EVEN, COPIED, ROWS, EXTRA, R, DEPTH, STAGES,
        )  # fmt: skip
    elif SHORT and count <= SHORT:
        _tile_product(
            x_ptr, weight, scales_ptr, list_at, out_ptr, count, expert, block, N, K,
            CHOSEN, FIRST, GELU, EVEN, COPIED, SHORT, 0, R, DEPTH, STAGES,
        )  # fmt: skip
    else:
        _tile_product(
            x_ptr, weight, scales_ptr, list_at, out_ptr, count, expert, block, N, K,
            CHOSEN, FIRST, GELU, EVEN, COPIED, ROWS, 0, R, DEPTH, STAGES,
        )  # fmt: skip


def wide_product(
    x: Tensor, weight: Tensor, scales: Tensor, counts: Tensor, lists: Tensor, chosen: int, first: bool, gelu: bool, config: Experts
) -> Tensor:
    """See experts._product; of weights [E, N, K] of 16 bits."""
    experts, tokens = lists.shape
    pairs = tokens * chosen
    columns, depth = weight.shape[1] // 2 if first else weight.shape[1], weight.shape[2]
    tiles = min(pairs // (config.rows + config.extra) + min(pairs, experts), pairs)
    out = torch.empty((pairs, columns), dtype=x.dtype, device=x.device)
    even = depth % config.depth == 0
    copied = even and columns % config.columns == 0  # by the copy engine
    source = weight
    if copied:
        source = TensorDescriptor(weight, [experts * weight.shape[1], depth], [depth, 1], [config.columns, config.depth])
    _wide_experts[(tiles * triton.cdiv(columns, config.columns),)](
        x, source, scales, counts, lists, out, tokens, columns, depth, experts, triton.next_power_of_2(experts), chosen, first, gelu,
        even, copied, config.rows, config.short, config.extra, config.columns, config.depth, config.stages,
        num_warps=config.warps,
    )  # fmt: skip
    return out
