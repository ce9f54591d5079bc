"""What kernels for Hopper share, in Gluon: barriers of a ring; and those of decode what a list of tiles says, pages in shared memory,
padding, and how parts become one. Triton's kernels have `paging` and `shares` for it."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from pagecast_kernels.shares import head_owner


@gluon.jit
def ring_barriers(STAGES: gl.constexpr, CONSUMERS: gl.constexpr = 1):
    """(full, empty): a barrier of either kind for each stage of what a fetching warp hands over; a stage is empty when so many warpgroups
    have said so. The caller makes them known, by fence_async_shared and a thread barrier."""
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for stage in gl.static_range(STAGES):
        mbarrier.init(full.index(stage), count=1)
        mbarrier.init(empty.index(stage), count=CONSUMERS)
    return full, empty


@gluon.jit
def view(pool, chunk, ROWS: gl.constexpr):
    """[ROWS, 64] of shared memory from a chunk on. A chunk is 8 rows of 64 columns, 1 KiB: what a swizzle pattern covers."""
    return pool.index(chunk)._reinterpret(pool.dtype, [ROWS, 64], pool.layout)


@gluon.jit
def take_turn():
    """Wait for the end of the launch before, which may still run where this one was to begin early; from here on the next may begin, and
    wait in its turn. Before, only what the launch before did not write may be read: the list of tiles."""
    gdc_wait()
    gdc_launch_dependents()


@gluon.jit
def entry(tiles_ptr, tile):
    """(place in the batch, the list's first tile of its sequence, how many it has, tokens left) of a tile: decode_flat.TileList."""
    at = tiles_ptr + 4 * tile
    return gl.load(at), gl.load(at + 1), gl.load(at + 2), gl.load(at + 3)


@gluon.jit
def block_ids(blocks_ptr, tile, IDS: gl.constexpr):
    """The blocks that a tile lies in."""
    ids = ()
    for n in gl.static_range(IDS):
        ids = ids + (gl.load(blocks_ptr + tile * IDS + n),)
    return ids


@gluon.jit
def clean(half, seen, LAYOUT: gl.constexpr):
    """Zero rows of a page of V that lie past the sequence's end: they may hold anything, NaN included, and 0 · NaN is NaN."""
    value = half.load(LAYOUT)
    half.store(gl.where(seen[:, None], value, gl.zeros_like(value)))


@gluon.jit
def zero_padding(lens_ptr, out_ptr, batch, NUM_KV_HEADS: gl.constexpr, GROUP: gl.constexpr, OWN: gl.constexpr, DIM: gl.constexpr):
    """paging.zero_padding for this program's part of the batch."""
    lane = gl.arange(0, OWN * DIM, layout=gl.BlockedLayout([4], [32], [4], [0]))
    nothing = gl.zeros([OWN * DIM], out_ptr.dtype.element_ty, layout=gl.BlockedLayout([4], [32], [4], [0]))
    for padding in range(gl.program_id(0), batch, gl.num_programs(0)):
        if gl.load(lens_ptr + padding) == 0:
            for head in range(NUM_KV_HEADS):
                start = (gl.to_tensor(padding).to(gl.int64) * NUM_KV_HEADS + head) * (GROUP * DIM)
                gl.store(out_ptr + start + lane, nothing, mask=lane < GROUP * DIM)


@gluon.jit
def combine(
    parts_ptr, stats_ptr, out_ptr, first_program, last_program, head_row, GROUP: gl.constexpr, OWN: gl.constexpr, DIM: gl.constexpr
):  # fmt: skip
    """shares.add_shares and the store of its result: what programs first..last left, added in that order, PARTS at a time."""
    PARTS: gl.constexpr = 8 if OWN <= 4 else 32 // OWN
    L: gl.constexpr = gl.BlockedLayout([PARTS, 1, DIM // 32], [1, 1, 32], [1, 4, 1], [2, 1, 0])
    STATS: gl.constexpr = gl.SliceLayout(2, L)
    VALUES: gl.constexpr = gl.SliceLayout(0, L)
    row = gl.arange(0, OWN, layout=gl.SliceLayout(0, STATS))
    index = gl.arange(0, PARTS, layout=gl.SliceLayout(1, STATS))
    lane = gl.arange(0, DIM, layout=gl.SliceLayout(0, gl.SliceLayout(1, L)))
    top = gl.full([OWN], float("-inf"), gl.float32, layout=gl.SliceLayout(0, STATS))
    total = gl.zeros([OWN], gl.float32, layout=gl.SliceLayout(0, STATS))
    values = gl.zeros([OWN, DIM], gl.float32, layout=VALUES)
    for start in range(first_program, last_program + 1, PARTS):
        program = start + index
        slot = 2 * program + (program == first_program).to(gl.int32)
        held = (program <= last_program)[:, None] & (row < GROUP)[None, :]
        stat = stats_ptr + slot[:, None] * (2 * GROUP) + row[None, :]
        part_top = gl.load(stat, mask=held, other=float("-inf"), cache_modifier=".cg")
        part_total = gl.load(stat + GROUP, mask=held, other=0.0, cache_modifier=".cg")
        part_row = slot[:, None] * (GROUP * DIM) + row[None, :] * DIM
        part = gl.load(parts_ptr + part_row[:, :, None] + lane[None, None, :], mask=held[:, :, None], other=0.0, cache_modifier=".cg")
        new_top = gl.maximum(top, gl.max(part_top, 0))
        base = gl.where(new_top == float("-inf"), 0.0, new_top)  # rows past GROUP have no maximum
        weight = gl.exp2(part_top - base[None, :])
        decay = gl.exp2(top - base)
        total = total * decay + gl.sum(part_total * weight, 0)
        values = values * gl.convert_layout(decay, gl.SliceLayout(1, VALUES))[:, None] + gl.sum(part * weight[:, :, None], 0)
        top = new_top
    out_row, out_lane = gl.arange(0, OWN, layout=gl.SliceLayout(1, VALUES)), gl.arange(0, DIM, layout=gl.SliceLayout(0, VALUES))
    result = values / gl.convert_layout(total, gl.SliceLayout(1, VALUES))[:, None]
    place = out_ptr + head_row * DIM + out_row[:, None] * DIM + out_lane[None, :]
    gl.store(place, result.to(out_ptr.dtype.element_ty), mask=(out_row < GROUP)[:, None])


@gluon.jit
def arrive(
    kv_head, place, first, own, tiles, programs, share, extra, out_ptr, counters_ptr, parts_ptr, stats_ptr, head_row,
    NUM_KV_HEADS: gl.constexpr, GROUP: gl.constexpr, OWN: gl.constexpr, DIM: gl.constexpr, BY_HEAD: gl.constexpr,
):  # fmt: skip
    """This program's part of a sequence's head is left: the last of the head's programs to say so adds all of them up."""
    gl.thread_barrier()
    first_program = head_owner(kv_head, first, tiles, programs, share, extra, NUM_KV_HEADS, BY_HEAD)
    last_program = head_owner(kv_head, first + own - 1, tiles, programs, share, extra, NUM_KV_HEADS, BY_HEAD)
    counter = counters_ptr + place * NUM_KV_HEADS + kv_head
    if gl.atomic_add(counter, 1, sem="acq_rel") == last_program - first_program:
        combine(parts_ptr, stats_ptr, out_ptr, first_program, last_program, head_row, GROUP, OWN, DIM)
        gl.store(counter, 0)
