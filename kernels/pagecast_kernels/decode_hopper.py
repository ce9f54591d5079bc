"""Paged decode for Hopper (compute capability 9.0) in Gluon: `decode_flat` with a warp that does nothing but fetch.

Programs take shares of the same list of tiles. A producer warp asks the tensor copy engine for the pages of K and V, by halves of 64
columns (the widest swizzled box), and for the query rows of every (sequence, KV head) that begins; it fills a ring of stages whatever
they belong to, so that memory is read on while results are finished, stored and combined. A warpgroup computes, the other way round than
is usual: tokens are the rows of k · qᵀ and elements the rows of vᵀ · wᵀ, and the heads of a KV head, which are few, the columns. So eight
columns are computed for a group of four where queries as rows would be 64, which took a fifth as many multiplications as a step's products
and, on a chip held to its power, 2 % of the time of a step of 256. Weights go through shared memory. Columns do not meet, and nobody reads
what becomes of those past the group.
"""

import torch
import triton
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier, tma, warpgroup_mma, warpgroup_mma_wait
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor
from triton.language.extra.cuda import gdc_wait

from pagecast_kernels import configs
from pagecast_kernels.decode import DecodeWorkspace
from pagecast_kernels.decode_flat import TileList
from pagecast_kernels.hopper_tiles import arrive, block_ids, clean, entry, ring_barriers, take_turn, view, zero_padding
from pagecast_kernels.shares import head_share_of


