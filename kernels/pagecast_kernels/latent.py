"""Multi-head latent attention over a compressed paged cache: rotation and write, decode, prefill (see reference_latent).

All heads read the same latents, so the query heads are the rows of a tensor-core tile and one read of the cache serves them all;
a tile of latents is both the keys (transposed) and the values. Decode cuts its work evenly over the chip as `decode` does, with
groups of heads in the place of KV heads. Its parts are large, a latent for every head, so that a launch of its own adds them up, in
many programs; but see latent_hopper.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from pagecast_kernels import configs
from pagecast_kernels.decode_flat import StepWorkspace, step_workspace
from pagecast_kernels.online_softmax import add_tile, nothing_seen
from pagecast_kernels.paging import blocks_of, heads_at, load_tile, zero_padding
from pagecast_kernels.prefill import find_sequence
from pagecast_kernels.shares import add_shares, owner, sequence_of, share_of, store_part

_HEADS = 8
_CHUNK = 64
"""Elements of a latent that one program adds the parts of; a quarter of them for few sequences, which have many parts each."""


@triton.jit
def _latent_rope_and_write(
    q_ptr, kv_ptr, norm_ptr, cos_sin_ptr, positions_ptr, slots_ptr, k_ptr, v_ptr, out_ptr, q_token, q_head, kv_stride, eps,
    NUM_HEADS: tl.constexpr, RANK: tl.constexpr, RANK_LANES: tl.constexpr, HALF: tl.constexpr, HALF_LANES: tl.constexpr,
    HEADS: tl.constexpr,
):  # fmt: skip
    token = tl.program_id(0).to(tl.int64)
    lane = tl.arange(0, HALF_LANES)
    inside = lane < HALF
    angle = cos_sin_ptr + tl.load(positions_ptr + token).to(tl.int64) * (2 * HALF) + lane
    cos, sin = tl.load(angle, inside, 0.0), tl.load(angle + HALF, inside, 0.0)
    if tl.program_id(1) == 0:
        slot = tl.load(slots_ptr + token).to(tl.int64)
        if slot >= 0:
            place = tl.arange(0, RANK_LANES)
            held = place < RANK
            latent = tl.load(kv_ptr + token * kv_stride + place, held, 0.0).to(tl.float32)
            latent *= tl.rsqrt(tl.sum(latent * latent, 0) / RANK + eps) * tl.load(norm_ptr + place, held, 0.0).to(tl.float32)
            tl.store(v_ptr + slot * RANK + place, latent, held)
            key = kv_ptr + token * kv_stride + RANK + lane
            first, second = tl.load(key, inside, 0.0).to(tl.float32), tl.load(key + HALF, inside, 0.0).to(tl.float32)
            target = k_ptr + slot * (2 * HALF) + lane
            tl.store(target, first * cos - second * sin, inside)
            tl.store(target + HALF, second * cos + first * sin, inside)
    else:
        head = (tl.program_id(1) - 1) * HEADS + tl.arange(0, HEADS)
        held2 = (head < NUM_HEADS)[:, None] & inside[None, :]
        source = q_ptr + token * q_token + head[:, None] * q_head + lane[None, :]
        one, two = tl.load(source, held2, 0.0).to(tl.float32), tl.load(source + HALF, held2, 0.0).to(tl.float32)
        goal = out_ptr + (token * NUM_HEADS + head[:, None]) * (2 * HALF) + lane[None, :]
        tl.store(goal, one * cos[None, :] - two * sin[None, :], held2)
        tl.store(goal + HALF, two * cos[None, :] + one * sin[None, :], held2)


def latent_rope_and_write(
    q_rope: Tensor, kv: Tensor, norm: Tensor, eps: float, cos_sin: Tensor, positions: Tensor, slot_mapping: Tensor, k_cache: Tensor,
    v_cache: Tensor, out: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """See reference_latent.latent_rope_and_write. Tokens and heads of q_rope and rows of kv may be strided."""
    tokens, heads, dim = q_rope.shape
    rank, half = norm.shape[0], dim // 2
    out = torch.empty((tokens, heads, dim), dtype=q_rope.dtype, device=q_rope.device) if out is None else out
    if tokens:
        _latent_rope_and_write[(tokens, 1 + triton.cdiv(heads, _HEADS))](
            q_rope, kv, norm, cos_sin, positions, slot_mapping, k_cache, v_cache, out, q_rope.stride(0), q_rope.stride(1), kv.stride(0),
            eps, heads, rank, triton.next_power_of_2(rank), half, triton.next_power_of_2(half), _HEADS, num_warps=1,
        )  # fmt: skip
    return out


@triton.jit
def _steps(
    q_latent, q_rope, k_ptr, v_ptr, table, position, length, start, stop, top, total, values, scale,
    BLOCK_SIZE: tl.constexpr, RANK: tl.constexpr, ROPE: tl.constexpr, TILE: tl.constexpr, STAGES: tl.constexpr, CAUSAL: tl.constexpr,
):  # fmt: skip
    """Go on with the online softmax over tokens [start, stop), start a multiple of TILE. RANK and ROPE are powers of two."""
    offset = tl.arange(0, TILE)
    block = blocks_of(table, start + offset, length, BLOCK_SIZE)
    for first in tl.range(start, stop, TILE, num_stages=STAGES):
        token = first + offset
        here = token < length
        slot = block.to(tl.int64) * BLOCK_SIZE + token % BLOCK_SIZE
        latent = load_tile(v_ptr, slot * RANK, here, RANK, RANK, True)
        key = load_tile(k_ptr, slot * ROPE, here, ROPE, ROPE, True)
        block = blocks_of(table, token + TILE, length, BLOCK_SIZE)
        scores = tl.dot(q_latent, latent.trans(), input_precision="ieee")
        scores = tl.dot(q_rope, key.trans(), scores, input_precision="ieee") * scale
        if CAUSAL:
            seen = token[None, :] <= position[:, None]
        else:
            seen = here[None, :]
        scores = tl.where(seen, scores, float("-inf"))
        top, total, values = add_tile(scores, latent, top, total, values, False)
    return top, total, values


@triton.jit(do_not_specialize=["batch"])
def _latent_decode(
    q_latent_ptr, q_rope_ptr, k_ptr, v_ptr, table_ptr, rows_ptr, lens_ptr, out_ptr, parts_ptr, stats_ptr,
    batch, table_stride, scale,
    GROUPS: tl.constexpr, GROUP: tl.constexpr, BLOCK_SIZE: tl.constexpr, RANK: tl.constexpr, ROPE: tl.constexpr, BATCH: tl.constexpr,
    ROWS: tl.constexpr, TILE: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    program, programs = tl.program_id(0), tl.num_programs(0)
    row, lane, turn = tl.arange(0, ROWS), tl.arange(0, RANK), tl.arange(0, ROPE)
    held = (row < GROUP)[:, None]

    zero_padding(lens_ptr, out_ptr, batch, program, programs, held, row, lane, GROUPS, GROUP, RANK)

    # This program's share [tile, end) of all tiles, and the sequence that its first tile belongs to.
    index = tl.arange(0, BATCH)
    tiles = (tl.load(lens_ptr + index, index < batch, 0) + TILE - 1) // TILE * GROUPS
    tile, end, _, _ = share_of(program, programs, tl.sum(tiles, 0))
    sequence, begin = sequence_of(tile, tiles)

    while tile < end:
        length = tl.load(lens_ptr + sequence)
        own = (length + TILE - 1) // TILE
        if own == 0:
            sequence += 1
        else:
            group = (tile - begin) // own
            group_begin = begin + group * own
            count = tl.minimum(group_begin + own, end) - tile
            head_row = (sequence.to(tl.int64) * GROUPS + group) * GROUP
            q_latent = tl.load(heads_at(q_latent_ptr, head_row, row, lane, RANK), held, 0.0)
            q_rope = tl.load(heads_at(q_rope_ptr, head_row, row, turn, ROPE), held, 0.0)
            table = table_ptr + tl.load(rows_ptr + sequence).to(tl.int64) * table_stride
            first = (tile - group_begin) * TILE
            top, total, values = nothing_seen(ROWS, RANK)
            top, total, values = _steps(
                q_latent, q_rope, k_ptr, v_ptr, table, row, length, first, first + count * TILE, top, total, values, scale,
                BLOCK_SIZE, RANK, ROPE, TILE, STAGES, False,
            )  # fmt: skip
            if count == own:
                tl.store(heads_at(out_ptr, head_row, row, lane, RANK), values / total[:, None], held)
            else:
                slot = 2 * program + (tile == group_begin).to(tl.int32)
                store_part(parts_ptr, stats_ptr, slot, top, total, values, row, lane, row < GROUP, held, GROUP, RANK)
            tile += count
            if tile == begin + own * GROUPS:
                begin = tile
                sequence += 1


@triton.jit(do_not_specialize=["batch"])
def _add_latent_parts(
    lens_ptr, out_ptr, parts_ptr, stats_ptr, batch, programs,
    GROUPS: tl.constexpr, GROUP: tl.constexpr, RANK: tl.constexpr, BATCH: tl.constexpr, TILE: tl.constexpr, OWN: tl.constexpr,
    CHUNK: tl.constexpr, PARTS: tl.constexpr,
):  # fmt: skip
    """Adds what the programs of _latent_decode left of one (sequence, group), in their order, for CHUNK elements of the latents."""
    sequence, group = tl.program_id(0) // GROUPS, tl.program_id(0) % GROUPS
    index = tl.arange(0, BATCH)
    tiles = (tl.load(lens_ptr + index, index < batch, 0) + TILE - 1) // TILE * GROUPS
    _, _, share, extra = share_of(0, programs, tl.sum(tiles, 0))
    own = (tl.load(lens_ptr + sequence) + TILE - 1) // TILE
    begin = tl.sum(tl.where(index < sequence, tiles, 0), 0) + group * own
    first, last = owner(begin, share, extra), owner(begin + own - 1, share, extra)
    if (own > 0) & (first != last):
        lane, row = tl.program_id(1) * CHUNK + tl.arange(0, CHUNK), tl.arange(0, OWN)
        total, values = add_shares(parts_ptr, stats_ptr, first, last, lane, GROUP, OWN, RANK, PARTS, False, "")
        target = heads_at(out_ptr, tl.program_id(0).to(tl.int64) * GROUP, row, lane, RANK)
        tl.store(target, values / total[:, None], (row < GROUP)[:, None])


def latent_workspace(max_seqs: int, num_heads: int, rank: int, device: torch.device | str) -> StepWorkspace:
    """Workspace of latent_decode for at most max_seqs sequences; see decode_flat.step_workspace."""
    return step_workspace(max_seqs, num_heads, configs.latent_groups(num_heads, configs.LATENT_DECODE_HEADS), rank, device)


def _suits_hopper(q_latent: Tensor, q_rope: Tensor, v_cache: Tensor) -> bool:
    """Whether latent_hopper can take a case: 16 bits, at most 16 heads, latents of 512 and rotated keys of 64, blocks that fit."""
    heads, rank = q_latent.shape[1:]
    fits = heads <= 16 and rank == 512 and q_rope.shape[2] == 64 and v_cache.shape[2] in (8, 16, 32, 64, 128)
    return fits and q_latent.element_size() == 2 and v_cache.dtype == q_latent.dtype


def latent_decode(
    q_latent: Tensor, q_rope: Tensor, k_cache: Tensor, v_cache: Tensor, block_table: Tensor, rows: Tensor, seq_lens: Tensor, scale: float,
    *, workspace: StepWorkspace | None = None, out: Tensor | None = None,
    config: configs.LatentDecode | configs.HopperDecode | None = None,
) -> Tensor:  # fmt: skip
    """See reference_latent.latent_decode. All contiguous; sizes of latents and rotated keys are powers of two; at most 4,096 sequences.

    block_table, rows and seq_lens are the same tensors for all layers of a step, and new ones in the next.
    """
    batch, heads, rank = q_latent.shape
    groups = configs.latent_groups(heads, configs.LATENT_DECODE_HEADS)
    group = heads // groups
    out = torch.empty_like(q_latent) if out is None else out
    if not batch:
        return out
    workspace = latent_workspace(batch, heads, rank, q_latent.device) if workspace is None else workspace
    lanes, own = configs.lanes_for(batch), triton.next_power_of_2(group)
    scratch = workspace.scratch
    if config is None:
        if configs.is_hopper(q_latent.device) and _suits_hopper(q_latent, q_rope, v_cache):
            config = configs.latent_hopper(batch, q_latent.device)
        else:
            config = configs.latent_decode(group, q_latent.device, k_cache.element_size())
    if isinstance(config, configs.HopperDecode):
        from pagecast_kernels import latent_hopper  # Gluon, which only this GPU needs

        tiles = workspace.tiles.of(block_table, rows, seq_lens, v_cache.shape[2], config.tile)
        latent_hopper.launch(q_latent, q_rope, k_cache, v_cache, seq_lens, scale, tiles, scratch, out, config, workspace.tiles.ahead)
        if config.team:
            return out
    else:
        _latent_decode[(config.programs,)](
            q_latent, q_rope, k_cache, v_cache, block_table, rows, seq_lens, out, scratch.parts, scratch.stats, batch,
            block_table.stride(0), configs.score_scale(scale, 0.0)[0], groups, group, v_cache.shape[2], rank, q_rope.shape[2], lanes,
            max(own, config.rows), config.tile, config.stages, num_warps=config.warps,
        )  # fmt: skip
    chunk = min(rank, _CHUNK // 4 if batch <= configs.LATENT_FEW else _CHUNK)
    _add_latent_parts[(batch * groups, rank // chunk)](
        seq_lens, out, scratch.parts, scratch.stats, batch, config.programs, groups, group, rank, lanes, config.tile, own, chunk,
        max(4096 // (own * chunk), 1), num_warps=4, maxnreg=128 if own > 16 else 255,
    )  # fmt: skip
    return out


@triton.jit(do_not_specialize=["sequences"])
def _latent_prefill(
    q_latent_ptr, q_rope_ptr, k_ptr, v_ptr, table_ptr, rows_ptr, starts_ptr, lens_ptr, out_ptr, sequences, table_stride, scale,
    GROUPS: tl.constexpr, GROUP: tl.constexpr, BLOCK_SIZE: tl.constexpr, RANK: tl.constexpr, ROPE: tl.constexpr, ROWS: tl.constexpr,
    TOKENS: tl.constexpr, TILE: tl.constexpr, STAGES: tl.constexpr, STEPS: tl.constexpr,
):  # fmt: skip
    group = tl.program_id(0) % GROUPS
    tile = (tl.num_programs(0) - 1 - tl.program_id(0)) // GROUPS
    origin = tl.load(starts_ptr)
    sequence = find_sequence(starts_ptr, tile, sequences, origin, TOKENS, STEPS)
    begin = tl.load(starts_ptr + sequence)
    queries = tl.load(starts_ptr + sequence + 1) - begin
    first = (tile - (begin - origin) // TOKENS - sequence) * TOKENS
    if first >= queries:
        return
    length = tl.load(lens_ptr + sequence)
    row, lane, turn = tl.arange(0, ROWS), tl.arange(0, RANK), tl.arange(0, ROPE)
    query = first + row // GROUP
    held = ((row < TOKENS * GROUP) & (query < queries))[:, None]
    head_row = (((begin + query).to(tl.int64) * GROUPS + group) * GROUP + row % GROUP)[:, None]
    q_latent = tl.load(q_latent_ptr + head_row * RANK + lane[None, :], held, 0.0)
    q_rope = tl.load(q_rope_ptr + head_row * ROPE + turn[None, :], held, 0.0)
    table = table_ptr + tl.load(rows_ptr + sequence).to(tl.int64) * table_stride
    position = length - queries + query
    stop = length - queries + tl.minimum(first + TOKENS, queries)
    # Every row sees token 0, in the first tile: no row's maximum is -inf afterwards.
    top, total, values = nothing_seen(ROWS, RANK)
    _, total, values = _steps(
        q_latent, q_rope, k_ptr, v_ptr, table, position, length, tile * 0, stop, top, total, values, scale,
        BLOCK_SIZE, RANK, ROPE, TILE, STAGES, True,
    )  # fmt: skip
    tl.store(out_ptr + head_row * RANK + lane[None, :], values / total[:, None], held)


def latent_prefill(
    q_latent: Tensor, q_rope: Tensor, k_cache: Tensor, v_cache: Tensor, block_table: Tensor, rows: Tensor, query_start_loc: Tensor,
    seq_lens: Tensor, scale: float, *, max_query_len: int, out: Tensor | None = None, config: configs.Prefill | None = None,
) -> Tensor:  # fmt: skip
    """See reference_latent.latent_prefill. All contiguous; the grid covers what max_query_len · N and T both allow."""
    (tokens, heads, rank), sequences = q_latent.shape, rows.shape[0]
    out = torch.zeros_like(q_latent) if out is None else out
    if not tokens or not sequences:
        return out
    config = configs.latent_prefill(q_latent.device, q_latent.element_size()) if config is None else config
    groups = configs.latent_groups(heads, config.rows)
    group = heads // groups
    per_tile = max(config.rows // group, 1)
    tiles = min(tokens, max_query_len * sequences) // per_tile + sequences
    _latent_prefill[(tiles * groups,)](
        q_latent, q_rope, k_cache, v_cache, block_table, rows, query_start_loc, seq_lens, out, sequences, block_table.stride(0),
        configs.score_scale(scale, 0.0)[0], groups, group, v_cache.shape[2], rank, q_rope.shape[2],
        max(config.rows, triton.next_power_of_2(group)), per_tile, config.tile, config.stages,
        configs.log2_ceil(configs.lanes_for(sequences)) + 1, num_warps=config.warps,
    )  # fmt: skip
    return out
