"""latent.latent_decode for Hopper (compute capability 9.0) in Gluon, with a warp that does nothing but fetch: see decode_hopper.

Products are turned round: tokens, and then elements of a latent, are the 64 rows of a warpgroup's product and heads its columns. So no
row is padding, a tile of latents is both products' first operand as it lies in shared memory, and of a result of 512 elements for
sixteen heads each thread holds 64. Shares of the tiles and the parts that programs leave are latent's; the last program of a sequence to
leave one adds them up, which a launch of its own would take longer to begin with.
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
from pagecast_kernels.hopper_tiles import block_ids, clean, entry, ring_barriers, take_turn, view, zero_padding
from pagecast_kernels.shares import owner, share_of, team_of


@gluon.jit
def _produce(
    latent_desc, rope_desc, k_desc, v_desc, tiles_ptr, blocks_ptr, pool, full, empty, begin, end, spare,
    GROUP: gl.constexpr, BLOCK_SIZE: gl.constexpr, KV: gl.constexpr, DEPTH: gl.constexpr, ROWS: gl.constexpr, IDS: gl.constexpr,
    CHUNKS: gl.constexpr,
):  # fmt: skip
    """Keep DEPTH tiles in flight, each CHUNKS chunks of latents and one of rotated keys, of 64 columns. Pages past the sequence's end come
    from row `spare`, outside the cache: zeros.

    Queries go to a slot of their own: with as many slots as stages, the one for a new sequence is free when the stage is.
    """
    BOX: gl.constexpr = KV // IDS
    HALF: gl.constexpr = KV // 8
    SLOT: gl.constexpr = ROWS // 8
    TILES_AT: gl.constexpr = (DEPTH * (CHUNKS + 1) + 1) * SLOT
    TILE_BYTES: gl.constexpr = KV * 64 * 2 * (CHUNKS + 1)
    Q_BYTES: gl.constexpr = ROWS * 64 * 2 * (CHUNKS + 1)
    place, first, own, left = entry(tiles_ptr, begin)
    ids = block_ids(blocks_ptr, begin, IDS)
    stage, slot, phase = begin * 0, begin * 0, begin * 0 + 1
    gdc_wait()
    for tile in range(begin, end):
        next_tile = gl.where(tile + 1 == end, begin, tile + 1)  # what the next tile is, a tile ahead; there is always one to read
        next_place, next_first, next_own, next_left = entry(tiles_ptr, next_tile)
        next_ids = block_ids(blocks_ptr, next_tile, IDS)

        fresh = (tile == first) | (tile == begin)
        ready = full.index(stage)
        mbarrier.wait(empty.index(stage), phase)
        mbarrier.expect(ready, TILE_BYTES + Q_BYTES, pred=fresh)
        mbarrier.expect(ready, TILE_BYTES, pred=fresh == 0)
        for chunk in gl.static_range(CHUNKS):
            into = view(pool, (slot * (CHUNKS + 1) + chunk) * SLOT, ROWS)
            tma.async_copy_global_to_shared(latent_desc, [place * GROUP, chunk * 64], ready, into, pred=fresh)
        into = view(pool, (slot * (CHUNKS + 1) + CHUNKS) * SLOT, ROWS)
        tma.async_copy_global_to_shared(rope_desc, [place * GROUP, 0], ready, into, pred=fresh)
        inner, tile_at = (tile - first) * KV % BLOCK_SIZE, TILES_AT + stage * ((CHUNKS + 1) * HALF)
        for page in gl.static_range(IDS):
            row = gl.where(page * BOX < left, ids[page] * BLOCK_SIZE + inner, spare)
            for chunk in gl.static_range(CHUNKS + 1):
                into = view(pool, tile_at + chunk * HALF + page * (BOX // 8), BOX)
                if chunk == CHUNKS:
                    tma.async_copy_global_to_shared(k_desc, [row, 0], ready, into)
                else:
                    tma.async_copy_global_to_shared(v_desc, [row, chunk * 64], ready, into)

        slot = gl.where(tile + 1 == first + own, slot + 1, slot)
        slot = gl.where(slot == DEPTH, 0, slot)
        phase = gl.where(stage + 1 == DEPTH, phase ^ 1, phase)
        stage = gl.where(stage + 1 == DEPTH, 0, stage + 1)
        place, first, own, left, ids = next_place, next_first, next_own, next_left, next_ids


@gluon.jit
def _attend(
    values, top, total, pool, stage, slot, left, scale, KV: gl.constexpr, DEPTH: gl.constexpr, ROWS: gl.constexpr, IDS: gl.constexpr,
    CHUNKS: gl.constexpr, LAYOUT: gl.constexpr,
):  # fmt: skip
    """Add the tile that lies in a stage: (values, top, total). This thread is done with the stage.

    values: CHUNKS times [64 elements, ROWS heads]; top [ROWS]; total [KV, ROWS], to be summed up at the end.
    """
    BOX: gl.constexpr = KV // IDS
    HALF: gl.constexpr = KV // 8
    SLOT: gl.constexpr = ROWS // 8
    PAGE: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [4, 1], [1, 0])
    WEIGHTS_AT: gl.constexpr = DEPTH * (CHUNKS + 1) * SLOT
    query_at = slot * ((CHUNKS + 1) * SLOT)
    tile_at = WEIGHTS_AT + SLOT + stage * ((CHUNKS + 1) * HALF)
    lies = ()
    for chunk in gl.static_range(CHUNKS + 1):
        lies = lies + (tile_at + chunk * HALF,)
    if (left < KV) & (left % BOX != 0):
        page = left // BOX
        seen = gl.arange(0, BOX, layout=gl.SliceLayout(1, PAGE)) < left % BOX
        for chunk in gl.static_range(CHUNKS):
            clean(view(pool, lies[chunk] + page * (BOX // 8), BOX), seen, PAGE)
        fence_async_shared()
        gl.thread_barrier()
    s = gl.zeros([KV, ROWS], gl.float32, layout=LAYOUT)
    for chunk in gl.static_range(CHUNKS + 1):
        keys, query = view(pool, lies[chunk], KV), view(pool, query_at + chunk * SLOT, ROWS).permute((1, 0))
        s = warpgroup_mma(keys, query, s, use_acc=chunk > 0, is_async=True)
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
    faded = ()
    for chunk in gl.static_range(CHUNKS):
        faded = faded + (values[chunk] * decay[None, :],)
    fence_async_shared()
    gl.thread_barrier()
    added = ()
    for chunk in gl.static_range(CHUNKS):
        latents = view(pool, lies[chunk], KV).permute((1, 0))
        added = added + (warpgroup_mma(latents, shared.permute((1, 0)), faded[chunk], is_async=True),)
    return warpgroup_mma_wait(0, deps=added), new_top, total


@gluon.jit
def _load_part(parts_ptr, stats_ptr, slot, here, GROUP: gl.constexpr, ROWS: gl.constexpr, RANK: gl.constexpr, LAYOUT: gl.constexpr):
    """(top [ROWS], total [ROWS], values [ROWS, RANK]) of a slot, nothing unless `here`. Past L1, which sees no other program's writes."""
    row, lane = gl.arange(0, ROWS, layout=gl.SliceLayout(1, LAYOUT)), gl.arange(0, RANK, layout=gl.SliceLayout(0, LAYOUT))
    held, slot = (row < GROUP) & here, slot.to(gl.int64)
    part = parts_ptr + slot * (GROUP * RANK) + row[:, None] * RANK + lane[None, :]
    values = gl.load(part, mask=held[:, None], other=0.0, cache_modifier=".cg")
    stat = stats_ptr + slot * (2 * GROUP) + row
    top = gl.load(stat, mask=held, other=float("-inf"), cache_modifier=".cg")
    return top, gl.load(stat + GROUP, mask=held, other=0.0, cache_modifier=".cg"), values


