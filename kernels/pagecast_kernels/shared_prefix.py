"""Decode attention of sequences that begin alike: the KV blocks they share are read once for all of them (cascade attention).

Two launches. `_attend_prefix` takes the queries of up to a tile of sequences as the rows of one product over their shared leading
blocks, and leaves unnormalised results. `decode.paged_decode` goes on from those over each sequence's own tokens.
"""

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from pagecast_kernels import configs
from pagecast_kernels.decode import DecodeWorkspace, PrefixResults, attend, decode_workspace, paged_decode
from pagecast_kernels.online_softmax import nothing_seen


@dataclass(frozen=True)
class SharedPrefixes:
    """Which sequences of a batch share their first blocks, on the device.

    skip int32[B]: tokens of each sequence that its prefix covers, whole blocks and fewer than its length; 0 for none.
    members int32[B]: places in the batch, those of a prefix next to each other. items int32[I, 4]: (first of its members, how many,
    tokens, a table row to find the blocks in) for at most `seqs_per_item` members each; no members where an item is not used.
    """

    skip: Tensor
    members: Tensor
    items: Tensor


@dataclass(frozen=True)
class SharedWorkspace:
    """Device memory of one launch at a time. scratch: of decode; parts float32[n, D], stats float32[n, 2] (maximum in base 2, sum) of the
    prefixes, n = query rows · splits."""

    scratch: DecodeWorkspace
    parts: Tensor
    stats: Tensor


def seqs_per_item(num_heads: int, num_kv_heads: int) -> int:
    return max(configs.PREFIX_ROWS // (num_heads // num_kv_heads), 1)


def max_items(batch: int, num_heads: int, num_kv_heads: int) -> int:
    """Items that a batch is given places for: full ones, and one begun for each of a few prefixes."""
    return -(-batch // seqs_per_item(num_heads, num_kv_heads)) + 4


def prefix_splits(batch: int, num_heads: int, num_kv_heads: int, device: torch.device | str) -> int:
    """Programs that share an item's tokens, a power of two up to 8: about as many as fill the device once."""
    full = max(batch // seqs_per_item(num_heads, num_kv_heads), 1) * num_kv_heads
    wanted = min(max(configs.processors(device) // full, 1), 8)
    return 1 << wanted.bit_length() - 1


def shared_workspace(max_seqs: int, num_heads: int, num_kv_heads: int, head_dim: int, device: torch.device | str) -> SharedWorkspace:
    """Workspace for any batch of at most max_seqs sequences; it may be made before a graph is captured and used inside it."""
    rows = num_heads * max(batch * prefix_splits(batch, num_heads, num_kv_heads, device) for batch in range(1, max_seqs + 1))
    parts, stats = (torch.empty((rows, width), dtype=torch.float32, device=device) for width in (head_dim, 2))
    return SharedWorkspace(decode_workspace(max_seqs, num_heads, num_kv_heads, head_dim, device), parts, stats)


@triton.jit
def _attend_prefix(
    q_ptr, k_ptr, v_ptr, table_ptr, members_ptr, items_ptr, parts_ptr, stats_ptr, table_stride, scale, softcap,
    NUM_KV_HEADS: tl.constexpr, GROUP: tl.constexpr, BLOCK_SIZE: tl.constexpr, DIM: tl.constexpr, SOFTCAP: tl.constexpr,
    ROWS: tl.constexpr, PIECES: tl.constexpr, LANES: tl.constexpr, TILE: tl.constexpr, STAGES: tl.constexpr, SPLITS: tl.constexpr,
):  # fmt: skip
    # An item's query rows may be too many for one program: PIECES of ROWS each.
    item, split = tl.program_id(0) // NUM_KV_HEADS, tl.program_id(1)
    kv_head = tl.program_id(0) % NUM_KV_HEADS
    count = tl.load(items_ptr + 4 * item + 1)
    if count > 0:
        start, length, table_row = tl.load(items_ptr + 4 * item), tl.load(items_ptr + 4 * item + 2), tl.load(items_ptr + 4 * item + 3)
        row, lane = tl.arange(0, ROWS), tl.arange(0, LANES)
        if PIECES > 1:
            row += tl.program_id(2) * ROWS
        inside = row // GROUP < count
        member = tl.load(members_ptr + start + row // GROUP, inside, 0).to(tl.int64)
        head_row = (member * NUM_KV_HEADS + kv_head) * GROUP + row % GROUP
        held = inside[:, None] & (lane < DIM)[None, :]
        q = tl.load(q_ptr + head_row[:, None] * DIM + lane[None, :], held, 0.0)
        table = table_ptr + table_row.to(tl.int64) * table_stride
        tiles = (length + TILE - 1) // TILE
        share = (tiles + SPLITS - 1) // SPLITS
        first = split * share
        tiles = tl.maximum(tl.minimum(share, tiles - first), 0)
        top, total, values = nothing_seen(ROWS, LANES)
        top, total, values = attend(
            q, k_ptr, v_ptr, table, kv_head, length, first * TILE, tiles, scale, softcap, top, total, values,
            NUM_KV_HEADS, BLOCK_SIZE, DIM, LANES, 0, SOFTCAP, TILE, STAGES,
        )  # fmt: skip
        slot = head_row * SPLITS + split
        tl.store(stats_ptr + 2 * slot, top, inside)
        tl.store(stats_ptr + 2 * slot + 1, total, inside)
        tl.store(parts_ptr + slot[:, None] * DIM + lane[None, :], values, held)


def paged_decode_shared(
    q: Tensor, k_cache: Tensor, v_cache: Tensor, block_table: Tensor, rows: Tensor, seq_lens: Tensor, scale: float,
    shared: SharedPrefixes, *, softcap: float = 0.0, workspace: SharedWorkspace | None = None, out: Tensor | None = None,
    config: configs.Decode | None = None,
) -> Tensor:  # fmt: skip
    """reference.paged_decode for sequences of which some begin alike: its arguments, and its result but for rounding."""
    (batch, num_heads, dim), (num_kv_heads, block_size) = q.shape, k_cache.shape[1:3]
    group = num_heads // num_kv_heads
    splits = prefix_splits(batch, num_heads, num_kv_heads, q.device)
    work = shared_workspace(batch, num_heads, num_kv_heads, dim, q.device) if workspace is None else workspace
    factor, cap = configs.score_scale(scale, softcap)
    first = configs.shared_prefix(dim, q.device, q.element_size())
    pieces = triton.cdiv(max(configs.PREFIX_ROWS, group), first.rows)
    _attend_prefix[(shared.items.shape[0] * num_kv_heads, splits, pieces)](
        q, k_cache, v_cache, block_table, shared.members, shared.items, work.parts, work.stats, block_table.stride(0), factor, cap,
        num_kv_heads, group, block_size, dim, cap != 0.0, first.rows, pieces, triton.next_power_of_2(dim), first.tile, first.stages,
        splits, num_warps=first.warps,
    )  # fmt: skip
    return paged_decode(
        q, k_cache, v_cache, block_table, rows, seq_lens, scale, softcap=softcap, workspace=work.scratch, out=out, config=config,
        prefix=PrefixResults(shared.skip, work.parts, work.stats, splits),
    )  # fmt: skip
