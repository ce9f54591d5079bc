"""Sums over the GPUs of one host through memory that each can read of the others, without NCCL's protocol: for messages so small that
latency is all. Plain loads over NVLink; never multicast.

One shot: every rank copies its summand where its peers can read it, says so, waits for them, and adds all summands in the order of
ranks; all get the same bits. Two shots: every rank adds up its share of each tile, and a second exchange brings the shares together;
that moves 2 (n - 1) / n of the message instead of n - 1 times it, so it pays from four ranks on.

No launch waits for another program of its own grid, only for the same program on every peer, and nothing has to be reset: flags and
the two slots that calls alternate between follow from a count of calls, kept on the device, so that CUDA graphs may hold any of it.
A program that has passed call n + 1's exchange knows that its peers have done with call n, whose slot call n + 2 writes again.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from pagecast_kernels import configs

TILE = 4096
"""Most elements of a program of `all_reduce`, and what its place in the shared memory holds."""
MAX_PROGRAMS = 1024
_FLAGS_BYTES = 1 << 17  # two exchanges x 1,024 programs x at most 16 ranks x 4 bytes


@dataclass(frozen=True)
class Peers:
    """One rank's view of the memory that `ranks` ranks share. places: of programs, each of `width` elements.

    buffers, flags int64[ranks]: addresses of every rank's data and flags, this one's too; counters int32[places]: calls so far.
    owner: keeps the memory alive.
    """

    rank: int
    ranks: int
    width: int
    places: int
    buffers: Tensor
    flags: Tensor
    counters: Tensor
    owner: object = None


def shared_bytes(width: int, places: int, itemsize: int) -> int:
    """Bytes that each rank shares: flags first, then two slots of summands and one of sums. All zero at the start."""
    return _FLAGS_BYTES + 3 * width * places * itemsize


def peers_over(addresses: Sequence[int], rank: int, width: int, places: int, device: torch.device | str, owner: object = None) -> Peers:
    """addresses: where the shared memory of every rank lies as this rank sees it, in the order of ranks."""
    flags = torch.tensor(list(addresses), dtype=torch.int64, device=device)
    counters = torch.zeros(places, dtype=torch.int32, device=device)
    return Peers(rank, len(addresses), width, places, flags + _FLAGS_BYTES, flags, counters, owner)


@triton.jit
def _exchange(flags_ptr, first, rank, call, RANKS: tl.constexpr, LANES: tl.constexpr):
    """Tell every peer that this program has written for `call`, and wait until all have. first: of this program's flags.

    One lane for each rank, so that peers are told, and looked after, at the same time."""
    lane = tl.arange(0, LANES)
    real = lane < RANKS
    theirs = tl.load(flags_ptr + lane, real, 0).to(tl.pointer_type(tl.int32))
    own = tl.load(flags_ptr + rank).to(tl.pointer_type(tl.int32)) + first + lane
    tl.debug_barrier()
    tl.atomic_xchg(theirs + first + rank, call, real, sem="release", scope="sys")
    behind = tl.min(tl.where(real, tl.atomic_add(own, 0, real, sem="acquire", scope="sys") - call, 0), 0)
    while behind < 0:  # by difference: the count may wrap
        behind = tl.min(tl.where(real, tl.atomic_add(own, 0, real, sem="acquire", scope="sys") - call, 0), 0)
    tl.debug_barrier()


@triton.jit
def _summed(buffers_ptr, place, inside, out_ptr, RANKS: tl.constexpr, WIDTH: tl.constexpr):
    """float32 sum over ranks, in their order, of the elements at `place`."""
    total = tl.zeros((WIDTH,), tl.float32)
    for peer in tl.static_range(RANKS):
        theirs = tl.multiple_of(tl.load(buffers_ptr + peer).to(tl.pointer_type(out_ptr.dtype.element_ty)), 16)
        total += tl.load(theirs + place, inside, 0.0, cache_modifier=".cg").to(tl.float32)
    return total


@triton.jit(do_not_specialize=["rank", "places"])
def _all_reduce(
    x_ptr, out_ptr, buffers_ptr, flags_ptr, counters_ptr, count, rank, places,
    RANKS: tl.constexpr, LANES: tl.constexpr, WIDTH: tl.constexpr, PLACE: tl.constexpr, TWO_SHOTS: tl.constexpr, ADD: tl.constexpr,
):  # fmt: skip
    program = tl.program_id(0)
    call = tl.load(counters_ptr + program) + 1
    slot = ((call & 1) * places + program).to(tl.int64) * PLACE
    column = tl.arange(0, WIDTH)
    element = program * WIDTH + column
    own = tl.multiple_of(tl.load(buffers_ptr + rank).to(tl.pointer_type(out_ptr.dtype.element_ty)), 16)
    tl.store(own + slot + column, tl.load(x_ptr + element, element < count, 0.0))
    _exchange(flags_ptr, program * RANKS, rank, call, RANKS, LANES)
    if TWO_SHOTS:
        SHARE: tl.constexpr = WIDTH // RANKS
        share = rank * SHARE + tl.arange(0, SHARE)
        sums = (2 * places + program).to(tl.int64) * PLACE
        total = _summed(buffers_ptr, slot + share, share < WIDTH, out_ptr, RANKS, SHARE)
        tl.store(own + sums + share, total)
        _exchange(flags_ptr, (places + program) * RANKS, rank, call, RANKS, LANES)
        for peer in tl.static_range(RANKS):
            part = peer * SHARE + tl.arange(0, SHARE)
            theirs = tl.multiple_of(tl.load(buffers_ptr + peer).to(tl.pointer_type(out_ptr.dtype.element_ty)), 16)
            value = tl.load(theirs + sums + part, cache_modifier=".cg")
            place = program * WIDTH + part
            if ADD:
                value = (value.to(tl.float32) + tl.load(out_ptr + place, place < count, 0.0).to(tl.float32)).to(value.dtype)
            tl.store(out_ptr + place, value, place < count)
    else:
        total = _summed(buffers_ptr, slot + column, column < WIDTH, out_ptr, RANKS, WIDTH)
        if ADD:
            total += tl.load(out_ptr + element, element < count, 0.0).to(tl.float32)
        tl.store(out_ptr + element, total, element < count)
    tl.store(counters_ptr + program, call)


def all_reduce(x: Tensor, peers: Peers, residual: Tensor | None = None, two_shots: bool = False) -> Tensor:
    """Sum of x over ranks, in place; or added to residual in place, which is then returned. x is contiguous, of at most
    places · TILE elements, the same shape on every rank; with two_shots the number of ranks is a power of two."""
    count = x.numel()
    width = configs.all_reduce_tile(count)
    out = x if residual is None else residual
    _all_reduce[(triton.cdiv(count, width),)](
        x, out, peers.buffers, peers.flags, peers.counters, count, peers.rank, peers.places, peers.ranks,
        triton.next_power_of_2(peers.ranks), width, peers.width, two_shots, residual is not None, num_warps=max(width // 512, 1),
    )  # fmt: skip
    return out


@triton.jit(do_not_specialize=["rank", "places"])
def _all_reduce_add_rms_norm(
    x_ptr, residual_ptr, weight_ptr, out_ptr, buffers_ptr, flags_ptr, counters_ptr, hidden, rank, places, eps,
    RANKS: tl.constexpr, LANES: tl.constexpr, BLOCK: tl.constexpr, PLACE: tl.constexpr,
):  # fmt: skip
    program = tl.program_id(0)
    row = program.to(tl.int64) * hidden
    call = tl.load(counters_ptr + program) + 1
    slot = ((call & 1) * places + program).to(tl.int64) * PLACE
    column = tl.arange(0, BLOCK)
    inside = column < hidden
    own = tl.multiple_of(tl.load(buffers_ptr + rank).to(tl.pointer_type(out_ptr.dtype.element_ty)), 16)
    tl.store(own + slot + column, tl.load(x_ptr + row + column, inside, 0.0), inside)
    # On their way while peers are waited for.
    residual = tl.load(residual_ptr + row + column, inside, 0.0).to(tl.float32)
    weight = tl.load(weight_ptr + column, inside, 0.0).to(tl.float32)
    _exchange(flags_ptr, program * RANKS, rank, call, RANKS, LANES)
    total = _summed(buffers_ptr, slot + column, inside, out_ptr, RANKS, BLOCK) + residual
    tl.store(residual_ptr + row + column, total, inside)
    scale = tl.rsqrt(tl.sum(total * total, 0) / hidden + eps)
    tl.store(out_ptr + row + column, total * scale * weight, inside)
    tl.store(counters_ptr + program, call)


def all_reduce_add_rms_norm(x: Tensor, residual: Tensor, weight: Tensor, eps: float, peers: Peers, out: Tensor | None = None) -> Tensor:
    """residual[T, H] += the sum of x[T, H] over ranks, in place; returns RMSNorm of it. One shot, one program a row.

    peers' places are at least T and at least H wide. x may be the result's memory.
    """
    tokens, hidden = x.shape
    out = torch.empty_like(x) if out is None else out
    block = triton.next_power_of_2(hidden)
    if tokens:
        _all_reduce_add_rms_norm[(tokens,)](
            x, residual, weight, out, peers.buffers, peers.flags, peers.counters, hidden, peers.rank, peers.places, eps,
            peers.ranks, triton.next_power_of_2(peers.ranks), block, peers.width, num_warps=configs.row_warps(block),
        )  # fmt: skip
    return out
