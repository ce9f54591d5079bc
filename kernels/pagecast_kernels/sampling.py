"""Sampling without a sort of the vocabulary.

The smallest logit that top-k, top-p and min-p keep of each row comes from `cutoffs`, which also draws where few are kept. `_choose`
splits the other rows among programs, adds Philox noise where a row is random and a tile holds kept tokens, and the last program of a
row to arrive picks the winner. `open_rows` finishes those rows whose cut-off is hard to find.
"""

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from pagecast_kernels import configs
from pagecast_kernels.cutoffs import DRAWN, OPEN, CutoffWorkspace, cutoff_workspace, find_cutoffs
from pagecast_kernels.noise import NO_LEADER, PER_ROW, best_of, key_of, scale_of
from pagecast_kernels.open_rows import finish_open_rows
from pagecast_kernels.shares import arrives_last


@dataclass(frozen=True)
class SampleWorkspace:
    """Device memory of one `sample` at a time. counters int32[B], zero, and leaders int32[B], NO_LEADER, between launches; the rest is
    scratch."""

    counters: Tensor
    leaders: Tensor
    narrowing: CutoffWorkspace
    best: Tensor
    best_ids: Tensor


def sample_workspace(max_rows: int, device: torch.device | str) -> SampleWorkspace:
    """Workspace for at most max_rows rows; it may be made before a graph is captured and used inside it."""

    counters, ids = (torch.zeros(n, dtype=torch.int32, device=device) for n in (max_rows, max_rows * configs.MAX_SLICES))
    best = torch.empty(max_rows * configs.MAX_SLICES, dtype=torch.float32, device=device)
    leaders = torch.full((max_rows,), NO_LEADER.value, dtype=torch.int32, device=device)
    return SampleWorkspace(counters, leaders, cutoff_workspace(max_rows, device), best, ids)


@triton.jit(do_not_specialize_on_alignment=PER_ROW)
def _choose(
    logits_ptr, temperature_ptr, top_k_ptr, seeds_ptr, sequence_ptr, positions_ptr, cutoffs_ptr, states_ptr, out_ptr,
    counters_ptr, leaders_ptr, best_ptr, best_ids_ptr, vocab, stride, slice_size,
    SLICES: tl.constexpr, FILTERED: tl.constexpr, SHARED: tl.constexpr, TILE: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    if EARLY:
        gdc_launch_dependents()
        gdc_wait()
    row, part = tl.program_id(0), tl.program_id(1)
    logits = logits_ptr + row.to(tl.int64) * stride
    random, inverse = scale_of(temperature_ptr, top_k_ptr, row)
    cutoff = tl.full((), float("-inf"), tl.float32)
    if FILTERED:
        state = tl.load(states_ptr + row)
        if (state == DRAWN) | (state == OPEN):
            return
        cutoff = tl.load(cutoffs_ptr + row)
        cutoff = tl.where(cutoff == cutoff, cutoff, float("-inf"))
    key = key_of(seeds_ptr, sequence_ptr, positions_ptr, row)
    begin = part * slice_size
    end = tl.minimum(begin + slice_size, vocab)
    top, token = best_of(logits, begin, end, 0, cutoff, random, inverse, key, leaders_ptr + row, False, SHARED, TILE)
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
        if SHARED:
            tl.store(leaders_ptr + row, NO_LEADER)


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
    rows = (logits, temperature, top_k, top_p, min_p, seeds, sequence, positions, out, work.narrowing)
    if filtered:
        find_cutoffs(*rows, cut_slices)
    early = filtered and configs.is_hopper(logits.device)
    how = configs.draws(batch, vocab, logits.device)
    _choose[(batch, how.slices)](
        logits, temperature, top_k, seeds, sequence, positions, work.narrowing.cutoffs, work.narrowing.states, out,
        work.counters, work.leaders, work.best, work.best_ids,
        vocab, logits.stride(0), how.slice_size(vocab), how.slices, filtered, how.shared, how.tile, early, num_warps=how.warps,
        **configs.beside_the_last(early),
    )  # fmt: skip
    if filtered:
        finish_open_rows(*rows, cut_slices)
    return out
