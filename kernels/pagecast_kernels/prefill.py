"""Paged prefill attention: chunks of query tokens, causally, against a paged cache that already holds their K and V.

A program takes ROWS query rows of one KV head: consecutive tokens times the heads that share the KV head, so short chunks fill
the tensor-core tile and the causal edge is narrow. KV tiles before the edge run without a mask; the few on it are masked.
The programs with the most KV start first, and those of one KV head side by side, to share it in L2.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from pagecast_kernels import configs
from pagecast_kernels.online_softmax import add_tile, capped, nothing_seen
from pagecast_kernels.paging import blocks_of, load_tile, runs_of


@triton.jit
def _steps(
    q, k_ptr, v_ptr, table, kv_head, position, length, start, stop, top, total, values, scale, softcap,
    NUM_KV_HEADS: tl.constexpr, BLOCK_SIZE: tl.constexpr, DIM: tl.constexpr, LANES: tl.constexpr,
    WINDOW: tl.constexpr, SOFTCAP: tl.constexpr, TILE: tl.constexpr, STAGES: tl.constexpr, MASKED: tl.constexpr,
):  # fmt: skip
    """Go on with the online softmax over KV tokens [start, stop), start a multiple of TILE; MASKED tiles test every score."""
    offset = tl.arange(0, TILE)
    block = blocks_of(table, start + offset, length, BLOCK_SIZE)
    for first in tl.range(start, stop, TILE, num_stages=STAGES):
        token = first + offset
        run = runs_of(block, token % BLOCK_SIZE, kv_head, NUM_KV_HEADS, BLOCK_SIZE, DIM)
        k = load_tile(k_ptr, run, token < length, DIM, LANES, MASKED)
        v = load_tile(v_ptr, run, token < length, DIM, LANES, MASKED)
        k, v = k.to(q.dtype), v.to(q.dtype)  # from 8 bits, where the cache has them
        block = blocks_of(table, token + TILE, length, BLOCK_SIZE)
        scores = capped(tl.dot(q, k.trans(), input_precision="ieee") * scale, softcap, SOFTCAP)
        if MASKED:
            seen = token[None, :] <= position[:, None]
            if WINDOW > 0:
                seen = seen & (token[None, :] > position[:, None] - WINDOW)
            scores = tl.where(seen, scores, float("-inf"))
        top, total, values = add_tile(scores, v, top, total, values, MASKED)  # a row may see nothing of a masked tile
    return top, total, values


@triton.jit
def find_sequence(starts_ptr, tile, sequences, origin, TOKENS: tl.constexpr, STEPS: tl.constexpr):
    """The sequence whose query tiles include `tile`, by bisection: sequence n's begin at (starts[n] - origin) // TOKENS + n.

    origin: starts[0]. Tokens before it are nobody's, and get no tiles.
    """
    low = tile * 0
    high = low + sequences
    for _ in tl.static_range(STEPS):
        middle = (low + high) // 2
        before = ((tl.load(starts_ptr + middle) - origin) // TOKENS + middle <= tile) & (middle < sequences)
        low = tl.where(before, middle, low)
        high = tl.where(before, high, middle)
    return low


@triton.jit(do_not_specialize=["sequences"])
def _paged_prefill(
    q_ptr, k_ptr, v_ptr, table_ptr, rows_ptr, starts_ptr, lens_ptr, out_ptr,
    sequences, table_stride, scale, softcap, k_scale_ptr, v_scale_ptr,
    NUM_KV_HEADS: tl.constexpr, GROUP: tl.constexpr, BLOCK_SIZE: tl.constexpr, DIM: tl.constexpr, WINDOW: tl.constexpr,
    SOFTCAP: tl.constexpr, SCALED: tl.constexpr, ROWS: tl.constexpr, TOKENS: tl.constexpr, LANES: tl.constexpr, TILE: tl.constexpr,
    STAGES: tl.constexpr, STEPS: tl.constexpr,
):  # fmt: skip
    kv_head = tl.program_id(0) % NUM_KV_HEADS
    tile = (tl.num_programs(0) - 1 - tl.program_id(0)) // NUM_KV_HEADS
    origin = tl.load(starts_ptr)
    sequence = find_sequence(starts_ptr, tile, sequences, origin, TOKENS, STEPS)
    begin = tl.load(starts_ptr + sequence)
    queries = tl.load(starts_ptr + sequence + 1) - begin
    first = (tile - (begin - origin) // TOKENS - sequence) * TOKENS
    if first >= queries:
        return
    length = tl.load(lens_ptr + sequence)
    context = length - queries
    row, lane = tl.arange(0, ROWS), tl.arange(0, LANES)
    query = first + row // GROUP
    held = ((row < TOKENS * GROUP) & (query < queries))[:, None] & (lane < DIM)[None, :]
    source = ((begin + query).to(tl.int64) * NUM_KV_HEADS + kv_head) * (GROUP * DIM) + row % GROUP * DIM
    q = tl.load(q_ptr + source[:, None] + lane[None, :], held, 0.0)
    table = table_ptr + tl.load(rows_ptr + sequence).to(tl.int64) * table_stride
    if SCALED:
        q = q.to(tl.float16)
        scale *= tl.load(k_scale_ptr + kv_head)

    # Every row sees the tokens up to its position: tiles wholly at or before the first row's need no causal mask.
    position = context + query
    stop = context + tl.minimum(first + TOKENS, queries)
    plain_stop = (context + first + 1) // TILE * TILE
    start = tile * 0
    plain_start = start
    if WINDOW > 0:
        # Likewise, tiles wholly inside the last row's window need no window mask.
        start = tl.maximum(context + first + 1 - WINDOW, 0) // TILE * TILE
        plain_start = tl.maximum((stop - WINDOW + TILE - 1) // TILE * TILE, start)
        plain_start = tl.minimum(plain_start, tl.maximum(plain_stop, start))
        plain_stop = tl.maximum(plain_stop, plain_start)
    top, total, values = nothing_seen(ROWS, LANES)
    if WINDOW > 0:
        top, total, values = _steps(
            q, k_ptr, v_ptr, table, kv_head, position, length, start, plain_start, top, total, values, scale, softcap,
            NUM_KV_HEADS, BLOCK_SIZE, DIM, LANES, WINDOW, SOFTCAP, TILE, STAGES, True,
        )  # fmt: skip
    top, total, values = _steps(
        q, k_ptr, v_ptr, table, kv_head, position, length, plain_start, plain_stop, top, total, values, scale, softcap,
        NUM_KV_HEADS, BLOCK_SIZE, DIM, LANES, WINDOW, SOFTCAP, TILE, STAGES, False,
    )  # fmt: skip
    top, total, values = _steps(
        q, k_ptr, v_ptr, table, kv_head, position, length, plain_stop, stop, top, total, values, scale, softcap,
        NUM_KV_HEADS, BLOCK_SIZE, DIM, LANES, WINDOW, SOFTCAP, TILE, STAGES, True,
    )  # fmt: skip
    if SCALED:
        values *= tl.load(v_scale_ptr + kv_head)
    tl.store(out_ptr + source[:, None] + lane[None, :], values / total[:, None], held)


def paged_prefill(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    block_table: Tensor,
    rows: Tensor,
    query_start_loc: Tensor,
    seq_lens: Tensor,
    scale: float,
    *,
    max_query_len: int,
    window: int = 0,
    softcap: float = 0.0,
    out: Tensor | None = None,
    config: configs.Prefill | configs.HopperPrefill | None = None,
    k_scale: Tensor | None = None,
    v_scale: Tensor | None = None,
) -> Tensor:
    """See reference.paged_prefill. q, caches and out are contiguous. config overrides the launch table.

    max_query_len · N bounds the tokens of the chunks, as does T: the grid covers the smaller.
    """
    (tokens, num_heads, dim), sequences = q.shape, rows.shape[0]
    num_kv_heads, block_size = k_cache.shape[1:3]
    group = num_heads // num_kv_heads
    out = torch.zeros_like(q) if out is None else out
    if not tokens or not sequences:
        return out
    if configs.is_hopper(q.device):
        from pagecast_kernels import prefill_hopper  # Gluon, which only this GPU needs

        if config is None and prefill_hopper.suits(q, k_cache, window, softcap):
            config = configs.HOPPER_PREFILL
    if k_scale is not None:
        configs.check_e4m3(q.device)
    config = configs.prefill(dim, q.device, k_cache.element_size()) if config is None else config
    if isinstance(config, configs.HopperPrefill):
        return prefill_hopper.launch(
            q, k_cache, v_cache, block_table, rows, query_start_loc, seq_lens, scale, max_query_len, out, config
        )  # fmt: skip
    per_tile = max(config.rows // group, 1)
    tiles = min(tokens, max_query_len * sequences) // per_tile + sequences
    factor, cap = configs.score_scale(scale, softcap)
    _paged_prefill[(tiles * num_kv_heads,)](
        q, k_cache, v_cache, block_table, rows, query_start_loc, seq_lens, out, sequences, block_table.stride(0), factor, cap,
        k_scale, v_scale, num_kv_heads, group, block_size, dim, window, softcap != 0.0, k_scale is not None,
        max(config.rows, triton.next_power_of_2(group)), per_tile, triton.next_power_of_2(dim), config.tile, config.stages,
        configs.log2_ceil(configs.lanes_for(sequences)) + 1, num_warps=config.warps,
    )  # fmt: skip
    return out
