"""Paged decode for Hopper over a cache of e4m3, in Gluon: `decode_hopper`'s way of fetching, and products the other way round.

A warpgroup's product reads its left operand from registers and its right one from shared memory, and e4m3 has to become float16 between
the two. So K and V are the left operands, converted on their way from shared memory, tokens being rows of k · qᵀ and lanes rows of
vᵀ · wᵀ; queries and weights, which are few, are the right ones. Bytes travel as 16-bit words of two neighbouring lanes, as in
`decode_bytes`. Each word of K becomes two lanes of one register: a register of two words lies in two products, and the queries' lanes are
sorted accordingly. Registers of V hold two tokens, so that even and odd lanes part instead.
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
from pagecast_kernels.decode_bytes import SPLIT
from pagecast_kernels.decode_flat import TileList
from pagecast_kernels.hopper_tiles import arrive, block_ids, entry, ring_barriers, take_turn, zero_padding
from pagecast_kernels.shares import head_share_of

_PAIRS = gl.constexpr("""{
.reg .b16 l, h;
mov.b32 {l, h}, $2;
cvt.rn.f16x2.e4m3x2 $0, l;
cvt.rn.f16x2.e4m3x2 $1, h;
}""")
_LANES = gl.constexpr(SPLIT.value)


@triton.jit
def lane_of(column, part):
    """The lane of a head that lies in a column of one of the two products k · qᵀ: words 2n of a row are in the first, 2n + 1 in the
    second."""
    return column // 2 * 4 + column % 2 + 2 * part


@gluon.jit
def _view(pool, chunk, ROWS: gl.constexpr, KIND: gl.constexpr):
    """[ROWS, 64] of shared memory from a chunk on. A chunk is 8 rows of 64 words, 1 KiB: what a swizzle pattern covers."""
    return pool.index(chunk)._reinterpret(KIND, [ROWS, 64], pool.layout)


@gluon.jit
def _produce(
    k_desc, v_desc, tiles_ptr, blocks_ptr, pool, full, empty, begin, end, tiles, spare,
    NUM_KV_HEADS: gl.constexpr, BLOCK_SIZE: gl.constexpr, KV: gl.constexpr, DEPTH: gl.constexpr, IDS: gl.constexpr, FIRST: gl.constexpr,
):  # fmt: skip
    """Keep DEPTH tiles of K and V in flight, from chunk FIRST on. Pages past the sequence's end come from row `spare`, outside the cache:
    zeros."""
    BOX: gl.constexpr = KV // IDS
    kv_head, tile = begin // tiles, begin % tiles
    _, first, _, left = entry(tiles_ptr, tile)
    ids = block_ids(blocks_ptr, tile, IDS)
    stage, phase = begin * 0, begin * 0 + 1
    gdc_wait()
    for _ in range(begin, end):
        # What the next tile is, a tile ahead.
        last = tile + 1 == tiles
        next_tile = gl.where(last, 0, tile + 1)
        next_head = gl.where(last, kv_head + 1, kv_head)
        _, next_first, _, next_left = entry(tiles_ptr, next_tile)
        next_ids = block_ids(blocks_ptr, next_tile, IDS)

        ready = full.index(stage)
        mbarrier.wait(empty.index(stage), phase)
        mbarrier.expect(ready, 2 * KV * 128)
        inner = (tile - first) * KV % BLOCK_SIZE
        for value in gl.static_range(2):
            for page in gl.static_range(IDS):
                row = (ids[page] * NUM_KV_HEADS + kv_head) * BLOCK_SIZE + inner
                row = gl.where(page * BOX < left, row, spare)
                into = _view(pool, FIRST + (2 * stage + value) * (KV // 8) + page * (BOX // 8), BOX, pool.dtype)
                if value:
                    tma.async_copy_global_to_shared(v_desc, [row, 0], ready, into)
                else:
                    tma.async_copy_global_to_shared(k_desc, [row, 0], ready, into)

        phase = gl.where(stage + 1 == DEPTH, phase ^ 1, phase)
        stage = gl.where(stage + 1 == DEPTH, 0, stage + 1)
        tile, kv_head, first, left, ids = next_tile, next_head, next_first, next_left, next_ids


@gluon.jit
def _queries(q_ptr, head_row, PART: gl.constexpr, GROUP: gl.constexpr, ROWS: gl.constexpr):
    """The lanes of a KV head's query heads that belong to a product, [ROWS, 64], as they are; rows past GROUP are zeros."""
    L: gl.constexpr = gl.BlockedLayout([1, 4], [2, 16], [4, 1], [1, 0])
    row, column = gl.arange(0, ROWS, layout=gl.SliceLayout(1, L)), gl.arange(0, 64, layout=gl.SliceLayout(0, L))
    at = q_ptr + head_row * 128 + row[:, None] * 128 + lane_of(column, PART)[None, :]
    return gl.load(at, mask=(row < GROUP)[:, None], other=0.0)


