"""Paged decode attention as one loop over KV tiles, whatever sequences and heads they belong to.

As in `decode`, programs take equal contiguous shares of all tiles. There, a program goes from one (sequence, KV head) to the next
and waits each time for lengths, block ids and the first K to arrive, which is most of the time where sequences are short. Here a
list of tiles is made once per step, for all layers: a program's loop reads it a tile ahead, so that K and V of the next sequence are
under way while the one before is finished.
"""

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from pagecast_kernels import configs, decode
from pagecast_kernels.decode import DecodeWorkspace, combine, decode_workspace
from pagecast_kernels.online_softmax import add_tile, capped, nothing_seen
from pagecast_kernels.paging import heads_at, load_tile, runs_of, zero_padding
from pagecast_kernels.shares import add_members, arrives_last, owner, share_of, store_part, team_of

_CHUNK = 32  # tiles that a program of `_list_tiles` writes at a time


@dataclass(frozen=True)
class TileList:
    """The KV tiles of a batch, of every KV head alike, on the device: how many; of each (place in the batch, the list's first tile of
    its sequence, how many the sequence has, tokens left from its start on); and the blocks it lies in.

    count int32[1]; tiles int32[n, 4]; blocks int32[n, TILE / block_size or 1]. tile: tokens of a tile.
    """

    count: Tensor
    tiles: Tensor
    blocks: Tensor
    tile: int


