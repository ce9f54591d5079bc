"""Sampling without a sort of the vocabulary.

The smallest logit that top-k, top-p and min-p keep of each row comes from `cutoffs`. `_choose` splits every row among programs, adds
Philox noise where a row is random and a tile holds kept tokens, and the last program of a row to arrive picks the winner.
"""

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from pagecast_kernels import configs
from pagecast_kernels.cutoffs import CutoffWorkspace, cutoff_workspace, find_cutoffs
from pagecast_kernels.noise import bits_from, key_of, noisy, scale_of
from pagecast_kernels.shares import arrives_last

_MOST_NOISE = tl.constexpr(16.7)  # more than -log(-log u) of the largest u, 1 - 2⁻²⁴
_TILE = 2048  # logits a step of `_choose`


@dataclass(frozen=True)
class SampleWorkspace:
    """Device memory of one `sample` at a time. counters int32[B], zero between launches; the rest is scratch."""

    counters: Tensor
    narrowing: CutoffWorkspace
    best: Tensor
    best_ids: Tensor


def sample_workspace(max_rows: int, device: torch.device | str) -> SampleWorkspace:
    """Workspace for at most max_rows rows; it may be made before a graph is captured and used inside it."""

    counters, ids = (torch.zeros(n, dtype=torch.int32, device=device) for n in (max_rows, max_rows * configs.MAX_SLICES))
    best = torch.empty(max_rows * configs.MAX_SLICES, dtype=torch.float32, device=device)
    return SampleWorkspace(counters, cutoff_workspace(max_rows, device), best, ids)


@triton.jit
def _choose(
    logits_ptr, temperature_ptr, top_k_ptr, seeds_ptr, sequence_ptr, positions_ptr, cutoffs_ptr, drawn_ptr, out_ptr,
    counters_ptr, best_ptr, best_ids_ptr, vocab, stride, slice_size,
    SLICES: tl.constexpr, FILTERED: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    row, part = tl.program_id(0), tl.program_id(1)
    logits = logits_ptr + row.to(tl.int64) * stride
    random, inverse = scale_of(temperature_ptr, top_k_ptr, row)
    cutoff = tl.full((), float("-inf"), tl.float32)
    if FILTERED:
        if tl.load(drawn_ptr + row) > 0:
            return
        cutoff = tl.load(cutoffs_ptr + row)
    seed, sequence, position = key_of(seeds_ptr, sequence_ptr, positions_ptr, row)
    column = tl.arange(0, TILE)
    best = tl.full((TILE,), float("-inf"), tl.float32)
    best_id = tl.zeros((TILE,), tl.int32)
    broken = tl.zeros((TILE,), tl.int32)
    leader = tl.full((), float("-inf"), tl.float32)
    end = tl.minimum((part + 1) * slice_size, vocab)
    following = tl.load(logits + part * slice_size + column, part * slice_size + column < end, float("-inf"))
    for start in range(part * slice_size, end, TILE):
        x = following.to(tl.float32)
        following = tl.load(logits + start + TILE + column, start + TILE + column < end, float("-inf"))
        broken |= ((x != x) | (x == float("inf"))).to(tl.int32)
        x = tl.where(x >= cutoff, x, float("-inf"))
        if random:
            x = x * inverse
            if tl.max(x, 0) + _MOST_NOISE > leader:
                bits = bits_from(seed, sequence, position, start, TILE // 4)
                # -log u >= 1 - u, so -log(1 - u) bounds the noise from above: few tiles need the exact one.
                bound = x - tl.log2((8388607 - bits).to(tl.float32) + 0.5) * 0.6931471805599453 + (15.942385152878742 + 1e-3)
                if tl.max(bound, 0) > leader:
                    score = noisy(x, bits)
                    best_id = tl.where(score > best, start + column, best_id)
                    best = tl.maximum(best, score)
                    leader = tl.maximum(leader, tl.max(score, 0))
        else:
            best_id = tl.where(x > best, start + column, best_id)
            best = tl.maximum(best, x)
    top = tl.max(best, 0)
    token = tl.min(tl.where(best == top, best_id, 0x7FFFFFFF), 0)
    # A slice that holds NaN or infinity says so by an infinite best, which no sound slice has.
    top = tl.where(tl.max(broken, 0) > 0, float("inf"), top)
    tl.store(best_ptr + row * SLICES + part, top)
    tl.store(best_ids_ptr + row * SLICES + part, token)
    tl.debug_barrier()
    if arrives_last(counters_ptr + row, 0, SLICES - 1):
        index = tl.arange(0, SLICES)
        tops = tl.load(best_ptr + row * SLICES + index, cache_modifier=".cg")
        tokens = tl.load(best_ids_ptr + row * SLICES + index, cache_modifier=".cg")
        top = tl.max(tops, 0)
        token = tl.min(tl.where(tops == top, tokens, 0x7FFFFFFF), 0)
        tl.store(out_ptr + row, tl.where((top == float("inf")) | (top == float("-inf")), -1, token))
        tl.store(counters_ptr + row, 0)


def sample(
    logits: Tensor,
    temperature: Tensor,
    top_k: Tensor,
    top_p: Tensor,
    min_p: Tensor,
    seeds: Tensor,
    sequence: Tensor,
    positions: Tensor,
    *,
    out: Tensor | None = None,
    workspace: SampleWorkspace | None = None,
    filtered: bool = True,
    cut_slices: int | None = None,
) -> Tensor:
    """See reference.sample. Rows of logits may be strided. filtered False promises that no row uses top-k, top-p or min-p.
    cut_slices: see find_cutoffs.

    Sums of probabilities are float32: a token within rounding of the nucleus' edge may fall on either side of it.
    """
    batch, vocab = logits.shape
    out = torch.empty(batch, dtype=torch.int32, device=logits.device) if out is None else out
    if not batch:
        return out
    work = sample_workspace(batch, logits.device) if workspace is None else workspace
    if filtered:
        find_cutoffs(logits, temperature, top_k, top_p, min_p, seeds, sequence, positions, out, work.narrowing, cut_slices)
    slices = configs.sample_slices(batch, vocab, logits.device)
    slice_size = triton.cdiv(triton.cdiv(vocab, _TILE), slices) * _TILE
    _choose[(batch, slices)](
        logits, temperature, top_k, seeds, sequence, positions, work.narrowing.cutoffs, work.narrowing.drawn, out,
        work.counters, work.best, work.best_ids,
        vocab, logits.stride(0), slice_size, slices, filtered, _TILE, num_warps=8,
    )  # fmt: skip
    return out
