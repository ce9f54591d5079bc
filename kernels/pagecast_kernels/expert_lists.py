"""Where a program of a grouped product finds its tile: a few (token, place) pairs of one expert's list."""

import triton
import triton.language as tl


@triton.jit
def tile_ends(counts_ptr, EXPERTS: tl.constexpr, EXPERT_LANES: tl.constexpr, ROWS: tl.constexpr):
    """int32[EXPERT_LANES]: behind each expert's tiles of ROWS pairs, the number of the next one's first. The last is that of all tiles."""
    index = tl.arange(0, EXPERT_LANES)
    lengths = tl.load(counts_ptr + index, index < EXPERTS, 0)
    return tl.cumsum((lengths + ROWS - 1) // ROWS, 0)


@triton.jit
def tile_pairs(tile, ends, counts_ptr, lists_ptr, tokens, ROWS: tl.constexpr):
    """The tile's expert, its pairs int32[ROWS], and which of them there are."""
    expert = tl.sum((ends <= tile).to(tl.int32), 0)
    place = (tile - tl.max(tl.where(ends <= tile, ends, 0), 0)) * ROWS + tl.arange(0, ROWS)
    held = place < tl.load(counts_ptr + expert)
    pair = tl.load(lists_ptr + expert.to(tl.int64) * tokens + place, held, 0)
    return expert, pair, held


@triton.jit
def tile_span(tile, counts_ptr, EXPERTS: tl.constexpr, EXPERT_LANES: tl.constexpr, HEIGHT: tl.constexpr):
    """(expert, place in its list of the tile's first pair, pairs from there to the list's end: none if there is no such tile)."""
    index = tl.arange(0, EXPERT_LANES)
    lengths = tl.load(counts_ptr + index, index < EXPERTS, 0)
    tiles = (lengths + HEIGHT - 1) // HEIGHT
    before = tl.cumsum(tiles, 0) - tiles
    own = (before <= tile) & (tile < before + tiles)
    expert = tl.sum(tl.where(own, index, 0), 0)
    place = tl.sum(tl.where(own, tile - before, 0), 0) * HEIGHT
    return expert, place, tl.sum(tl.where(own, lengths, 0), 0) - place