@gluon.jit
def _add_parts(
    parts_ptr, stats_ptr, first_program, first, last, GROUP: gl.constexpr, ROWS: gl.constexpr, RANK: gl.constexpr, TEAM: gl.constexpr,
    LAYOUT: gl.constexpr,
):  # fmt: skip
    """shares.add_members, two parts at a time. Rows past GROUP come to anything."""
    top = gl.full([ROWS], float("-inf"), gl.float32, layout=gl.SliceLayout(1, LAYOUT))
    total = gl.zeros([ROWS], gl.float32, layout=gl.SliceLayout(1, LAYOUT))
    values = gl.zeros([ROWS, RANK], gl.float32, layout=LAYOUT)
    for start in range(first // TEAM, last // TEAM + 1, 2):
        one, two = gl.maximum(start * TEAM, first_program), (start + 1) * TEAM
        slot = 2 * one + (one == first_program).to(gl.int32)
        one_top, one_total, one_values = _load_part(parts_ptr, stats_ptr, slot, start >= 0, GROUP, ROWS, RANK, LAYOUT)
        two_top, two_total, two_values = _load_part(parts_ptr, stats_ptr, 2 * two, two <= last, GROUP, ROWS, RANK, LAYOUT)
        new_top = gl.maximum(top, gl.maximum(one_top, two_top))
        decay, weight, weight_two = gl.exp2(top - new_top), gl.exp2(one_top - new_top), gl.exp2(two_top - new_top)
        total = total * decay + one_total * weight + two_total * weight_two
        values = values * decay[:, None] + one_values * weight[:, None] + two_values * weight_two[:, None]
        top = new_top
    return top, total, values


@gluon.jit
def _write(out_ptr, place, total, values, GROUP: gl.constexpr, ROWS: gl.constexpr, RANK: gl.constexpr, LAYOUT: gl.constexpr):
    """A sequence's result."""
    row, lane = gl.arange(0, ROWS, layout=gl.SliceLayout(1, LAYOUT)), gl.arange(0, RANK, layout=gl.SliceLayout(0, LAYOUT))
    into = out_ptr + place.to(gl.int64) * (GROUP * RANK) + row[:, None] * RANK + lane[None, :]
    gl.store(into, (values / total[:, None]).to(out_ptr.dtype.element_ty), mask=(row < GROUP)[:, None])


@gluon.jit
def _arrive(
    place, first, own, share, extra, out_ptr, counters_ptr, teams_ptr, parts_ptr, stats_ptr,
    GROUP: gl.constexpr, ROWS: gl.constexpr, RANK: gl.constexpr, TEAM: gl.constexpr,
):  # fmt: skip
    """decode_flat._arrive: say that this program's part of a sequence is written; the last one to say so adds the parts, where they are
    many the last one of each team of programs its team's, and the last team's last one those."""
    LAYOUT: gl.constexpr = gl.BlockedLayout([1, 4], [1, 32], [4, 1], [1, 0])
    first_program, last_program = owner(first, share, extra), owner(first + own - 1, share, extra)
    low, high, slot = team_of(gl.program_id(0), first_program, last_program, TEAM)
    gl.thread_barrier()
    if gl.atomic_add(teams_ptr + slot, 1, sem="acq_rel") == high - low:
        gl.store(teams_ptr + slot, 0)
        top, total, values = _add_parts(parts_ptr, stats_ptr, first_program, low, high, GROUP, ROWS, RANK, 1, LAYOUT)
        if (low == first_program) & (high == last_program):
            _write(out_ptr, place, total, values, GROUP, ROWS, RANK, LAYOUT)
        else:
            row, lane = gl.arange(0, ROWS, layout=gl.SliceLayout(1, LAYOUT)), gl.arange(0, RANK, layout=gl.SliceLayout(0, LAYOUT))
            part, stat = parts_ptr + slot.to(gl.int64) * (GROUP * RANK), stats_ptr + slot.to(gl.int64) * (2 * GROUP) + row
            gl.thread_barrier()  # all threads have read the parts
            gl.store(part + row[:, None] * RANK + lane[None, :], values, mask=(row < GROUP)[:, None])
            gl.store(stat, top, mask=row < GROUP)
            gl.store(stat + GROUP, total, mask=row < GROUP)
            gl.thread_barrier()
            if gl.atomic_add(counters_ptr + place, 1, sem="acq_rel") == last_program // TEAM - first_program // TEAM:
                gl.store(counters_ptr + place, 0)
                _, all_total, all_values = _add_parts(
                    parts_ptr, stats_ptr, first_program, first_program, last_program, GROUP, ROWS, RANK, TEAM, LAYOUT
                )  # fmt: skip
                _write(out_ptr, place, all_total, all_values, GROUP, ROWS, RANK, LAYOUT)


@gluon.jit
def _consume(
    tiles_ptr, lens_ptr, out_ptr, counters_ptr, teams_ptr, parts_ptr, stats_ptr, pool, full, empty, begin, end, share, extra, batch, scale,
    GROUP: gl.constexpr, KV: gl.constexpr, DEPTH: gl.constexpr, ROWS: gl.constexpr, IDS: gl.constexpr, OWN: gl.constexpr,
    CHUNKS: gl.constexpr, TEAM: gl.constexpr,
):  # fmt: skip
    """Attention of this program's share, tile by tile as the ring fills."""
    LAYOUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, ROWS, 16])
    RANK: gl.constexpr = CHUNKS * 64
    lane, head = gl.arange(0, 64, layout=gl.SliceLayout(1, LAYOUT)), gl.arange(0, ROWS, layout=gl.SliceLayout(0, LAYOUT))
    held = (head < GROUP)[None, :]
    place, first, own, left = entry(tiles_ptr, begin)
    take_turn()
    zero_padding(lens_ptr, out_ptr, batch, 1, GROUP, OWN, RANK)
    stage, slot, phase, at = begin * 0, begin * 0, begin * 0, begin
    while at < end:
        count = gl.minimum(first + own, end) - at
        next_tile = gl.where(at + count == end, begin, at + count)
        next_place, next_first, next_own, next_left = entry(tiles_ptr, next_tile)
        top = gl.full([ROWS], float("-inf"), gl.float32, layout=gl.SliceLayout(0, LAYOUT))
        total = gl.zeros([KV, ROWS], gl.float32, layout=LAYOUT)
        values = ()
        for _ in gl.static_range(CHUNKS):
            values = values + (gl.zeros([64, ROWS], gl.float32, layout=LAYOUT),)
        for n in range(count):
            mbarrier.wait(full.index(stage), phase)
            values, top, total = _attend(
                values, top, total, pool, stage, slot, left - n * KV, scale, KV, DEPTH, ROWS, IDS, CHUNKS, LAYOUT
            )  # fmt: skip
            gl.thread_barrier()
            mbarrier.arrive(empty.index(stage))
            phase = gl.where(stage + 1 == DEPTH, phase ^ 1, phase)
            stage = gl.where(stage + 1 == DEPTH, 0, stage + 1)

        sums = gl.sum(total, 0)
        where = head[None, :] * RANK + lane[:, None]
        if (first >= begin) & (first + own <= end):
            into = out_ptr + place.to(gl.int64) * (GROUP * RANK) + where
            for chunk in gl.static_range(CHUNKS):
                gl.store(into + chunk * 64, (values[chunk] / sums[None, :]).to(out_ptr.dtype.element_ty), mask=held)
        else:
            part = (2 * gl.program_id(0) + (first >= begin).to(gl.int32)).to(gl.int64)
            for chunk in gl.static_range(CHUNKS):
                gl.store(parts_ptr + part * (GROUP * RANK) + where + chunk * 64, values[chunk], mask=held)
            stat = stats_ptr + part * (2 * GROUP) + head
            gl.store(stat, top, mask=head < GROUP)
            gl.store(stat + GROUP, sums, mask=head < GROUP)
            if TEAM > 0:
                _arrive(
                    place, first, own, share, extra, out_ptr, counters_ptr, teams_ptr, parts_ptr, stats_ptr, GROUP, ROWS, RANK, TEAM
                )  # fmt: skip
        at += count
        slot = gl.where(slot + 1 == DEPTH, 0, slot + 1)
        place, first, own, left = next_place, next_first, next_own, next_left