@gluon.jit
def _produce(
    q_desc, k_desc, v_desc, tiles_ptr, blocks_ptr, pool, full, empty, begin, end, tiles, spare,
    NUM_KV_HEADS: gl.constexpr, GROUP: gl.constexpr, BLOCK_SIZE: gl.constexpr, KV: gl.constexpr, DEPTH: gl.constexpr,
    Q_ROWS: gl.constexpr, IDS: gl.constexpr, DIM: gl.constexpr,
):  # fmt: skip
    """Keep DEPTH tiles of K and V in flight. Pages past the sequence's end come from row `spare`, outside the cache: zeros.

    Query rows go to a slot of their own: with as many slots as stages, the one for a new sequence is free when the stage is.
    """
    BOX: gl.constexpr = KV // IDS
    HALF: gl.constexpr = KV // 8
    HALVES: gl.constexpr = DIM // 64
    SLOT: gl.constexpr = Q_ROWS // 8
    TILES_AT: gl.constexpr = (HALVES * DEPTH + 1) * SLOT
    TILE_BYTES: gl.constexpr = KV * DIM * 2 * 2
    Q_BYTES: gl.constexpr = Q_ROWS * DIM * 2
    kv_head, tile = begin // tiles, begin % tiles
    place, first, own, left = entry(tiles_ptr, tile)
    ids = block_ids(blocks_ptr, tile, IDS)
    stage, slot, phase = begin * 0, begin * 0, begin * 0 + 1
    gdc_wait()
    for at in range(begin, end):
        # What the next tile is, a tile ahead.
        last = tile + 1 == tiles
        next_tile = gl.where(last, 0, tile + 1)
        next_head = gl.where(last, kv_head + 1, kv_head)
        next_place, next_first, next_own, next_left = entry(tiles_ptr, next_tile)
        next_ids = block_ids(blocks_ptr, next_tile, IDS)

        fresh = (tile == first) | (at == begin)
        ready = full.index(stage)
        mbarrier.wait(empty.index(stage), phase)
        mbarrier.expect(ready, TILE_BYTES + Q_BYTES, pred=fresh)
        mbarrier.expect(ready, TILE_BYTES, pred=fresh == 0)
        q_row = (place * NUM_KV_HEADS + kv_head) * GROUP
        for half in gl.static_range(HALVES):
            into = view(pool, (half * DEPTH + slot) * SLOT, Q_ROWS)
            tma.async_copy_global_to_shared(q_desc, [q_row, half * 64], ready, into, pred=fresh)
        inner = (tile - first) * KV % BLOCK_SIZE
        for value in gl.static_range(2):
            for page in gl.static_range(IDS):
                row = (ids[page] * NUM_KV_HEADS + kv_head) * BLOCK_SIZE + inner
                row = gl.where(page * BOX < left, row, spare)
                for half in gl.static_range(HALVES):
                    into = view(pool, TILES_AT + ((2 * stage + value) * HALVES + half) * HALF + page * (BOX // 8), BOX)
                    if value:
                        tma.async_copy_global_to_shared(v_desc, [row, half * 64], ready, into)
                    else:
                        tma.async_copy_global_to_shared(k_desc, [row, half * 64], ready, into)

        slot = gl.where(tile + 1 == first + own, slot + 1, slot)
        slot = gl.where(slot == DEPTH, 0, slot)
        phase = gl.where(stage + 1 == DEPTH, phase ^ 1, phase)
        stage = gl.where(stage + 1 == DEPTH, 0, stage + 1)
        tile, kv_head, place, first, own, left, ids = next_tile, next_head, next_place, next_first, next_own, next_left, next_ids


@gluon.jit
def _attend(
    o0, o1, top, total, pool, stage, slot, left, scale, KV: gl.constexpr, DEPTH: gl.constexpr, ROWS: gl.constexpr, IDS: gl.constexpr,
    HALVES: gl.constexpr, LAYOUT: gl.constexpr,
):  # fmt: skip
    """Add the tile that lies in a stage: (o0, o1, top, total), o1 as it was where there is one half. This thread is done with the stage.

    o0, o1: [64 elements, ROWS heads]; top [ROWS]; total [KV, ROWS], to be summed up at the end.
    """
    BOX: gl.constexpr = KV // IDS
    HALF: gl.constexpr = KV // 8
    SLOT: gl.constexpr = ROWS // 8
    PAGE: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [4, 1], [1, 0])
    WEIGHTS_AT: gl.constexpr = HALVES * DEPTH * SLOT
    k_at = WEIGHTS_AT + SLOT + stage * (2 * HALVES * HALF)
    v_at = k_at + HALVES * HALF
    if (left < KV) & (left % BOX != 0):
        page = left // BOX
        seen = gl.arange(0, BOX, layout=gl.SliceLayout(1, PAGE)) < left % BOX
        for half in gl.static_range(HALVES):
            clean(view(pool, v_at + half * HALF + page * (BOX // 8), BOX), seen, PAGE)
        fence_async_shared()
        gl.thread_barrier()
    s = gl.zeros([KV, ROWS], gl.float32, layout=LAYOUT)
    for half in gl.static_range(HALVES):
        query = view(pool, (half * DEPTH + slot) * SLOT, ROWS).permute((1, 0))
        s = warpgroup_mma(view(pool, k_at + half * HALF, KV), query, s, use_acc=half > 0, is_async=True)
    scores = warpgroup_mma_wait(0, deps=[s])
    if left < KV:
        token = gl.arange(0, KV, layout=gl.SliceLayout(1, LAYOUT))
        scores = gl.where((token < left)[:, None], scores, float("-inf"))
    new_top = gl.maximum(top, gl.max(scores, 0) * scale)  # finite: a tile has a token
    weights = gl.exp2(scores * scale - new_top[None, :])
    decay = gl.exp2(top - new_top)
    total = total * decay[None, :] + weights
    shared = view(pool, WEIGHTS_AT, ROWS)
    shared.store(weights.to(pool.dtype).permute((1, 0)))
    o0, o1 = o0 * decay[None, :], o1 * decay[None, :]
    fence_async_shared()
    gl.thread_barrier()
    a0 = warpgroup_mma(view(pool, v_at, KV).permute((1, 0)), shared.permute((1, 0)), o0, is_async=True)
    if HALVES == 2:
        a1 = warpgroup_mma(view(pool, v_at + HALF, KV).permute((1, 0)), shared.permute((1, 0)), o1, is_async=True)
        o0, o1 = warpgroup_mma_wait(0, deps=[a0, a1])
    else:
        o0 = warpgroup_mma_wait(0, deps=[a0])
    return o0, o1, new_top, total


@gluon.jit
def _consume(
    tiles_ptr, lens_ptr, out_ptr, counters_ptr, parts_ptr, stats_ptr, pool, full, empty, program, begin, end, tiles, share, extra, batch,
    scale, NUM_KV_HEADS: gl.constexpr, GROUP: gl.constexpr, KV: gl.constexpr, DEPTH: gl.constexpr, Q_ROWS: gl.constexpr,
    IDS: gl.constexpr, OWN: gl.constexpr, DIM: gl.constexpr, BY_HEAD: gl.constexpr,
):  # fmt: skip
    """Attention of this program's share, tile by tile as the ring fills. Results are [64 elements, Q_ROWS heads]."""
    LAYOUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, Q_ROWS, 16])
    lane, head = gl.arange(0, 64, layout=gl.SliceLayout(1, LAYOUT)), gl.arange(0, Q_ROWS, layout=gl.SliceLayout(0, LAYOUT))
    where, held = head[None, :] * DIM + lane[:, None], (head < GROUP)[None, :]
    kind: gl.constexpr = out_ptr.dtype.element_ty
    programs = gl.num_programs(0)
    kv_head, tile = begin // tiles, begin % tiles
    place, first, own, left = entry(tiles_ptr, tile)
    take_turn()
    zero_padding(lens_ptr, out_ptr, batch, NUM_KV_HEADS, GROUP, OWN, DIM)
    stage, slot, phase, at = begin * 0, begin * 0, begin * 0, begin
    while at < end:
        head_begin = kv_head * tiles + first
        count = gl.minimum(head_begin + own, end) - at
        last = tile + count == tiles
        next_tile = gl.where(last, 0, tile + count)
        next_place, next_first, next_own, next_left = entry(tiles_ptr, next_tile)
        top = gl.full([Q_ROWS], float("-inf"), gl.float32, layout=gl.SliceLayout(0, LAYOUT))
        total = gl.zeros([KV, Q_ROWS], gl.float32, layout=LAYOUT)
        o0 = gl.zeros([64, Q_ROWS], gl.float32, layout=LAYOUT)
        o1 = gl.zeros([64, Q_ROWS], gl.float32, layout=LAYOUT)  # of columns 64 on, if there are any
        for n in range(count):
            mbarrier.wait(full.index(stage), phase)
            o0, o1, top, total = _attend(
                o0, o1, top, total, pool, stage, slot, left - n * KV, scale, KV, DEPTH, Q_ROWS, IDS, DIM // 64, LAYOUT
            )  # fmt: skip
            gl.thread_barrier()
            mbarrier.arrive(empty.index(stage))
            phase = gl.where(stage + 1 == DEPTH, phase ^ 1, phase)
            stage = gl.where(stage + 1 == DEPTH, 0, stage + 1)

        sums = gl.sum(total, 0)
        head_row = (place.to(gl.int64) * NUM_KV_HEADS + kv_head) * GROUP
        if (head_begin >= begin) & (head_begin + own <= end):
            into = out_ptr + head_row * DIM + where
            gl.store(into, (o0 / sums[None, :]).to(kind), mask=held)
            if DIM == 128:
                gl.store(into + 64, (o1 / sums[None, :]).to(kind), mask=held)
        else:
            part = 2 * program + (head_begin >= begin).to(gl.int32)
            part_at = parts_ptr + part * (GROUP * DIM) + where
            gl.store(part_at, o0, mask=held)
            if DIM == 128:
                gl.store(part_at + 64, o1, mask=held)
            stat = stats_ptr + part * (2 * GROUP) + head
            gl.store(stat, top, mask=head < GROUP)
            gl.store(stat + GROUP, sums, mask=head < GROUP)
            arrive(
                kv_head, place, first, own, tiles, programs, share, extra, out_ptr, counters_ptr, parts_ptr, stats_ptr, head_row,
                NUM_KV_HEADS, GROUP, OWN, DIM, BY_HEAD,
            )  # fmt: skip
        at += count
        slot = gl.where(slot + 1 == DEPTH, 0, slot + 1)
        kv_head = gl.where(last, kv_head + 1, kv_head)
        tile, place, first, own, left = next_tile, next_place, next_first, next_own, next_left


@gluon.jit(do_not_specialize=["batch"])
def _decode_hopper(
    q_desc, k_desc, v_desc, lens_ptr, count_ptr, tiles_ptr, blocks_ptr, out_ptr, counters_ptr, parts_ptr, stats_ptr, batch, scale, spare,
    NUM_KV_HEADS: gl.constexpr, GROUP: gl.constexpr, BLOCK_SIZE: gl.constexpr, KV: gl.constexpr, DEPTH: gl.constexpr,
    Q_ROWS: gl.constexpr, IDS: gl.constexpr, OWN: gl.constexpr, DIM: gl.constexpr, PRODUCER: gl.constexpr, BY_HEAD: gl.constexpr,
):  # fmt: skip
    # Query rows in DEPTH slots, by halves; weights; then DEPTH times K by halves and V by halves.
    CHUNKS: gl.constexpr = (DIM // 64 * DEPTH + 1) * (Q_ROWS // 8) + DIM // 64 * DEPTH * 2 * (KV // 8)
    pool = gl.allocate_shared_memory(out_ptr.dtype.element_ty, [CHUNKS, 8, 64], k_desc.layout)
    full, empty = ring_barriers(DEPTH)
    fence_async_shared()
    gl.thread_barrier()
    tiles = gl.load(count_ptr)  # of one KV head
    program, begin, end, share, extra = head_share_of(gl.program_id(0), gl.num_programs(0), tiles, NUM_KV_HEADS, BY_HEAD)
    if begin < end:
        gl.warp_specialize(
            [
                (_consume, (
                    tiles_ptr, lens_ptr, out_ptr, counters_ptr, parts_ptr, stats_ptr, pool, full, empty, program, begin, end, tiles, share,
                    extra, batch, scale, NUM_KV_HEADS, GROUP, KV, DEPTH, Q_ROWS, IDS, OWN, DIM, BY_HEAD)),
                (_produce, (
                    q_desc, k_desc, v_desc, tiles_ptr, blocks_ptr, pool, full, empty, begin, end, tiles, spare,
                    NUM_KV_HEADS, GROUP, BLOCK_SIZE, KV, DEPTH, Q_ROWS, IDS, DIM)),
            ],
            [1],
            [PRODUCER],
        )  # fmt: skip
    else:
        take_turn()
        zero_padding(lens_ptr, out_ptr, batch, NUM_KV_HEADS, GROUP, OWN, DIM)


def suits(q: Tensor, k_cache: Tensor, softcap: float = 0.0) -> bool:
    """Whether this kernel can take a case of decode_flat's: head size 64 or 128, 16-bit, no soft-cap, groups and blocks that fit.

    A tile lies in eight blocks at most: the ids of sixteen would not fit a fetching thread's registers.
    """
    heads, size, dim = k_cache.shape[1:]
    fits = dim in (64, 128) and q.element_size() == 2 and k_cache.dtype == q.dtype and q.shape[1] // heads <= 16
    return fits and size in (8, 16, 32, 64, 128) and size * dim >= 1024 and not softcap


def launch_for(q: Tensor, k_cache: Tensor, softcap: float = 0.0) -> configs.HopperDecode | None:
    """How a case of decode_flat's is launched here; None where this kernel cannot take it or is the slower one."""
    (batch, heads, dim), (kv_heads, size) = q.shape, k_cache.shape[1:3]
    return configs.decode_hopper(batch, kv_heads, heads // kv_heads, dim, size, q.device) if suits(q, k_cache, softcap) else None


def launch(
    q: Tensor, k_cache: Tensor, v_cache: Tensor, seq_lens: Tensor, scale: float, tiles: TileList, workspace: DecodeWorkspace, out: Tensor,
    config: configs.HopperDecode, ahead: bool = False,
) -> Tensor:  # fmt: skip
    """decode_flat.launch by this kernel; `suits` must hold. ahead: to begin before the launch before this one has ended, which did not
    make the list of tiles: see decode_flat.StepTiles."""
    (batch, num_heads, dim), (num_blocks, num_kv_heads, size, _) = q.shape, k_cache.shape
    group = num_heads // num_kv_heads
    kind = gl.bfloat16 if q.dtype == torch.bfloat16 else gl.float16
    ids, q_rows = max(tiles.tile // size, 1), 8 if group <= 8 else 16
    layout = gl.NVMMASharedLayout.get_default_for([8, 64], kind)
    cache_rows, box = num_blocks * num_kv_heads * size, tiles.tile // ids
    k_desc, v_desc = (TensorDescriptor(cache, [cache_rows, dim], [dim, 1], [box, 64], layout) for cache in (k_cache, v_cache))
    q_desc = TensorDescriptor(q, [batch * num_heads, dim], [dim, 1], [q_rows, 64], layout)
    _decode_hopper[(config.programs,)](
        q_desc, k_desc, v_desc, seq_lens, tiles.count, tiles.tiles, tiles.blocks, out,
        workspace.counters, workspace.parts, workspace.stats, batch, configs.score_scale(scale, 0.0)[0], cache_rows,
        num_kv_heads, group, size, tiles.tile, config.depth, q_rows, ids, triton.next_power_of_2(group), dim, config.fetching,
        config.by_head, num_warps=4, maxnreg=config.registers, launch_pdl=ahead,
    )  # fmt: skip
    return out
