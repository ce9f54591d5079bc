"""Paged decode attention: one query token per sequence, split evenly over the chip whatever the lengths are (stream-K).

The work is a list of KV tiles of TILE tokens, ordered by sequence, KV head and position. A fixed number of programs takes
equal contiguous shares of it, cut wherever they fall, so ragged batches balance and one captured graph serves any lengths:
each program works out its share from `seq_lens` on the device. The query heads of a KV head are the rows of one tensor-core
tile, so that KV is read once. A (sequence, KV head) that falls to one program is written at once; otherwise each program
leaves its part (maximum, sum, weighted values) in the workspace and the last to arrive adds the parts in order, which makes
the result independent of who was last.
"""

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from pagecast_kernels import configs
from pagecast_kernels.decode_bytes import INTERPRETED, attend_bytes
from pagecast_kernels.online_softmax import add_tile, capped, nothing_seen, raise_top
from pagecast_kernels.paging import blocks_of, heads_at, load_tile, runs_of, zero_padding
from pagecast_kernels.shares import add_shares, arrives_last, owner, sequence_of, share_of, store_part


@dataclass(frozen=True)
class DecodeWorkspace:
    """Device memory of one launch at a time; launches of one stream may share it, whatever their shapes up to its size.

    counters int32[sequences · Hkv] and teams int32[2 · programs], zero between launches; parts float32[2 · programs, rows, D]; stats
    float32[2 · programs, 2, rows].
    """

    counters: Tensor
    teams: Tensor
    parts: Tensor
    stats: Tensor

    def check(self, pairs: int, programs: int) -> None:
        """Raises ValueError where a launch of so many (sequence, KV head) pairs and programs needs more."""
        held, room = self.counters.numel(), self.parts.shape[0] // 2
        if pairs > held or programs > room:
            wanted = f"{pairs} and {programs}"
            raise ValueError(f"the workspace is for {held} (sequence, KV head) pairs and {room} programs, the launch needs {wanted}")


@dataclass(frozen=True)
class PrefixResults:
    """Attention over tokens before skip int32[B], in `splits` summands: parts float32[B · Hq · splits, D], not yet divided; stats
    float32[.., 2], maxima in base 2 and sums."""

    skip: Tensor
    parts: Tensor
    stats: Tensor
    splits: int


def decode_workspace(max_seqs: int, num_heads: int, num_kv_heads: int, head_dim: int, device: torch.device | str) -> DecodeWorkspace:
    """Workspace for at most max_seqs sequences. It may be made before a graph is captured and used inside it."""
    programs, rows = configs.max_decode_programs(device), num_heads // num_kv_heads
    return DecodeWorkspace(
        torch.zeros(max_seqs * num_kv_heads, dtype=torch.int32, device=device),
        torch.zeros(2 * programs, dtype=torch.int32, device=device),
        torch.empty((2 * programs, rows, head_dim), dtype=torch.float32, device=device),
        torch.empty((2 * programs, 2, rows), dtype=torch.float32, device=device),
    )


@triton.jit
def _first_tile(length, WINDOW: tl.constexpr, TILE: tl.constexpr):
    """The first KV tile that a sequence's query sees."""
    if WINDOW > 0:
        return tl.maximum(length - WINDOW, 0) // TILE
    else:
        return length * 0


@triton.jit
def _tiles(length, WINDOW: tl.constexpr, TILE: tl.constexpr):
    """How many KV tiles a sequence's query sees."""
    return (length + TILE - 1) // TILE - _first_tile(length, WINDOW, TILE)