@gluon.jit(do_not_specialize=["batch"])
def _latent_decode_hopper(
    latent_desc, rope_desc, k_desc, v_desc, lens_ptr, count_ptr, tiles_ptr, blocks_ptr, out_ptr, counters_ptr, teams_ptr, parts_ptr,
    stats_ptr, batch, scale, spare,
    GROUP: gl.constexpr, BLOCK_SIZE: gl.constexpr, KV: gl.constexpr, DEPTH: gl.constexpr, ROWS: gl.constexpr, IDS: gl.constexpr,
    OWN: gl.constexpr, CHUNKS: gl.constexpr, PRODUCER: gl.constexpr, TEAM: gl.constexpr,
):  # fmt: skip
    # A slot of query rows a stage, weights, then the stages; all by chunks of 64 columns.
    POOL: gl.constexpr = (DEPTH * (CHUNKS + 1) + 1) * (ROWS // 8) + DEPTH * (CHUNKS + 1) * (KV // 8)
    pool = gl.allocate_shared_memory(out_ptr.dtype.element_ty, [POOL, 8, 64], k_desc.layout)
    full, empty = ring_barriers(DEPTH)
    fence_async_shared()
    gl.thread_barrier()
    begin, end, share, extra = share_of(gl.program_id(0), gl.num_programs(0), gl.load(count_ptr))
    if begin < end:
        gl.warp_specialize(
            [
                (_consume, (
                    tiles_ptr, lens_ptr, out_ptr, counters_ptr, teams_ptr, parts_ptr, stats_ptr, pool, full, empty, begin, end, share,
                    extra, batch, scale, GROUP, KV, DEPTH, ROWS, IDS, OWN, CHUNKS, TEAM)),
                (_produce, (
                    latent_desc, rope_desc, k_desc, v_desc, tiles_ptr, blocks_ptr, pool, full, empty, begin, end, spare,
                    GROUP, BLOCK_SIZE, KV, DEPTH, ROWS, IDS, CHUNKS)),
            ],
            [1],
            [PRODUCER],
        )  # fmt: skip
    else:
        take_turn()
        zero_padding(lens_ptr, out_ptr, batch, 1, GROUP, OWN, CHUNKS * 64)


def launch(
    q_latent: Tensor, q_rope: Tensor, k_cache: Tensor, v_cache: Tensor, seq_lens: Tensor, scale: float, tiles: TileList,
    workspace: DecodeWorkspace, out: Tensor, config: configs.HopperDecode, ahead: bool = False,
) -> None:  # fmt: skip
    """latent.latent_decode over a list of tiles of config.tile; see latent for what suits. Without teams, parts are left as they are.
    ahead: as in decode_hopper.launch."""
    (batch, heads, rank), size = q_latent.shape, v_cache.shape[2]
    kind = gl.bfloat16 if q_latent.dtype == torch.bfloat16 else gl.float16
    ids, rows = max(tiles.tile // size, 1), max(triton.next_power_of_2(heads), 8)
    layout = gl.NVMMASharedLayout.get_default_for([8, 64], kind)
    spare, box = v_cache.shape[0] * size, tiles.tile // ids
    k_desc, v_desc = (
        TensorDescriptor(cache, [spare, cache.shape[3]], [cache.shape[3], 1], [box, 64], layout) for cache in (k_cache, v_cache)
    )
    latent_desc, rope_desc = (
        TensorDescriptor(q, [batch * heads, q.shape[2]], [q.shape[2], 1], [rows, 64], layout) for q in (q_latent, q_rope)
    )
    _latent_decode_hopper[(config.programs,)](
        latent_desc, rope_desc, k_desc, v_desc, seq_lens, tiles.count, tiles.tiles, tiles.blocks, out,
        workspace.counters, workspace.teams, workspace.parts, workspace.stats,
        batch, configs.score_scale(scale, 0.0)[0], spare, heads, size, tiles.tile, config.depth, rows, ids,
        triton.next_power_of_2(heads), rank // 64, config.fetching, config.team, num_warps=4, maxnreg=config.registers,
        launch_pdl=ahead,
    )  # fmt: skip
