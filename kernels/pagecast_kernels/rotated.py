"""Rotation of heads and the write of K and V as the last step of the one-row product that makes them: one launch a layer less.

A program of the product has equally many rows of the first half of a head and of its second half, so that pairs meet in it.
"""

from typing import NamedTuple

import triton
import triton.language as tl
from torch import Tensor


class Heads(NamedTuple):
    """Where the q|k|v of one token goes: q to what the product gives, k and v to the caches [num_blocks, Hkv, block_size, D] of q's type.

    cos_sin, position, slot as in reference.rope_and_write_kv."""

    cos_sin: Tensor
    position: Tensor
    slot: Tensor
    k_cache: Tensor
    v_cache: Tensor
    num_heads: int

    @property
    def shape(self) -> "Shape":
        """What kernels are compiled for: heads of q and of k, tokens of a block, half a head's size."""
        _, num_kv_heads, block_size, dim = self.k_cache.shape
        return self.num_heads, num_kv_heads, block_size, dim // 2


Shape = tuple[int, int, int, int]


def arguments(heads: Heads | None) -> tuple[tuple[Tensor, ...] | None, Shape | None]:
    """As kernels take them."""
    return (None, None) if heads is None else (heads[:5], heads.shape)


@triton.jit
def rows_of(program, unit, WIDTH: tl.constexpr, SHAPE: tl.constexpr):
    """Rows of the weight that are a program's units: WIDTH of a head's first half, then as many of the second."""
    PER: tl.constexpr = SHAPE[3] // WIDTH
    return program // PER * (2 * SHAPE[3]) + program % PER * WIDTH + unit % WIDTH + unit // WIDTH * SHAPE[3]


@triton.jit
def angles(heads, program, WIDTH: tl.constexpr, SHAPE: tl.constexpr):
    """(cosines, sines) [WIDTH] of a program's lanes, and the token's slot."""
    lane = program % (SHAPE[3] // WIDTH) * WIDTH + tl.arange(0, WIDTH)
    at = heads[0] + tl.load(heads[1]).to(tl.int64) * (2 * SHAPE[3]) + lane
    return tl.load(at), tl.load(at + SHAPE[3]), tl.load(heads[2]).to(tl.int64)


@triton.jit
def place(y, cos, sin, slot, heads, q_ptr, program, WIDTH: tl.constexpr, SHAPE: tl.constexpr):
    """y [2 · WIDTH], what a program's units are, rounded as the product's result is, rotated and written."""
    PER: tl.constexpr = SHAPE[3] // WIDTH
    kind: tl.constexpr = q_ptr.dtype.element_ty
    first, second = tl.split(y.to(kind).to(tl.float32).reshape(2, WIDTH).permute(1, 0))
    head, lane = program // PER, program % PER * WIDTH + tl.arange(0, WIDTH)
    if head >= SHAPE[0] + SHAPE[1]:
        run = (slot // SHAPE[2] * SHAPE[1] + head - SHAPE[0] - SHAPE[1]) * SHAPE[2] + slot % SHAPE[2]
        at = heads[4] + run * (2 * SHAPE[3]) + lane
        tl.store(at, first.to(kind), slot >= 0)
        tl.store(at + SHAPE[3], second.to(kind), slot >= 0)
    else:
        low, high = (first * cos - second * sin).to(kind), (second * cos + first * sin).to(kind)
        run = (slot // SHAPE[2] * SHAPE[1] + head - SHAPE[0]) * SHAPE[2] + slot % SHAPE[2]
        is_q = head < SHAPE[0]
        key, query = heads[3] + run * (2 * SHAPE[3]) + lane, q_ptr + head * (2 * SHAPE[3]) + lane
        tl.store(query, low, is_q)
        tl.store(query + SHAPE[3], high, is_q)
        tl.store(key, low, (slot >= 0) & (head >= SHAPE[0]))
        tl.store(key + SHAPE[3], high, (slot >= 0) & (head >= SHAPE[0]))
