"""Paged prefill for Hopper (compute capability 9.0) in Gluon: the copy engine fetches K and V while two warpgroups compute.

One warp walks the block table and asks the tensor copy engine for each page, by halves of 64 columns (the widest swizzled box),
into the rows of a KV tile; two consumer warpgroups take 64 query rows each. A consumer starts the next tile's q·kᵀ before it
adds the current tile's weights · v, so that the softmax runs beside the tensor cores. Query rows are packed as in `prefill`.
"""

import torch
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier, tma, warpgroup_mma, warpgroup_mma_wait
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from pagecast_kernels import configs

ROWS = 128  # query rows of a program, half for each consumer


@gluon.jit
def _find(starts_ptr, tile, sequences, origin, TOKENS: gl.constexpr, STEPS: gl.constexpr):
    """The sequence whose query tiles include `tile`: prefill.find_sequence."""
    low = tile * 0
    high = low + sequences
    for _ in gl.static_range(STEPS):
        middle = (low + high) // 2
        before = ((gl.load(starts_ptr + middle) - origin) // TOKENS + middle <= tile) & (middle < sequences)
        low = gl.where(before, middle, low)
        high = gl.where(before, high, middle)
    return low


@gluon.jit
def _produce(
    k_desc, v_desc, pages_of, bars, table, kv_head, length, tiles, spare,
    NUM_KV_HEADS: gl.constexpr, BLOCK_SIZE: gl.constexpr, PAGES: gl.constexpr, DEPTH: gl.constexpr,
):  # fmt: skip
    """Keep DEPTH tiles of K and V in flight. Pages past the sequence's end come from row `spare`, outside the cache: zeros."""
    k0, k1, v0, v1 = pages_of
    k_full, k_empty, v_full, v_empty = bars
    TILE_BYTES: gl.constexpr = PAGES * BLOCK_SIZE * 128 * 2
    for tile in range(tiles):
        stage = tile % DEPTH
        phase = (tile // DEPTH & 1) ^ 1
        first = tile * PAGES
        mbarrier.wait(k_empty.index(stage), phase)
        mbarrier.expect(k_full.index(stage), TILE_BYTES)
        for page in gl.static_range(PAGES):
            index = first + page
            held = index * BLOCK_SIZE < length
            block = gl.load(table + index, mask=held, other=0)
            row = gl.where(held, (block * NUM_KV_HEADS + kv_head) * BLOCK_SIZE, spare)
            tma.async_copy_global_to_shared(k_desc, [row, 0], k_full.index(stage), k0.index(stage * PAGES + page))
            tma.async_copy_global_to_shared(k_desc, [row, 64], k_full.index(stage), k1.index(stage * PAGES + page))
        mbarrier.wait(v_empty.index(stage), phase)
        mbarrier.expect(v_full.index(stage), TILE_BYTES)
        for page in gl.static_range(PAGES):
            index = first + page
            held = index * BLOCK_SIZE < length
            block = gl.load(table + index, mask=held, other=0)
            row = gl.where(held, (block * NUM_KV_HEADS + kv_head) * BLOCK_SIZE, spare)
            tma.async_copy_global_to_shared(v_desc, [row, 0], v_full.index(stage), v0.index(stage * PAGES + page))
            tma.async_copy_global_to_shared(v_desc, [row, 64], v_full.index(stage), v1.index(stage * PAGES + page))


@gluon.jit
def _softmax(scores, top, total, position, tile, plain, scale, S_LAYOUT: gl.constexpr, KV: gl.constexpr):
    """One step of the online softmax: (weights, maxima, sums, decay of what was added before). Tiles from `plain` on are masked."""
    if tile >= plain:
        token = tile * KV + gl.arange(0, KV, layout=gl.SliceLayout(0, S_LAYOUT))
        scores = gl.where(token[None, :] <= position[:, None], scores, float("-inf"))
    new_top = gl.maximum(top, gl.max(scores, 1) * scale)
    # A masked tile may hide all of a row, but the first tile never does: a maximum is finite from then on.
    weights = gl.exp2(scores * scale - new_top[:, None])
    decay = gl.exp2(top - new_top)
    return weights, new_top, total * decay + gl.sum(weights, 1), decay


@gluon.jit
def _clean(half, seen, LAYOUT: gl.constexpr):
    """Zero the rows of a V tile that lie past the sequence's end: they may hold anything, NaN included, and 0 · NaN is NaN."""
    value = half.load(LAYOUT)
    half.store(gl.where(seen[:, None], value, gl.zeros_like(value)))


@gluon.jit
def _consume(
    q_ptr, out_ptr, q0, q1, tiles_of, bars, place_of,
    HALF: gl.constexpr, NUM_KV_HEADS: gl.constexpr, GROUP: gl.constexpr, TOKENS: gl.constexpr, KV: gl.constexpr, DEPTH: gl.constexpr,
):  # fmt: skip
    """Attention of query rows HALF · 64 .. + 64 of the program over all its tiles."""
    k0, k1, v0, v1 = tiles_of
    k_full, k_empty, v_full, v_empty = bars
    begin, first, queries, context, length, kv_head, tiles, plain, scale = place_of
    S_LAYOUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, KV, 16])
    O_LAYOUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 64, 16])
    P_LAYOUT: gl.constexpr = gl.DotOperandLayout(0, O_LAYOUT, 2)
    IO: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [4, 1], [1, 0])
    V_IO: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [4, 1], [1, 0])
    row = HALF * 64 + gl.arange(0, 64, layout=gl.SliceLayout(1, IO))
    query = first + row // GROUP
    held = ((row < TOKENS * GROUP) & (query < queries))[:, None]
    source = ((begin + query).to(gl.int64) * NUM_KV_HEADS + kv_head) * (GROUP * 128) + row % GROUP * 128
    place = source[:, None] + gl.arange(0, 64, layout=gl.SliceLayout(0, IO))[None, :]
    q0.store(gl.load(q_ptr + place, mask=held, other=0.0))
    q1.store(gl.load(q_ptr + place + 64, mask=held, other=0.0))
    fence_async_shared()
    gl.thread_barrier()

    s_row = HALF * 64 + gl.arange(0, 64, layout=gl.SliceLayout(1, S_LAYOUT))
    position = context + first + s_row // GROUP
    top = gl.full([64], float("-inf"), gl.float32, layout=gl.SliceLayout(1, S_LAYOUT))
    total = gl.zeros([64], gl.float32, layout=gl.SliceLayout(1, S_LAYOUT))
    empty = gl.zeros([64, KV], gl.float32, layout=S_LAYOUT)
    o0 = gl.zeros([64, 64], gl.float32, layout=O_LAYOUT)
    o1 = gl.zeros([64, 64], gl.float32, layout=O_LAYOUT)

    mbarrier.wait(k_full.index(0), 0)
    s = warpgroup_mma(q0, k0.index(0).permute((1, 0)), empty, use_acc=False, is_async=True)
    s = warpgroup_mma(q1, k1.index(0).permute((1, 0)), s, is_async=True)
    scores = warpgroup_mma_wait(0, deps=[s])
    gl.thread_barrier()
    mbarrier.arrive(k_empty.index(0))
    weights, top, total, decay = _softmax(scores, top, total, position, 0, plain, scale, S_LAYOUT, KV)
    p = gl.convert_layout(weights.to(q_ptr.dtype.element_ty), P_LAYOUT)

    for tile in range(1, tiles):
        stage = tile % DEPTH
        before = (tile - 1) % DEPTH
        mbarrier.wait(k_full.index(stage), tile // DEPTH & 1)
        s = warpgroup_mma(q0, k0.index(stage).permute((1, 0)), empty, use_acc=False, is_async=True)
        s = warpgroup_mma(q1, k1.index(stage).permute((1, 0)), s, is_async=True)
        mbarrier.wait(v_full.index(before), (tile - 1) // DEPTH & 1)
        a0 = warpgroup_mma(p, v0.index(before), o0, is_async=True)
        a1 = warpgroup_mma(p, v1.index(before), o1, is_async=True)
        scores = warpgroup_mma_wait(2, deps=[s])
        weights, top, total, decay = _softmax(scores, top, total, position, tile, plain, scale, S_LAYOUT, KV)
        o0, o1 = warpgroup_mma_wait(0, deps=[a0, a1])
        gl.thread_barrier()
        mbarrier.arrive(k_empty.index(stage))
        mbarrier.arrive(v_empty.index(before))
        fade = gl.convert_layout(decay, gl.SliceLayout(1, O_LAYOUT))[:, None]
        o0 = o0 * fade
        o1 = o1 * fade
        p = gl.convert_layout(weights.to(q_ptr.dtype.element_ty), P_LAYOUT)

    last = (tiles - 1) % DEPTH
    mbarrier.wait(v_full.index(last), (tiles - 1) // DEPTH & 1)
    if tiles * KV > length:
        seen = (tiles - 1) * KV + gl.arange(0, KV, layout=gl.SliceLayout(1, V_IO)) < length
        _clean(v0.index(last), seen, V_IO)
        _clean(v1.index(last), seen, V_IO)
        fence_async_shared()
        gl.thread_barrier()
    a0 = warpgroup_mma(p, v0.index(last), o0, is_async=True)
    a1 = warpgroup_mma(p, v1.index(last), o1, is_async=True)
    o0, o1 = warpgroup_mma_wait(0, deps=[a0, a1])
    norm = gl.convert_layout(total, gl.SliceLayout(1, O_LAYOUT))[:, None]
    kind: gl.constexpr = out_ptr.dtype.element_ty
    gl.store(out_ptr + place, gl.convert_layout((o0 / norm).to(kind), IO), mask=held)
    gl.store(out_ptr + place + 64, gl.convert_layout((o1 / norm).to(kind), IO), mask=held)


@gluon.jit(do_not_specialize=["sequences"])
def _paged_prefill_hopper(
    q_ptr, k_desc, v_desc, table_ptr, rows_ptr, starts_ptr, lens_ptr, out_ptr, sequences, table_stride, scale, spare,
    NUM_KV_HEADS: gl.constexpr, GROUP: gl.constexpr, BLOCK_SIZE: gl.constexpr, TOKENS: gl.constexpr, STEPS: gl.constexpr,
    KV: gl.constexpr, DEPTH: gl.constexpr,
):  # fmt: skip
    PAGES: gl.constexpr = KV // BLOCK_SIZE
    kv_head = gl.program_id(0) % NUM_KV_HEADS
    tile = (gl.num_programs(0) - 1 - gl.program_id(0)) // NUM_KV_HEADS
    origin = gl.load(starts_ptr)
    sequence = _find(starts_ptr, tile, sequences, origin, TOKENS, STEPS)
    begin = gl.load(starts_ptr + sequence)
    queries = gl.load(starts_ptr + sequence + 1) - begin
    first = (tile - (begin - origin) // TOKENS - sequence) * TOKENS
    if first < queries:
        context = gl.load(lens_ptr + sequence) - queries
        table = table_ptr + gl.load(rows_ptr + sequence).to(gl.int64) * table_stride
        length = context + queries
        tiles = (context + gl.minimum(first + TOKENS, queries) + KV - 1) // KV
        plain = (context + first + 1) // KV

        kind: gl.constexpr = q_ptr.dtype.element_ty
        PAGE_LAYOUT: gl.constexpr = k_desc.layout
        # Each half of K and of V is a stack of pages to the producer and a stack of tiles to the consumers.
        k0_pages = gl.allocate_shared_memory(kind, [DEPTH * PAGES, BLOCK_SIZE, 64], PAGE_LAYOUT)
        k1_pages = gl.allocate_shared_memory(kind, [DEPTH * PAGES, BLOCK_SIZE, 64], PAGE_LAYOUT)
        v0_pages = gl.allocate_shared_memory(kind, [DEPTH * PAGES, BLOCK_SIZE, 64], PAGE_LAYOUT)
        v1_pages = gl.allocate_shared_memory(kind, [DEPTH * PAGES, BLOCK_SIZE, 64], PAGE_LAYOUT)
        k0 = k0_pages._reinterpret(kind, [DEPTH, KV, 64], PAGE_LAYOUT)
        k1 = k1_pages._reinterpret(kind, [DEPTH, KV, 64], PAGE_LAYOUT)
        v0 = v0_pages._reinterpret(kind, [DEPTH, KV, 64], PAGE_LAYOUT)
        v1 = v1_pages._reinterpret(kind, [DEPTH, KV, 64], PAGE_LAYOUT)
        q_smem = gl.allocate_shared_memory(kind, [4, 64, 64], PAGE_LAYOUT)
        k_full = gl.allocate_shared_memory(gl.int64, [DEPTH, 1], mbarrier.MBarrierLayout())
        k_empty = gl.allocate_shared_memory(gl.int64, [DEPTH, 1], mbarrier.MBarrierLayout())
        v_full = gl.allocate_shared_memory(gl.int64, [DEPTH, 1], mbarrier.MBarrierLayout())
        v_empty = gl.allocate_shared_memory(gl.int64, [DEPTH, 1], mbarrier.MBarrierLayout())
        for stage in gl.static_range(DEPTH):
            mbarrier.init(k_full.index(stage), count=1)
            mbarrier.init(k_empty.index(stage), count=2)
            mbarrier.init(v_full.index(stage), count=1)
            mbarrier.init(v_empty.index(stage), count=2)
        fence_async_shared()
        gl.thread_barrier()
        tiles_of, bars = (k0, k1, v0, v1), (k_full, k_empty, v_full, v_empty)
        pages_of = (k0_pages, k1_pages, v0_pages, v1_pages)
        place = (begin, first, queries, context, length, kv_head, tiles, plain, scale)
        gl.warp_specialize(
            [
                (_consume, (
                    q_ptr, out_ptr, q_smem.index(0), q_smem.index(1), tiles_of, bars, place, 0, NUM_KV_HEADS, GROUP, TOKENS, KV, DEPTH)),
                (_consume, (
                    q_ptr, out_ptr, q_smem.index(2), q_smem.index(3), tiles_of, bars, place, 1, NUM_KV_HEADS, GROUP, TOKENS, KV, DEPTH)),
                (_produce, (
                    k_desc, v_desc, pages_of, bars, table, kv_head, length, tiles, spare, NUM_KV_HEADS, BLOCK_SIZE, PAGES, DEPTH)),
            ],
            [4, 1],
            [240, 24],
        )  # fmt: skip


def suits(q: Tensor, k_cache: Tensor, window: int, softcap: float) -> bool:
    """Whether this kernel can take the case: Hopper, head size 128, 16-bit, no window or soft-cap, groups and blocks that fit."""
    heads, size, dim = k_cache.shape[1:]
    fits = dim == 128 and q.element_size() == 2 and k_cache.dtype == q.dtype and q.shape[1] // heads <= 64 and 8 <= size <= 128
    return fits and not window and not softcap and configs.is_hopper(q.device)


def launch(
    q: Tensor, k_cache: Tensor, v_cache: Tensor, block_table: Tensor, rows: Tensor, query_start_loc: Tensor, seq_lens: Tensor, scale: float,
    max_query_len: int, out: Tensor, config: configs.HopperPrefill,
) -> Tensor:  # fmt: skip
    """See reference.paged_prefill; `suits` must hold."""
    (tokens, num_heads, _), sequences = q.shape, rows.shape[0]
    num_blocks, num_kv_heads, block_size, _ = k_cache.shape
    group = num_heads // num_kv_heads
    per_tile = ROWS // group
    tiles = min(tokens, max_query_len * sequences) // per_tile + sequences
    kind = gl.bfloat16 if q.dtype == torch.bfloat16 else gl.float16
    layout = gl.NVMMASharedLayout.get_default_for([block_size, 64], kind)
    cache_rows = num_blocks * num_kv_heads * block_size
    k_desc, v_desc = (TensorDescriptor(cache, [cache_rows, 128], [128, 1], [block_size, 64], layout) for cache in (k_cache, v_cache))
    tile = max(config.tile, block_size)
    _paged_prefill_hopper[(tiles * num_kv_heads,)](
        q, k_desc, v_desc, block_table, rows, query_start_loc, seq_lens, out, sequences, block_table.stride(0),
        configs.score_scale(scale, 0.0)[0], cache_rows, num_kv_heads, group, block_size, per_tile,
        configs.log2_ceil(configs.lanes_for(sequences)) + 1, tile, max(config.stages * config.tile // tile, 2), num_warps=4,
    )  # fmt: skip
    return out