@gluon.jit
def _scores(pool, chunk, ROWS: gl.constexpr, LAYOUT: gl.constexpr, WORDS: gl.constexpr):
    """k · qᵀ [64, ROWS] of the 64 tokens whose keys lie from a chunk on."""
    words = _view(pool, chunk, 64, pool.dtype).load(WORDS)
    even, odd = gl.inline_asm_elementwise(_PAIRS, "=r,=r,r", [words], (gl.float16, gl.float16), is_pure=True, pack=2)
    nothing = gl.zeros([64, ROWS], gl.float32, layout=LAYOUT)
    s = warpgroup_mma(even, _view(pool, 0, ROWS, gl.float16).permute((1, 0)), nothing, use_acc=False, is_async=True)
    s = warpgroup_mma(odd, _view(pool, ROWS // 8, ROWS, gl.float16).permute((1, 0)), s, is_async=True)
    s, _, _ = warpgroup_mma_wait(0, deps=[s, even, odd])
    return s


@gluon.jit
def _attend(
    o0, o1, top, total, pool, stage, left, scale, KV: gl.constexpr, ROWS: gl.constexpr, FIRST: gl.constexpr, LAYOUT: gl.constexpr
):  # fmt: skip
    """Add the tile that lies in a stage: (o0, o1, top, total), o0 of even and o1 of odd lanes [64, ROWS], top [ROWS], total [64, ROWS],
    to be summed up at the end. This thread is done with the stage."""
    PARTS: gl.constexpr = KV // 64
    WORDS: gl.constexpr = gl.DotOperandLayout(0, LAYOUT, 2)
    WEIGHTS_AT: gl.constexpr = 2 * (ROWS // 8)
    k_at = FIRST + stage * (2 * (KV // 8))
    v_at = k_at + KV // 8
    scores = ()
    for part in gl.static_range(PARTS):
        s = _scores(pool, k_at + part * 8, ROWS, LAYOUT, WORDS) * scale
        if left < KV:
            token = part * 64 + gl.arange(0, 64, layout=gl.SliceLayout(1, LAYOUT))
            s = gl.where((token < left)[:, None], s, float("-inf"))
        scores = scores + (s,)
    most = scores[0]
    for part in gl.static_range(1, PARTS):
        most = gl.maximum(most, scores[part])
    new_top = gl.maximum(top, gl.max(most, 0))  # finite: a tile has a token
    decay = gl.exp2(top - new_top)
    total = total * decay[None, :]
    for part in gl.static_range(PARTS):
        weights = gl.exp2(scores[part] - new_top[None, :])
        total = total + weights
        _view(pool, WEIGHTS_AT + part * (ROWS // 8), ROWS, gl.float16).store(weights.to(gl.float16).permute((1, 0)))
    o0, o1 = o0 * decay[None, :], o1 * decay[None, :]
    fence_async_shared()
    gl.thread_barrier()
    for part in gl.static_range(PARTS):
        words = _view(pool, v_at + part * 8, 64, pool.dtype).permute((1, 0)).load(WORDS)
        if left < KV:  # what lies past the end may be anything, NaN included, and 0 · NaN is NaN
            place = part * 64 + gl.arange(0, 64, layout=gl.SliceLayout(0, WORDS))
            words = gl.where((place < left)[None, :], words, gl.zeros_like(words))
        even, odd = gl.inline_asm_elementwise(_LANES, "=r,=r,r", [words], (gl.float16, gl.float16), is_pure=True, pack=2)
        shared = _view(pool, WEIGHTS_AT + part * (ROWS // 8), ROWS, gl.float16).permute((1, 0))
        a0, a1 = warpgroup_mma(even, shared, o0, is_async=True), warpgroup_mma(odd, shared, o1, is_async=True)
        o0, o1, _, _ = warpgroup_mma_wait(0, deps=[a0, a1, even, odd])
    return o0, o1, new_top, total


@gluon.jit
def _consume(
    q_ptr, tiles_ptr, lens_ptr, out_ptr, counters_ptr, parts_ptr, stats_ptr, k_scale_ptr, v_scale_ptr, pool, full, empty, program, begin,
    end, tiles, share, extra, batch, scale, NUM_KV_HEADS: gl.constexpr, GROUP: gl.constexpr, KV: gl.constexpr, DEPTH: gl.constexpr,
    ROWS: gl.constexpr, OWN: gl.constexpr, BY_HEAD: gl.constexpr, FIRST: gl.constexpr,
):  # fmt: skip
    """Attention of this program's share, tile by tile as the ring fills."""
    LAYOUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, ROWS, 16])
    head = gl.arange(0, ROWS, layout=gl.SliceLayout(0, LAYOUT))
    kind: gl.constexpr = out_ptr.dtype.element_ty
    programs = gl.num_programs(0)
    kv_head, tile = begin // tiles, begin % tiles
    place, first, own, left = entry(tiles_ptr, tile)
    take_turn()
    head_row = (place.to(gl.int64) * NUM_KV_HEADS + kv_head) * GROUP
    q0, q1 = _queries(q_ptr, head_row, 0, GROUP, ROWS), _queries(q_ptr, head_row, 1, GROUP, ROWS)
    zero_padding(lens_ptr, out_ptr, batch, NUM_KV_HEADS, GROUP, OWN, 128)
    stage, phase, at = begin * 0, begin * 0, begin
    while at < end:
        _view(pool, 0, ROWS, gl.float16).store(q0.to(gl.float16))
        _view(pool, ROWS // 8, ROWS, gl.float16).store(q1.to(gl.float16))
        fence_async_shared()
        gl.thread_barrier()
        head_begin = kv_head * tiles + first
        count = gl.minimum(head_begin + own, end) - at
        last = tile + count == tiles
        next_tile = gl.where(last, 0, tile + count)
        next_head = gl.where(last, kv_head + 1, kv_head)
        next_place, next_first, next_own, next_left = entry(tiles_ptr, next_tile)
        next_row = (next_place.to(gl.int64) * NUM_KV_HEADS + gl.minimum(next_head, NUM_KV_HEADS - 1)) * GROUP
        next_q0, next_q1 = _queries(q_ptr, next_row, 0, GROUP, ROWS), _queries(q_ptr, next_row, 1, GROUP, ROWS)
        k_scale, v_scale = scale * gl.load(k_scale_ptr + kv_head), gl.load(v_scale_ptr + kv_head)
        top = gl.full([ROWS], float("-inf"), gl.float32, layout=gl.SliceLayout(0, LAYOUT))
        total = gl.zeros([64, ROWS], gl.float32, layout=LAYOUT)
        o0 = gl.zeros([64, ROWS], gl.float32, layout=LAYOUT)
        o1 = gl.zeros([64, ROWS], gl.float32, layout=LAYOUT)
        for n in range(count):
            mbarrier.wait(full.index(stage), phase)
            o0, o1, top, total = _attend(o0, o1, top, total, pool, stage, left - n * KV, k_scale, KV, ROWS, FIRST, LAYOUT)
            gl.thread_barrier()
            mbarrier.arrive(empty.index(stage))
            phase = gl.where(stage + 1 == DEPTH, phase ^ 1, phase)
            stage = gl.where(stage + 1 == DEPTH, 0, stage + 1)

        sums = gl.sum(total, 0)
        # Pairs of an even and an odd lane.
        pair = gl.join(o0, o1)
        PAIR: gl.constexpr = pair.type.layout
        i = gl.arange(0, 64, layout=gl.SliceLayout(1, gl.SliceLayout(2, PAIR)))
        j = gl.arange(0, ROWS, layout=gl.SliceLayout(0, gl.SliceLayout(2, PAIR)))
        odd = gl.arange(0, 2, layout=gl.SliceLayout(0, gl.SliceLayout(1, PAIR)))
        where = j[None, :, None] * 128 + i[:, None, None] * 2 + odd[None, None, :]
        held = (j < GROUP)[None, :, None]
        if (head_begin >= begin) & (head_begin + own <= end):
            norm = gl.convert_layout(v_scale / sums, gl.SliceLayout(0, gl.SliceLayout(2, PAIR)))
            gl.store(out_ptr + head_row * 128 + where, (pair * norm[None, :, None]).to(kind), mask=held)
        else:
            part = 2 * program + (head_begin >= begin).to(gl.int32)
            gl.store(parts_ptr + part * (GROUP * 128) + where, pair * v_scale, mask=held)
            stat = stats_ptr + part * (2 * GROUP) + head
            gl.store(stat, top, mask=head < GROUP)
            gl.store(stat + GROUP, sums, mask=head < GROUP)
            arrive(
                kv_head, place, first, own, tiles, programs, share, extra, out_ptr, counters_ptr, parts_ptr, stats_ptr, head_row,
                NUM_KV_HEADS, GROUP, OWN, 128, BY_HEAD,
            )  # fmt: skip
        at += count
        kv_head, head_row, q0, q1 = next_head, next_row, next_q0, next_q1
        tile, place, first, own, left = next_tile, next_place, next_first, next_own, next_left


@gluon.jit(do_not_specialize=["batch"])
def _decode_hopper_bytes(
    q_ptr, k_desc, v_desc, lens_ptr, count_ptr, tiles_ptr, blocks_ptr, out_ptr, counters_ptr, parts_ptr, stats_ptr, k_scale_ptr,
    v_scale_ptr, batch, scale, spare,
    NUM_KV_HEADS: gl.constexpr, GROUP: gl.constexpr, BLOCK_SIZE: gl.constexpr, KV: gl.constexpr, DEPTH: gl.constexpr, ROWS: gl.constexpr,
    IDS: gl.constexpr, OWN: gl.constexpr, PRODUCER: gl.constexpr, BY_HEAD: gl.constexpr,
):  # fmt: skip
    # Query rows for either product, weights, then DEPTH times K and V.
    FIRST: gl.constexpr = (2 + KV // 64) * (ROWS // 8)
    pool = gl.allocate_shared_memory(gl.int16, [FIRST + DEPTH * 2 * (KV // 8), 8, 64], k_desc.layout)
    full, empty = ring_barriers(DEPTH)
    fence_async_shared()
    gl.thread_barrier()
    tiles = gl.load(count_ptr)  # of one KV head
    program, begin, end, share, extra = head_share_of(gl.program_id(0), gl.num_programs(0), tiles, NUM_KV_HEADS, BY_HEAD)
    if begin < end:
        gl.warp_specialize(
            [
                (_consume, (
                    q_ptr, tiles_ptr, lens_ptr, out_ptr, counters_ptr, parts_ptr, stats_ptr, k_scale_ptr, v_scale_ptr, pool, full, empty,
                    program, begin, end, tiles, share, extra, batch, scale, NUM_KV_HEADS, GROUP, KV, DEPTH, ROWS, OWN, BY_HEAD, FIRST)),
                (_produce, (
                    k_desc, v_desc, tiles_ptr, blocks_ptr, pool, full, empty, begin, end, tiles, spare,
                    NUM_KV_HEADS, BLOCK_SIZE, KV, DEPTH, IDS, FIRST)),
            ],
            [1],
            [PRODUCER],
        )  # fmt: skip
    else:
        take_turn()
        zero_padding(lens_ptr, out_ptr, batch, NUM_KV_HEADS, GROUP, OWN, 128)


def config_for(batch: int, num_kv_heads: int, group: int, device: torch.device | str) -> configs.HopperDecode | None:
    """Launch where this kernel is the faster one, None where decode is: 192 KiB of tiles in flight on every processor.

    Few sequences are shared by two programs a processor. Of more, four programs a processor, of one KV head each: of equal lengths they
    get whole sequences, or equal parts. Measured with 8 KV heads in groups of 4 on an H200, 30 November 2026.
    """
    pairs, processors = batch * num_kv_heads, configs.processors(device)
    if pairs <= configs.FEW_PAIRS:
        programs = configs.even(2 * processors)
        return configs.HopperDecode(tile=128, depth=3, programs=programs, registers=128, fetching=40)
    if group > 8:
        return None
    programs = max(configs.even(4 * processors) // num_kv_heads, 1) * num_kv_heads
    return configs.HopperDecode(tile=64, depth=3, programs=programs, registers=64, fetching=24, by_head=True)


def suits(q: Tensor, k_cache: Tensor, window: int = 0, softcap: float = 0.0) -> bool:
    """Whether this kernel can take a case: heads of size 128 of 16 bits, a cache of e4m3, neither window nor soft-cap, groups and blocks
    that fit. A tile of 128 lies in eight blocks at most: see decode_hopper.suits."""
    heads, size, dim = k_cache.shape[1:]
    kinds = q.element_size() == 2 and k_cache.dtype == torch.float8_e4m3fn
    return kinds and dim == 128 and q.shape[1] // heads <= 16 and size in (16, 32, 64, 128) and not window and not softcap


def launch_for(q: Tensor, k_cache: Tensor, window: int = 0, softcap: float = 0.0) -> configs.HopperDecode | None:
    """How a case over a cache of bytes is launched here; None where this kernel cannot take it or is the slower one."""
    (batch, heads, _), kv_heads = q.shape, k_cache.shape[1]
    return config_for(batch, kv_heads, heads // kv_heads, q.device) if suits(q, k_cache, window, softcap) else None


def launch(
    q: Tensor, k_cache: Tensor, v_cache: Tensor, seq_lens: Tensor, scale: float, k_scale: Tensor, v_scale: Tensor, tiles: TileList,
    workspace: DecodeWorkspace, out: Tensor, config: configs.HopperDecode, ahead: bool = False,
) -> Tensor:  # fmt: skip
    """decode.paged_decode over a list of tiles; config.tile is the list's, and `suits` must hold. ahead: as in decode_hopper.launch."""
    num_heads, (num_blocks, num_kv_heads, size, dim) = q.shape[1], k_cache.shape
    group, ids, rows = num_heads // num_kv_heads, max(tiles.tile // size, 1), num_blocks * num_kv_heads * size
    layout = gl.NVMMASharedLayout.get_default_for([8, 64], gl.int16)
    k_desc, v_desc = (
        TensorDescriptor(cache.view(torch.int16), [rows, dim // 2], [dim // 2, 1], [tiles.tile // ids, 64], layout)
        for cache in (k_cache, v_cache)
    )
    _decode_hopper_bytes[(config.programs,)](
        q, k_desc, v_desc, seq_lens, tiles.count, tiles.tiles, tiles.blocks, out, workspace.counters, workspace.parts, workspace.stats,
        k_scale, v_scale, q.shape[0], configs.score_scale(scale, 0.0)[0], rows,
        num_kv_heads, group, size, tiles.tile, config.depth, 8 if group <= 8 else 16, ids, triton.next_power_of_2(group), config.fetching,
        config.by_head, num_warps=4, maxnreg=config.registers, launch_pdl=ahead,
    )  # fmt: skip
    return out