def _blocks_a_tile(tile: int, block_size: int) -> int:
    return max(tile // block_size, 1)


def tile_list(max_seqs: int, max_blocks: int, block_size: int, tile: int, device: torch.device | str) -> TileList:
    """Places for any batch of at most max_seqs sequences of max_blocks blocks. It may be made before a graph is captured."""
    most = max_seqs * triton.cdiv(max_blocks * block_size, tile)
    shapes = ((1,), (most, 4), (most, _blocks_a_tile(tile, block_size)))
    return TileList(*(torch.zeros(shape, dtype=torch.int32, device=device) for shape in shapes), tile)


@triton.jit(do_not_specialize=["batch"])
def _list_tiles(
    table_ptr, rows_ptr, lens_ptr, count_ptr, tiles_ptr, blocks_ptr, batch, table_stride,
    BATCH: tl.constexpr, BLOCK_SIZE: tl.constexpr, TILE: tl.constexpr, IDS: tl.constexpr, CHUNK: tl.constexpr,
):  # fmt: skip
    place, part = tl.program_id(0), tl.program_id(1)
    index = tl.arange(0, BATCH)
    counts = (tl.load(lens_ptr + index, index < batch, 0) + TILE - 1) // TILE
    first = tl.sum(tl.where(index < place, counts, 0), 0)
    if (place == 0) & (part == 0):
        tl.store(count_ptr, tl.sum(counts, 0))
    length = tl.load(lens_ptr + place)
    own = (length + TILE - 1) // TILE
    table = table_ptr + tl.load(rows_ptr + place).to(tl.int64) * table_stride
    for start in range(part * CHUNK, own, tl.num_programs(1) * CHUNK):
        tile = start + tl.arange(0, CHUNK)
        inside = tile < own
        entry = tiles_ptr + 4 * (first + tile)
        tl.store(entry, tile * 0 + place, inside)
        tl.store(entry + 1, tile * 0 + first, inside)
        tl.store(entry + 2, tile * 0 + own, inside)
        tl.store(entry + 3, length - tile * TILE, inside)
        block = tile[:, None] * TILE // BLOCK_SIZE + tl.arange(0, IDS)[None, :]
        ids = tl.load(table + block, inside[:, None] & (block * BLOCK_SIZE < length), 0)
        tl.store(blocks_ptr + (first + tile)[:, None] * IDS + tl.arange(0, IDS)[None, :], ids, inside[:, None])


def list_tiles(into: TileList, block_table: Tensor, rows: Tensor, seq_lens: Tensor, block_size: int) -> TileList:
    """Fills `into` for a batch; valid until the next call. See reference.paged_decode for the arguments."""
    batch = rows.shape[0]
    parts = max(min(64 // batch, 8), 1)
    _list_tiles[(batch, parts)](
        block_table, rows, seq_lens, into.count, into.tiles, into.blocks, batch, block_table.stride(0),
        configs.lanes_for(batch), block_size, into.tile, _blocks_a_tile(into.tile, block_size), _CHUNK, num_warps=1,
    )  # fmt: skip
    return into


@triton.jit
def _finish(
    top, total, values, began, program, head_row, out_ptr, parts_ptr, stats_ptr, held, row, lane,
    GROUP: tl.constexpr, DIM: tl.constexpr, WHOLE: tl.constexpr,
):  # fmt: skip
    """Write a result: to `out` if WHOLE and it began in this program, else as this program's part, the second one if it began here."""
    whole = began & WHOLE
    tl.store(heads_at(out_ptr, head_row, row, lane, DIM), values / total[:, None], held & whole)
    slot = 2 * program + (began & (not WHOLE)).to(tl.int32)
    store_part(parts_ptr, stats_ptr, slot, top, total, values, row, lane, (row < GROUP) & ~whole, held & ~whole, GROUP, DIM)


@triton.jit
def _arrive(
    head_begin, own, head_row, place, kv_head, share, extra, program, out_ptr, counters_ptr, teams_ptr, parts_ptr, stats_ptr,
    NUM_KV_HEADS: tl.constexpr, GROUP: tl.constexpr, OWN: tl.constexpr, DIM: tl.constexpr, LANES: tl.constexpr, PARTS: tl.constexpr,
    TEAM: tl.constexpr,
):  # fmt: skip
    """Say that this program's part of a (sequence, KV head) is written; the last one to say so adds the parts.

    Where there are more than two teams' parts, the last of a team adds the team's into its first member's place, and the last team's
    last one adds those: of n parts two times √n are added one after the other.
    """
    first_program = owner(head_begin, share, extra)
    last_program = owner(head_begin + own - 1, share, extra)
    counter = counters_ptr + place * NUM_KV_HEADS + kv_head
    if TEAM == 0:
        if arrives_last(counter, first_program, last_program):
            combine(parts_ptr, stats_ptr, out_ptr, first_program, last_program, head_row, GROUP, OWN, DIM, LANES, PARTS)
            tl.store(counter, 0)
    else:
        low, high, slot = team_of(program, first_program, last_program, TEAM)
        if arrives_last(teams_ptr + slot, low, high):
            tl.store(teams_ptr + slot, 0)
            row, lane = tl.arange(0, OWN), tl.arange(0, LANES)
            held = (row < GROUP)[:, None] & (lane < DIM)[None, :]
            top, total, values = add_members(
                parts_ptr, stats_ptr, first_program, low, high, lane, GROUP, OWN, DIM, PARTS, 1, True, ".cg"
            )  # fmt: skip
            if (low == first_program) & (high == last_program):
                tl.store(heads_at(out_ptr, head_row, row, lane, DIM), values / total[:, None], held)
            else:
                tl.debug_barrier()  # all threads have read the parts
                store_part(parts_ptr, stats_ptr, slot, top, total, values, row, lane, row < GROUP, held, GROUP, DIM)
                tl.debug_barrier()
                if arrives_last(counter, first_program // TEAM, last_program // TEAM):
                    tl.store(counter, 0)
                    _, total, values = add_members(
                        parts_ptr, stats_ptr, first_program, first_program, last_program, lane, GROUP, OWN, DIM, PARTS, TEAM, True, ".cg"
                    )  # fmt: skip
                    tl.store(heads_at(out_ptr, head_row, row, lane, DIM), values / total[:, None], held)


@triton.jit(do_not_specialize=["batch"])
def _decode_flat(
    q_ptr, k_ptr, v_ptr, lens_ptr, count_ptr, tiles_ptr, blocks_ptr, out_ptr, counters_ptr, teams_ptr, parts_ptr, stats_ptr,
    batch, scale, softcap,
    NUM_KV_HEADS: tl.constexpr, GROUP: tl.constexpr, BLOCK_SIZE: tl.constexpr, DIM: tl.constexpr, SOFTCAP: tl.constexpr,
    ROWS: tl.constexpr, LANES: tl.constexpr, TILE: tl.constexpr, IDS: tl.constexpr, STAGES: tl.constexpr, WARPS: tl.constexpr,
    TEAM: tl.constexpr,
):  # fmt: skip
    OWN: tl.constexpr = triton.next_power_of_2(GROUP)
    PARTS: tl.constexpr = max(WARPS * 1024 // (OWN * LANES), 1)
    program, programs = tl.program_id(0), tl.num_programs(0)
    row, lane, offset = tl.arange(0, ROWS), tl.arange(0, LANES), tl.arange(0, TILE)
    held = (row < GROUP)[:, None] & (lane < DIM)[None, :]
    tiles = tl.load(count_ptr)  # of one KV head
    begin, end, share, extra = share_of(program, programs, tiles * NUM_KV_HEADS)

    if begin < end:
        kv_head = begin // tiles
        tile = begin % tiles
        place, first = tl.load(tiles_ptr + 4 * tile), tl.load(tiles_ptr + 4 * tile + 1)
        own, left = tl.load(tiles_ptr + 4 * tile + 2), tl.load(tiles_ptr + 4 * tile + 3)
        block = tl.load(blocks_ptr + tile * IDS + offset // BLOCK_SIZE)
        # The first (sequence, KV head), for the end.
        first_begin, first_own, first_place, first_head = kv_head * tiles + first, own, place, kv_head
        top, total, values = nothing_seen(ROWS, LANES)
        for at in tl.range(begin, end, num_stages=STAGES):
            head_row = (place.to(tl.int64) * NUM_KV_HEADS + kv_head) * GROUP
            q = tl.load(heads_at(q_ptr, head_row, row, lane, DIM), held, 0.0)
            if BLOCK_SIZE > TILE:
                inner = (tile - first) * TILE % BLOCK_SIZE + offset
            else:
                inner = offset % BLOCK_SIZE
            run = runs_of(block, inner, kv_head, NUM_KV_HEADS, BLOCK_SIZE, DIM)
            here = offset < left
            k = load_tile(k_ptr, run, here, DIM, LANES, True)
            v = load_tile(v_ptr, run, here, DIM, LANES, True)
            head_begin = kv_head * tiles + first
            done = at + 1 == head_begin + own
            began = head_begin >= begin
            # What the next tile is, a tile ahead.
            tile += 1
            kv_head = tl.where(tile == tiles, kv_head + 1, kv_head)
            tile = tl.where(tile == tiles, 0, tile)
            place, first = tl.load(tiles_ptr + 4 * tile), tl.load(tiles_ptr + 4 * tile + 1)
            own, left = tl.load(tiles_ptr + 4 * tile + 2), tl.load(tiles_ptr + 4 * tile + 3)
            block = tl.load(blocks_ptr + tile * IDS + offset // BLOCK_SIZE)

            scores = capped(tl.dot(q, k.trans(), input_precision="ieee") * scale, softcap, SOFTCAP)
            scores = tl.where(here[None, :], scores, float("-inf"))
            top, total, values = add_tile(scores, v, top, total, values, False)
            if done:
                _finish(
                    top, total, values, began, program, head_row, out_ptr, parts_ptr, stats_ptr, held, row, lane, GROUP, DIM, True
                )  # fmt: skip
                top, total, values = nothing_seen(ROWS, LANES)

        if TEAM > 0:  # what the first tile belonged to, read again, as the loop needs the registers
            tiles = tl.load(count_ptr)
            begin, end, share, extra = share_of(program, programs, tiles * NUM_KV_HEADS)
            first_head, tile = begin // tiles, begin % tiles
            first_begin = first_head * tiles + tl.load(tiles_ptr + 4 * tile + 1)
            first_own, first_place = tl.load(tiles_ptr + 4 * tile + 2), tl.load(tiles_ptr + 4 * tile)
        # What the last tile belonged to, and whether that goes on in the next program.
        kv_head = (end - 1) // tiles
        tile = (end - 1) % tiles
        place, first, own = tl.load(tiles_ptr + 4 * tile), tl.load(tiles_ptr + 4 * tile + 1), tl.load(tiles_ptr + 4 * tile + 2)
        head_begin = kv_head * tiles + first
        head_row = (place.to(tl.int64) * NUM_KV_HEADS + kv_head) * GROUP
        if head_begin + own > end:
            began = head_begin >= begin
            _finish(top, total, values, began, program, head_row, out_ptr, parts_ptr, stats_ptr, held, row, lane, GROUP, DIM, False)
        tl.debug_barrier()
        if (first_begin < begin) & (first_begin + first_own <= end):
            _arrive(
                first_begin, first_own, (first_place.to(tl.int64) * NUM_KV_HEADS + first_head) * GROUP, first_place, first_head,
                share, extra, program, out_ptr, counters_ptr, teams_ptr, parts_ptr, stats_ptr, NUM_KV_HEADS, GROUP, OWN, DIM, LANES,
                PARTS, TEAM,
            )  # fmt: skip
        if head_begin + own > end:
            _arrive(
                head_begin, own, head_row, place, kv_head,
                share, extra, program, out_ptr, counters_ptr, teams_ptr, parts_ptr, stats_ptr, NUM_KV_HEADS, GROUP, OWN, DIM, LANES,
                PARTS, TEAM,
            )  # fmt: skip

    zero_padding(lens_ptr, out_ptr, batch, program, programs, held, row, lane, NUM_KV_HEADS, GROUP, DIM)


def launch(
    q: Tensor, k_cache: Tensor, v_cache: Tensor, seq_lens: Tensor, scale: float, softcap: float, tiles: TileList,
    workspace: DecodeWorkspace, out: Tensor, config: configs.Decode,
) -> Tensor:  # fmt: skip
    """paged_decode over a list of tiles, of `config.tile` tokens each. q, caches, seq_lens and out as in reference.paged_decode."""
    (batch, num_heads, dim), (num_kv_heads, block_size) = q.shape, k_cache.shape[1:3]
    group = num_heads // num_kv_heads
    factor, cap = configs.score_scale(scale, softcap)
    _decode_flat[(config.programs,)](
        q, k_cache, v_cache, seq_lens, tiles.count, tiles.tiles, tiles.blocks, out,
        workspace.counters, workspace.teams, workspace.parts, workspace.stats, batch, factor, cap,
        num_kv_heads, group, block_size, dim, softcap != 0.0, max(triton.next_power_of_2(group), 16), triton.next_power_of_2(dim),
        tiles.tile, _blocks_a_tile(tiles.tile, block_size), config.stages, config.warps, config.team,
        num_warps=config.warps, maxnreg=config.registers,
    )  # fmt: skip
    return out


class StepTiles:
    """The list of a step's tiles, made by the first layer that attends and used by all; launches of one stream may share it.

    A step is known by the tensors it is given: every step has a `seq_lens` of its own, which is held here until the next. Steps, and
    layers of one, may differ in their tile: there is a list for each.
    """

    def __init__(self, max_seqs: int) -> None:
        self._max_seqs = max_seqs
        self._lists: dict[int, TileList] = {}  # by tile
        self._step: tuple[Tensor, ...] = ()
        self._filled: set[int] = set()  # tiles whose lists are this step's
        self.ahead = False
        """Whether the list that `of` gave last was there before: the launch after it may read it while the launch before that ends."""

    def of(self, block_table: Tensor, rows: Tensor, seq_lens: Tensor, block_size: int, tile: int) -> TileList:
        """The step's list of tiles of so many tokens, made now if no layer before needed it. Tensors as in reference.paged_decode."""
        step = (block_table, rows, seq_lens)
        if tile not in self._lists:
            self._lists[tile] = tile_list(self._max_seqs, block_table.shape[1], block_size, tile, block_table.device)
        if len(self._step) != 3 or any(a is not b for a, b in zip(step, self._step)):
            self._step, self._filled = step, set()
        self.ahead = tile in self._filled
        if not self.ahead:
            list_tiles(self._lists[tile], *step, block_size)
            self._filled.add(tile)
        return self._lists[tile]


@dataclass(frozen=True)
class StepWorkspace:
    """What decode launches of one stream share: scratch memory, and the list of the step's tiles."""

    scratch: DecodeWorkspace
    tiles: StepTiles


def step_workspace(max_seqs: int, num_heads: int, num_kv_heads: int, head_dim: int, device: torch.device | str) -> StepWorkspace:
    """Workspace for at most max_seqs sequences; it may be made before a graph is captured and used inside it."""
    return StepWorkspace(decode_workspace(max_seqs, num_heads, num_kv_heads, head_dim, device), StepTiles(max_seqs))


def suits(q: Tensor, k_cache: Tensor, window: int = 0, k_scale: Tensor | None = None) -> bool:
    """Whether this kernel takes the case: head sizes up to 128, no window, no scaled bytes."""
    return q.shape[2] <= 128 and q.shape[1] // k_cache.shape[1] <= 16 and not window and k_scale is None


def paged_decode(
    q: Tensor, k_cache: Tensor, v_cache: Tensor, block_table: Tensor, rows: Tensor, seq_lens: Tensor, scale: float,
    *, window: int = 0, softcap: float = 0.0, workspace: StepWorkspace, out: Tensor | None = None,
    k_scale: Tensor | None = None, v_scale: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """See reference.paged_decode. block_table, rows and seq_lens are the same tensors for all layers of a step, and new ones in the
    next. Cases that do not suit go the way of decode.paged_decode."""
    out = torch.empty_like(q) if out is None else out
    if k_scale is not None and v_scale is not None and q.shape[0] and configs.is_hopper(q.device):
        from pagecast_kernels import decode_hopper_bytes

        if (of_bytes := decode_hopper_bytes.launch_for(q, k_cache, window, softcap)) is not None:
            tiles = workspace.tiles.of(block_table, rows, seq_lens, k_cache.shape[2], of_bytes.tile)
            scales = (scale, k_scale, v_scale)
            args = (seq_lens, *scales, tiles, workspace.scratch, out, of_bytes, workspace.tiles.ahead)
            return decode_hopper_bytes.launch(q, k_cache, v_cache, *args)
    if not suits(q, k_cache, window, k_scale):
        tables = (block_table, rows, seq_lens, scale)
        return decode.paged_decode(
            q, k_cache, v_cache, *tables, window=window, softcap=softcap, workspace=workspace.scratch, out=out, k_scale=k_scale,
            v_scale=v_scale,
        )  # fmt: skip
    if not q.shape[0]:
        return out
    (batch, _, dim), (num_kv_heads, block_size) = q.shape, k_cache.shape[1:3]
    if configs.is_hopper(q.device):
        from pagecast_kernels import decode_hopper  # Gluon, which only this GPU needs

        if (hopper := decode_hopper.launch_for(q, k_cache, softcap)) is not None:
            tiles = workspace.tiles.of(block_table, rows, seq_lens, block_size, hopper.tile)
            args = (seq_lens, scale, tiles, workspace.scratch, out, hopper, workspace.tiles.ahead)
            return decode_hopper.launch(q, k_cache, v_cache, *args)
    config = configs.decode_flat(batch, num_kv_heads, dim, q.device, q.element_size())
    tiles = workspace.tiles.of(block_table, rows, seq_lens, block_size, config.tile)
    return launch(q, k_cache, v_cache, seq_lens, scale, softcap, tiles, workspace.scratch, out, config)
