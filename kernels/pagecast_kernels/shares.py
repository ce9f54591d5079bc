"""How decode's work is shared (stream-K): programs take equal contiguous shares of a list of KV tiles, cut wherever they fall.

What falls to one program is written at once. Otherwise each program leaves its part in scratch memory, two slots a program: its second
slot holds the part of what begins in its share, its first that of what began before.
"""

import triton
import triton.language as tl

from pagecast_kernels.online_softmax import add_parts, nothing_seen


@triton.jit
def share_of(program, programs, tiles):
    """(first tile, end, share, extra): the first `extra` programs take share + 1 tiles, the others share."""
    share, extra = tiles // programs, tiles % programs
    begin = program * share + tl.minimum(program, extra)
    return begin, begin + share + (program < extra).to(tl.int32), share, extra


@triton.jit
def owner(tile, share, extra):
    """The program that a tile falls to."""
    early = tile // (share + 1)
    late = (tile - extra * (share + 1)) // tl.maximum(share, 1) + extra
    return tl.where(tile < extra * (share + 1), early, late)


@triton.jit
def head_share_of(program, programs, tiles, NUM_KV_HEADS: tl.constexpr, BY_HEAD: tl.constexpr):
    """(place in the order of shares, begin, end, share, extra) of a launched program, for so many `tiles` of each KV head.

    BY_HEAD: of one head each, all cut alike, share and extra being one head's; `programs` is a multiple of heads. Those that start
    together take the same part of every head, so that all of a block is read at about the same time.
    """
    if BY_HEAD:
        each = programs // NUM_KV_HEADS
        head, part = program % NUM_KV_HEADS, program // NUM_KV_HEADS
        begin, end, share, extra = share_of(part, each, tiles)
        return head * each + part, head * tiles + begin, head * tiles + end, share, extra
    else:
        begin, end, share, extra = share_of(program, programs, tiles * NUM_KV_HEADS)
        return program, begin, end, share, extra


@triton.jit
def head_owner(kv_head, tile, tiles, programs, share, extra, NUM_KV_HEADS: tl.constexpr, BY_HEAD: tl.constexpr):
    """The place of the program that a tile of a KV head falls to."""
    if BY_HEAD:
        return kv_head * (programs // NUM_KV_HEADS) + owner(tile, share, extra)
    else:
        return owner(kv_head * tiles + tile, share, extra)


@triton.jit
def sequence_of(tile, tiles):
    """(the sequence that a tile belongs to, that sequence's first tile), of sequences with so many `tiles` each."""
    ends = tl.cumsum(tiles, 0)
    return tl.sum((ends <= tile).to(tl.int32), 0), tl.max(tl.where(ends <= tile, ends, 0), 0)


@triton.jit
def arrives_last(counter, first, last):
    """Say that this program's results are written; whether it is the last of programs first..last to say so.

    A `tl.debug_barrier()` goes before, so that every thread's stores come before the arrival; the last one's loads must bypass L1,
    which does not see other processors' writes.
    """
    return tl.atomic_add(counter, 1, sem="acq_rel") == last - first


@triton.jit
def team_of(program, first_program, last_program, TEAM: tl.constexpr):
    """(low, high, slot): the programs low..high that add up their parts among them, and where their sum goes, of what programs
    first..last left of one thing: TEAM neighbours, but all where these are no more than two teams."""
    many = last_program - first_program >= 2 * TEAM
    begin = program // TEAM * TEAM
    low = tl.where(many, tl.maximum(begin, first_program), first_program)
    high = tl.where(many, tl.minimum(begin + TEAM - 1, last_program), last_program)
    return low, high, 2 * low + (low == first_program).to(tl.int32)


@triton.jit
def store_part(parts_ptr, stats_ptr, slot, top, total, values, row, lane, inside, held, GROUP: tl.constexpr, DIM: tl.constexpr):
    """Leave a part: parts float32[slots, GROUP, DIM], stats float32[slots, 2, GROUP] (maxima, sums)."""
    slot = slot.to(tl.int64)
    stat = stats_ptr + slot * (2 * GROUP) + row
    tl.store(stat, top, inside)
    tl.store(stat + GROUP, total, inside)
    tl.store(parts_ptr + slot * (GROUP * DIM) + row[:, None] * DIM + lane[None, :], values, held)


@triton.jit
def add_shares(
    parts_ptr, stats_ptr, first_program, last_program, lane,
    GROUP: tl.constexpr, OWN: tl.constexpr, DIM: tl.constexpr, PARTS: tl.constexpr, MASKED: tl.constexpr, CACHE: tl.constexpr,
):  # fmt: skip
    """(total, values [OWN, lanes]) of the parts that programs first..last left of one thing, added in that order, PARTS at a time.

    OWN: GROUP's next power of two. MASKED: lanes may lie past DIM. CACHE: how to load.
    """
    _, total, values = add_members(
        parts_ptr, stats_ptr, first_program, first_program, last_program, lane, GROUP, OWN, DIM, PARTS, 1, MASKED, CACHE
    )  # fmt: skip
    return total, values


@triton.jit
def add_members(
    parts_ptr, stats_ptr, first_program, first, last, lane,
    GROUP: tl.constexpr, OWN: tl.constexpr, DIM: tl.constexpr, PARTS: tl.constexpr, TEAM: tl.constexpr, MASKED: tl.constexpr,
    CACHE: tl.constexpr,
):  # fmt: skip
    """(top, total, values) of the parts of programs first..last, those of a thing that first_program began; see add_shares.

    TEAM > 1: of the first program of each team of so many, which holds what its team left.
    """
    row, index = tl.arange(0, OWN), tl.arange(0, PARTS)
    top, total, values = nothing_seen(OWN, lane.shape[0])
    if TEAM > 1:
        first, last = first // TEAM, last // TEAM
    for start in range(first, last + 1, PARTS):
        program = start + index
        here = program <= last
        if TEAM > 1:
            program = tl.maximum(program * TEAM, first_program)
        slot = 2 * program + (program == first_program).to(tl.int32)
        held = here[:, None] & (row < GROUP)[None, :]
        stat = stats_ptr + slot[:, None] * (2 * GROUP) + row[None, :]
        part_top = tl.load(stat, held, float("-inf"), cache_modifier=CACHE)
        part_total = tl.load(stat + GROUP, held, 0.0, cache_modifier=CACHE)
        part = parts_ptr + slot[:, None, None] * (GROUP * DIM) + row[None, :, None] * DIM + lane[None, None, :]
        if MASKED:
            part_values = tl.load(part, held[:, :, None] & (lane < DIM)[None, None, :], 0.0, cache_modifier=CACHE)
        else:
            part_values = tl.load(part, held[:, :, None], 0.0, cache_modifier=CACHE)
        top, total, values = add_parts(part_top, part_total, part_values, top, total, values)
    return top, total, values