@triton.jit
def attend(
    q, k_ptr, v_ptr, table, kv_head, length, start, count, scale, softcap, top, total, values,
    NUM_KV_HEADS: tl.constexpr, BLOCK_SIZE: tl.constexpr, DIM: tl.constexpr, LANES: tl.constexpr,
    WINDOW: tl.constexpr, SOFTCAP: tl.constexpr, TILE: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """Attention of q [rows, LANES] over `count` tiles from token `start`, added to the state (top, total, values).

    scale and softcap come from `configs.score_scale`.
    """
    token = start + tl.arange(0, TILE)
    block = blocks_of(table, token, length, BLOCK_SIZE)
    for _ in tl.range(0, count, num_stages=STAGES):
        run = runs_of(block, token % BLOCK_SIZE, kv_head, NUM_KV_HEADS, BLOCK_SIZE, DIM)
        here = token < length
        k = load_tile(k_ptr, run, here, DIM, LANES, True)
        v = load_tile(v_ptr, run, here, DIM, LANES, True)
        if WINDOW > 0:
            here = here & (token >= length - WINDOW)
        token += TILE
        block = blocks_of(table, token, length, BLOCK_SIZE)
        scores = capped(tl.dot(q, k.trans(), input_precision="ieee") * scale, softcap, SOFTCAP)
        scores = tl.where(here[None, :], scores, float("-inf"))
        top, total, values = add_tile(scores, v, top, total, values, False)
    return top, total, values


@triton.jit
def _resume(
    parts_ptr, stats_ptr, head_row, prefixed,
    GROUP: tl.constexpr, ROWS: tl.constexpr, DIM: tl.constexpr, LANES: tl.constexpr, SPLITS: tl.constexpr,
):  # fmt: skip
    """What shared_prefix left of one (sequence, KV head), its splits added up in order; nothing unless `prefixed`."""
    row, lane = tl.arange(0, ROWS), tl.arange(0, LANES)
    top, total, values = nothing_seen(ROWS, LANES)
    for split in range(SPLITS):
        held = prefixed & (row < GROUP)
        slot = (head_row + row) * SPLITS + split
        part_top = tl.load(stats_ptr + 2 * slot, held, float("-inf"))
        part_total = tl.load(stats_ptr + 2 * slot + 1, held, 0.0)
        part = tl.load(parts_ptr + slot[:, None] * DIM + lane[None, :], held[:, None] & (lane < DIM)[None, :], 0.0)
        new_top, base = raise_top(top, part_top, True)
        weight, decay = tl.exp2(part_top - base), tl.exp2(top - base)
        total = total * decay + part_total * weight
        values = values * decay[:, None] + part * weight[:, None]
        top = new_top
    return top, total, values


@triton.jit
def combine(
    parts_ptr, stats_ptr, out, first_program, last_program, head_row,
    GROUP: tl.constexpr, ROWS: tl.constexpr, DIM: tl.constexpr, LANES: tl.constexpr, PARTS: tl.constexpr,
):  # fmt: skip
    """Add the parts that programs first..last left of one (sequence, KV head) and write the outputs."""
    lane = tl.arange(0, LANES)
    row = tl.arange(0, ROWS)
    total, values = add_shares(parts_ptr, stats_ptr, first_program, last_program, lane, GROUP, ROWS, DIM, PARTS, True, ".cg")
    tl.store(heads_at(out, head_row, row, lane, DIM), values / total[:, None], (row < GROUP)[:, None] & (lane < DIM)[None, :])


@triton.jit(do_not_specialize=["batch"])
def _paged_decode(
    q_ptr, k_ptr, v_ptr, table_ptr, rows_ptr, lens_ptr, out_ptr, counters_ptr, parts_ptr, stats_ptr,
    skip_ptr, prefix_parts_ptr, prefix_stats_ptr, batch, table_stride, scale, softcap, k_scale_ptr, v_scale_ptr,
    NUM_KV_HEADS: tl.constexpr, GROUP: tl.constexpr, BLOCK_SIZE: tl.constexpr, DIM: tl.constexpr, WINDOW: tl.constexpr,
    SOFTCAP: tl.constexpr, SCALED: tl.constexpr, ASM: tl.constexpr, BATCH: tl.constexpr, ROWS: tl.constexpr, LANES: tl.constexpr,
    TILE: tl.constexpr, STAGES: tl.constexpr, WARPS: tl.constexpr, SPLITS: tl.constexpr,
):  # fmt: skip
    # SPLITS > 0: tokens before skip are a shared prefix, whose results are in so many splits. Such batches have no window.
    # Tensor-core tiles have 16 rows or more; parts are combined in tiles of no more rows than there are.
    OWN: tl.constexpr = triton.next_power_of_2(GROUP)
    PARTS: tl.constexpr = max(WARPS * 2048 // (OWN * LANES), 1)
    program, programs = tl.program_id(0), tl.num_programs(0)
    row, lane = tl.arange(0, ROWS), tl.arange(0, LANES)
    held = (row < GROUP)[:, None] & (lane < DIM)[None, :]

    zero_padding(lens_ptr, out_ptr, batch, program, programs, held, row, lane, NUM_KV_HEADS, GROUP, DIM)

    # This program's share [tile, end) of all tiles, and the sequence that its first tile belongs to.
    index = tl.arange(0, BATCH)
    lengths = tl.load(lens_ptr + index, index < batch, 0)
    if SPLITS > 0:
        lengths -= tl.load(skip_ptr + index, index < batch, 0)
    tiles = _tiles(lengths, WINDOW, TILE) * NUM_KV_HEADS
    tile, end, share, extra = share_of(program, programs, tl.sum(tiles, 0))
    sequence, begin = sequence_of(tile, tiles)

    while tile < end:
        length = tl.load(lens_ptr + sequence)
        skip = length * 0
        if SPLITS > 0:
            skip = tl.load(skip_ptr + sequence)
        own = _tiles(length - skip, WINDOW, TILE)
        if own == 0:
            sequence += 1
        else:
            kv_head = (tile - begin) // own
            head_begin = begin + kv_head * own
            count = tl.minimum(head_begin + own, end) - tile
            head_row = (sequence.to(tl.int64) * NUM_KV_HEADS + kv_head) * GROUP
            q = tl.load(heads_at(q_ptr, head_row, row, lane, DIM), held, 0.0)
            table = table_ptr + tl.load(rows_ptr + sequence).to(tl.int64) * table_stride
            first = _first_tile(length, WINDOW, TILE) + tile - head_begin
            if SCALED:
                top, total, values = attend_bytes(
                    q, k_ptr, v_ptr, table, kv_head, length, first, count, scale * tl.load(k_scale_ptr + kv_head), softcap,
                    ROWS, NUM_KV_HEADS, BLOCK_SIZE, DIM, LANES, WINDOW, SOFTCAP, TILE, STAGES, ASM,
                )  # fmt: skip
                values *= tl.load(v_scale_ptr + kv_head)
            else:
                if SPLITS > 0:
                    prefixed = (skip > 0) & (tile == head_begin)
                    top, total, values = _resume(prefix_parts_ptr, prefix_stats_ptr, head_row, prefixed, GROUP, ROWS, DIM, LANES, SPLITS)
                else:
                    top, total, values = nothing_seen(ROWS, LANES)
                top, total, values = attend(
                    q, k_ptr, v_ptr, table, kv_head, length, skip + first * TILE, count, scale, softcap, top, total, values,
                    NUM_KV_HEADS, BLOCK_SIZE, DIM, LANES, WINDOW, SOFTCAP, TILE, STAGES,
                )  # fmt: skip
            if count == own:
                tl.store(heads_at(out_ptr, head_row, row, lane, DIM), values / total[:, None], held)
            else:
                slot = 2 * program + (tile == head_begin).to(tl.int32)
                store_part(parts_ptr, stats_ptr, slot, top, total, values, row, lane, row < GROUP, held, GROUP, DIM)
                first_program = owner(head_begin, share, extra)
                last_program = owner(head_begin + own - 1, share, extra)
                counter = counters_ptr + sequence * NUM_KV_HEADS + kv_head
                tl.debug_barrier()
                if arrives_last(counter, first_program, last_program):
                    combine(parts_ptr, stats_ptr, out_ptr, first_program, last_program, head_row, GROUP, OWN, DIM, LANES, PARTS)
                    tl.store(counter, 0)
            tile += count
            if tile == begin + own * NUM_KV_HEADS:
                begin = tile
                sequence += 1


def paged_decode(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    block_table: Tensor,
    rows: Tensor,
    seq_lens: Tensor,
    scale: float,
    *,
    window: int = 0,
    softcap: float = 0.0,
    workspace: DecodeWorkspace | None = None,
    out: Tensor | None = None,
    config: configs.Decode | None = None,
    k_scale: Tensor | None = None,
    v_scale: Tensor | None = None,
    prefix: PrefixResults | None = None,
) -> Tensor:
    """See reference.paged_decode. q, caches and out are contiguous; at most 4,096 sequences.

    Without a workspace one is allocated (and its counters cleared) by every call. config overrides the launch table. prefix: what
    `shared_prefix` found for the first tokens of sequences that begin alike; not with a window.
    """
    batch, num_heads, dim = q.shape
    num_kv_heads, block_size = k_cache.shape[1:3]
    group = num_heads // num_kv_heads
    out = torch.empty_like(q) if out is None else out
    if not batch:
        return out
    config = configs.decode(batch, num_kv_heads, group, dim, q.device, k_cache.element_size()) if config is None else config
    workspace = decode_workspace(batch, num_heads, num_kv_heads, dim, q.device) if workspace is None else workspace
    workspace.check(batch * num_kv_heads, config.programs)
    factor, cap = configs.score_scale(scale, softcap)
    if prefix is not None and (window or k_scale is not None):
        raise ValueError(f"sequences cannot share a prefix under a window of {window} tokens, nor in a cache of bytes")
    before = (None, None, None) if prefix is None else (prefix.skip, prefix.parts, prefix.stats)
    if k_scale is not None:
        configs.check_e4m3(q.device)
        k_cache, v_cache = k_cache.view(torch.int16), v_cache.view(torch.int16)
    _paged_decode[(config.programs,)](
        q, k_cache, v_cache, block_table, rows, seq_lens, out, workspace.counters, workspace.parts, workspace.stats, *before,
        batch, block_table.stride(0), factor, cap, k_scale, v_scale,
        num_kv_heads, group, block_size, dim, window, softcap != 0.0, k_scale is not None, not INTERPRETED,
        configs.lanes_for(batch),
        max(triton.next_power_of_2(group), 16), triton.next_power_of_2(dim), config.tile, config.stages, config.warps,
        0 if prefix is None else prefix.splits,
        num_warps=config.warps, maxnreg=config.registers,
    )  # fmt: skip
    return out
