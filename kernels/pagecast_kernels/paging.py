"""Where tokens and heads lie in a paged cache and beside it: the addresses that every attention kernel makes.

A cache is [blocks, KV heads, block size, WIDTH]; a block table holds the blocks of a sequence in order. LANES is WIDTH's next power of
two, as tiles have it; lanes past WIDTH are zeros.
"""

import triton
import triton.language as tl


@triton.jit
def blocks_of(table, token, length, BLOCK_SIZE: tl.constexpr):
    """The blocks that hold a sequence's tokens; 0 for tokens past its end, whose table entries say nothing.

    Loops load them a tile ahead, so that the addresses of K and V wait for no load.
    """
    return tl.load(table + token // BLOCK_SIZE, token < length, 0)


@triton.jit
def runs_of(block, place, kv_head, NUM_KV_HEADS: tl.constexpr, BLOCK_SIZE: tl.constexpr, WIDTH: tl.constexpr):
    """int64: where the tokens at `place` in their blocks begin in a cache, for one KV head."""
    return block.to(tl.int64) * (NUM_KV_HEADS * BLOCK_SIZE * WIDTH) + kv_head * (BLOCK_SIZE * WIDTH) + place * WIDTH


@triton.jit
def load_tile(cache_ptr, run, here, WIDTH: tl.constexpr, LANES: tl.constexpr, MASKED: tl.constexpr):
    """[tokens, LANES] from the starts `run`; where MASKED, zeros for tokens that are not `here`."""
    lane = tl.arange(0, LANES)
    source = cache_ptr + run[:, None] + lane[None, :]
    if MASKED and WIDTH == LANES:
        return tl.load(source, here[:, None], 0.0)
    elif MASKED:
        return tl.load(source, here[:, None] & (lane < WIDTH)[None, :], 0.0)
    elif WIDTH != LANES:
        return tl.load(source, (lane < WIDTH)[None, :], 0.0)
    else:
        return tl.load(source)


@triton.jit
def heads_at(ptr, head_row, row, lane, WIDTH: tl.constexpr):
    """Addresses [rows, lanes] of the heads from `head_row` on in a tensor [.., WIDTH]."""
    return ptr + head_row * WIDTH + row[:, None] * WIDTH + lane[None, :]


@triton.jit
def zero_padding(
    lens_ptr, out_ptr, batch, program, programs, held, row, lane,
    NUM_KV_HEADS: tl.constexpr, GROUP: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    """Write zeros for this program's part of the places in the batch that are padding: sequences of no tokens."""
    for padding in range(program, batch, programs):
        if tl.load(lens_ptr + padding) == 0:
            for head in range(NUM_KV_HEADS):
                head_row = (tl.full((), 0, tl.int64) + padding * NUM_KV_HEADS + head) * GROUP
                nothing = tl.zeros((row.shape[0], lane.shape[0]), out_ptr.dtype.element_ty)
                tl.store(heads_at(out_ptr, head_row, row, lane, WIDTH), nothing, held)
