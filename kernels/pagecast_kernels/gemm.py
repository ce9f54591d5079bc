"""Matrix products for few rows: y[M, N] = x[M, K] @ weight[N, K].T with M <= 256, where decode lives.

Stream-K (Osama et al., 2023): the (tile, k) iterations of the whole product are dealt out evenly to a fixed grid, so no wave is
ever half empty, whatever N and K are. A tile that several programs share is reduced by the last of them to arrive, in program
order, so the result does not depend on timing. The weight tile is the left operand of the dot (it has the 64 and more rows that
wgmma wants) and the few rows of x are the right one.

Knows nothing of models. Which launch wins for a shape is in gemm_table.
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from triton.tools.tensor_descriptor import TensorDescriptor


class GemmConfig(NamedTuple):
    """One launch: tile of weight rows, tile of k, software pipeline depth, warps, programs per multiprocessor."""

    block_n: int
    block_k: int
    num_stages: int
    num_warps: int
    programs_per_sm: int
    block_m: int = 0  # 0: the rows rounded up to a power of two
    prefetch: int = -1  # bytes of each weight row fetched to L2 before the kernel before this one has ended; -1: plain launch


@triton.jit
def _store_tile(acc, out_ptr, tile_n, tile_m, M, N, BLOCK_N: tl.constexpr, BLOCK_M: tl.constexpr):
    """Write acc[BLOCK_N, BLOCK_M] transposed to out[M, N]."""
    rows = tile_m * BLOCK_M + tl.arange(0, BLOCK_M)
    cols = tile_n * BLOCK_N + tl.arange(0, BLOCK_N)
    value = tl.trans(acc).to(out_ptr.dtype.element_ty)
    mask = (rows[:, None] < M) & (cols[None, :] < N)
    tl.store(out_ptr + rows[:, None].to(tl.int64) * N + cols[None, :], value, mask=mask)


@triton.jit
def _prefetch_rows(weight_ptr, tile_n, k_first, N, K, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, BYTES: tl.constexpr):
    """Ask L2 for BYTES of each row of the first weight tile, from its first k on; inside the row and the matrix only."""
    rows = tl.minimum(tile_n * BLOCK_N + tl.arange(0, BLOCK_N), N - 1).to(tl.int64)
    first = tl.minimum(k_first * BLOCK_K, K - BYTES // 2)
    tl.inline_asm_elementwise(
        f"cp.async.bulk.prefetch.L2.global [$1], {BYTES}; mov.u32 $0, 0;", "=r,l", [weight_ptr + rows * K + first],
        dtype=tl.int32, is_pure=False, pack=1,
    )


@triton.jit
def linear_stream_k(
    weight, x, weight_ptr, out_ptr, partial_ptr, counter_ptr, M, N, K, num_m, iters_per_tile, per_program, total,
    BLOCK_N: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_K: tl.constexpr, PREFETCH: tl.constexpr,
):
    """weight: descriptor [N, K], block [BLOCK_N, BLOCK_K]. x: descriptor [M, K], block [BLOCK_M, BLOCK_K].

    partial: float32 [programs, 2, BLOCK_N, BLOCK_M]; a program shares at most its first and its last tile. counter: int32 per tile,
    zero before and after. Tiles are numbered n-major, so the row tiles of one weight tile are neighbours in L2. With PREFETCH >= 0
    the launch is programmatic: it may start before its predecessor has ended, and touches only the weight until that has.
    """
    pid = tl.program_id(0)
    begin = pid * per_program
    end = tl.minimum(begin + per_program, total)
    if PREFETCH >= 0:
        tl.extra.cuda.gdc_launch_dependents()
        if PREFETCH > 0:
            tile = begin // iters_per_tile
            _prefetch_rows(weight_ptr, tile // num_m, begin - tile * iters_per_tile, N, K, BLOCK_N, BLOCK_K, PREFETCH)
        tl.extra.cuda.gdc_wait()
    inside = tl.arange(0, BLOCK_N)[:, None] * BLOCK_M + tl.arange(0, BLOCK_M)[None, :]
    step = begin
    while step < end:
        tile = step // iters_per_tile
        k_first = step - tile * iters_per_tile
        k_last = tl.minimum(iters_per_tile, k_first + end - step)
        tile_n = tile // num_m
        tile_m = tile - tile_n * num_m
        acc = tl.zeros([BLOCK_N, BLOCK_M], dtype=tl.float32)
        for k in range(k_first, k_last):
            w = weight.load([tile_n * BLOCK_N, k * BLOCK_K])
            rows = x.load([tile_m * BLOCK_M, k * BLOCK_K])
            acc = tl.dot(w, rows.T, acc)
        if k_last - k_first == iters_per_tile:
            _store_tile(acc, out_ptr, tile_n, tile_m, M, N, BLOCK_N, BLOCK_M)
        else:
            slot = tl.where(step == begin, 0, 1)
            tl.store(partial_ptr + (pid * 2 + slot).to(tl.int64) * (BLOCK_N * BLOCK_M) + inside, acc)
            tl.debug_barrier()
            done = tl.atomic_add(counter_ptr + tile, k_last - k_first, sem="acq_rel") + k_last - k_first
            if done == iters_per_tile:
                first = tile * iters_per_tile // per_program
                last = (tile * iters_per_tile + iters_per_tile - 1) // per_program
                acc = tl.zeros([BLOCK_N, BLOCK_M], dtype=tl.float32)
                for other in range(first, last + 1):
                    theirs = tl.where(other * per_program >= tile * iters_per_tile, 0, 1)
                    acc += tl.load(partial_ptr + (other * 2 + theirs).to(tl.int64) * (BLOCK_N * BLOCK_M) + inside, cache_modifier=".cg")
                tl.store(counter_ptr + tile, 0)
                _store_tile(acc, out_ptr, tile_n, tile_m, M, N, BLOCK_N, BLOCK_M)
        step += k_last - k_first


class GemmWorkspace:
    """Scratch of linear_stream_k for one stream: partial tiles and per-tile counters. Products on one stream share it."""

    def __init__(self, device: torch.device, partial_bytes: int = 160 << 20, max_tiles: int = 1 << 16) -> None:
        self.partial = torch.empty(partial_bytes // 4, dtype=torch.float32, device=device)
        self.counters = torch.zeros(max_tiles, dtype=torch.int32, device=device)


def block_m_for(rows: int, config: GemmConfig) -> int:
    """Rows of x per tile: the configured number, or M rounded up to a power of two in 16 .. 256."""
    return config.block_m or min(256, max(16, triton.next_power_of_2(rows)))


def linear_with(
    x: torch.Tensor, weight: torch.Tensor, config: GemmConfig, workspace: GemmWorkspace, num_sms: int, out: torch.Tensor | None = None,
) -> torch.Tensor:
    """x [M, K] @ weight [N, K].T -> [M, N] with the given launch. bf16 or fp16, both contiguous, K a multiple of 8."""
    (M, K), N = x.shape, weight.shape[0]
    if out is None:
        out = torch.empty((M, N), dtype=x.dtype, device=x.device)
    block_m = block_m_for(M, config)
    num_m, num_n = triton.cdiv(M, block_m), triton.cdiv(N, config.block_n)
    iters = triton.cdiv(K, config.block_k)
    total = num_m * num_n * iters
    per_program = triton.cdiv(total, num_sms * config.programs_per_sm)
    programs = triton.cdiv(total, per_program)
    if programs * 2 * config.block_n * block_m > workspace.partial.numel() or num_m * num_n > workspace.counters.numel():
        raise ValueError(f"workspace too small for a product of {M} x {N} x {K}")
    linear_stream_k[(programs,)](
        TensorDescriptor(weight, [N, K], [K, 1], [config.block_n, config.block_k]), TensorDescriptor(x, [M, K], [K, 1], [block_m, config.block_k]),
        weight, out, workspace.partial, workspace.counters, M, N, K, num_m, iters, per_program, total,
        BLOCK_N=config.block_n, BLOCK_M=block_m, BLOCK_K=config.block_k, PREFETCH=config.prefetch, num_stages=config.num_stages,
        num_warps=config.num_warps, launch_pdl=config.prefetch >= 0,
    )
    return out
