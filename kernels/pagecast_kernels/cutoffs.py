"""The cut-offs of sampling: the smallest logit that top-k, top-p and min-p keep of each row, without sorting one.

Three launches. `_bound` splits every row among programs and keeps the maxima of columns, which are short runs of neighbours at even
distances. In `_pick` one program a row takes the k-th largest of them, which bounds the row's k-th largest from below and rather closely.
What lies above it lies in the columns whose maxima do, so that the row's few candidates are found without going over it again: the exact
cut-off is built from them bit by bit, by counting, and the row's token is drawn from them. Rows that such columns do not decide go to
`_narrow`, where many programs a row gather the candidates, and the last of a row to arrive goes on as `_pick` does: top-p alone, whose
mass is the whole row's, and rows whose candidates are many. Rows whose nucleus is wider than the candidates, top_k in the hundreds or
thousands of equal logits stay open: see `open_rows`. A row without limits costs a glance at each.

On Hopper a launch is made ready while the one before it ends, and waits by itself.
"""

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from pagecast_kernels import configs
from pagecast_kernels.noise import GREEDY_BELOW, PER_ROW, bits_of, key_of, noisy
from pagecast_kernels.searches import kth_largest, nucleus_of
from pagecast_kernels.shares import arrives_last

_TILE, _LARGE_TILE = 2048, 4096  # logits a step of the programs that share a row, where they gather and where they only look
COLUMNS = 2048  # of a row, whose maxima are kept
_FEW = 256  # candidates that are taken together, wherever they lie
_MOST = 192  # columns that `_pick` looks into
_TOGETHER = 2048  # logits of them at a time
WANTED = tl.constexpr(512)  # columns whose maxima bound the candidates where top-k does not say
LEAST_TOP_P = tl.constexpr(0.4)  # below it few draws from a whole row are in the nucleus, and a search is as fast

# States of a row: drawn from as far as its cut-off reaches, or whole if that is NaN, in which case `open_rows` sees whether the token
# is kept (PROPOSED); has its token (DRAWN); has neither cut-off nor token (OPEN).
TO_DRAW, DRAWN, PROPOSED, OPEN = tl.constexpr(0), tl.constexpr(1), tl.constexpr(2), tl.constexpr(3)

# The bits of a float32 that can differ between values of a type: sign, exponent, and as much of the fraction as it has.
KEY_BITS = {torch.bfloat16: 16, torch.float16: 19, torch.float32: 32}


@dataclass(frozen=True)
class CutoffWorkspace:
    """Device memory of one call at a time. counters int32[B], zero between launches; cutoffs float32[B], NaN where open, and
    states int32[B], the results; bounds float32[B, 3]: of a row with limits its candidates' bound, its largest logit and, with top-p
    alone, its mass relative to that; the rest is scratch: maxima, candidates and their tokens of each row, each slice's count and mass."""

    counters: Tensor
    cutoffs: Tensor
    states: Tensor
    maxima: Tensor
    candidates: Tensor
    tokens: Tensor
    bounds: Tensor
    counts: Tensor
    masses: Tensor


def cutoff_workspace(max_rows: int, device: torch.device | str) -> CutoffWorkspace:
    """Workspace for at most max_rows rows; it may be made before a graph is captured and used inside it."""

    def make(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
        return torch.zeros(shape, dtype=dtype, device=device)

    slices, whole = configs.MAX_CUT_SLICES, torch.int32
    most = slices * _segment(slices)
    return CutoffWorkspace(
        make(max_rows, dtype=whole), make(max_rows), make(max_rows, dtype=whole), make(max_rows, COLUMNS), make(max_rows, most),
        make(max_rows, most, dtype=whole), make(max_rows, 3), make(max_rows, slices, dtype=torch.int32), make(max_rows, slices),
    )  # fmt: skip


def _segment(slices: int) -> int:
    """Candidates that a slice of a row may have: where a vocabulary's likely tokens lie together, several times an even share."""
    return max(2048 // slices, 256)


@triton.jit
def _limits(temperature_ptr, top_k_ptr, top_p_ptr, min_p_ptr, row, vocab):
    """What bounds a row: temperature, top_k, top_p, min_p; whether top-k and top-p do; whether anything does."""
    temperature, top_k = tl.load(temperature_ptr + row), tl.load(top_k_ptr + row)
    top_p, min_p = tl.load(top_p_ptr + row), tl.load(min_p_ptr + row)
    in_k, in_p = (top_k > 0) & (top_k < vocab), top_p < 1.0
    bounded = (temperature >= GREEDY_BELOW) & (top_k != 1) & (in_k | in_p | (min_p > 0.0))
    return temperature, top_k, top_p, min_p, in_k, in_p, bounded


@triton.jit(do_not_specialize_on_alignment=PER_ROW)
def _bound(
    logits_ptr, temperature_ptr, top_k_ptr, top_p_ptr, min_p_ptr, cutoffs_ptr, states_ptr, maxima_ptr, vocab, stride, slice_size,
    SLICES: tl.constexpr, COLUMNS: tl.constexpr, TILE: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """The maxima of a slice's columns: of TILE // (COLUMNS // SLICES) neighbours in each tile; infinite where a column holds NaN."""
    if EARLY:
        gdc_launch_dependents()
    row, part = tl.program_id(0), tl.program_id(1)
    _, _, _, _, _, _, bounded = _limits(temperature_ptr, top_k_ptr, top_p_ptr, min_p_ptr, row, vocab)
    if part == 0:
        tl.store(states_ptr + row, TO_DRAW)
    if bounded:
        OWN: tl.constexpr = COLUMNS // SLICES
        logits = logits_ptr + row.to(tl.int64) * stride
        column = tl.arange(0, TILE)
        end = tl.minimum((part + 1) * slice_size, vocab)
        most = tl.full((TILE,), float("-inf"), tl.float32)
        for start in tl.range(part * slice_size, end, TILE, num_stages=1):
            x = tl.load(logits + start + column, start + column < end, float("-inf")).to(tl.float32)
            most = tl.maximum(most, x, propagate_nan=tl.PropagateNan.ALL)
        runs = tl.reshape(most, (OWN, TILE // OWN))
        broken = tl.max((~(runs < float("inf"))).to(tl.int32), 1)
        kept = tl.where(broken > 0, float("inf"), tl.max(runs, 1))
        tl.store(maxima_ptr + row.to(tl.int64) * COLUMNS + part * OWN + tl.arange(0, OWN), kept)
    elif part == 0:
        tl.store(cutoffs_ptr + row, float("-inf"))


@triton.jit
def _gather(
    logits, start, end, bound, top, inverse, candidates, tokens, weighed, TILE: tl.constexpr, SEGMENT: tl.constexpr,
):  # fmt: skip
    """Write the logits of [start, end) from `bound` up to `candidates`, while they fit: how many there are; the mass, if weighed.

    A slice that holds NaN or infinity has more than fit: such a row is nothing to draw from."""
    column = tl.arange(0, TILE)
    count = tl.zeros((), tl.int32)
    mass = tl.zeros((TILE,), tl.float32)
    broken = tl.zeros((TILE,), tl.int32)
    for begin in tl.range(start, end, TILE, num_stages=4):
        x = tl.load(logits + begin + column, begin + column < end, float("-inf")).to(tl.float32)
        broken |= (~(x < float("inf"))).to(tl.int32)
        if weighed:
            mass += tl.exp((x - top) * inverse)
        chosen = ((x >= bound) & (begin + column < end)).to(tl.int32)
        found = tl.sum(chosen, 0)
        if found > 0:
            if count < SEGMENT:
                place = count + tl.cumsum(chosen, 0) - 1
                tl.store(candidates + place, x, (chosen > 0) & (place < SEGMENT))
                tl.store(tokens + place, begin + column, (chosen > 0) & (place < SEGMENT))
            count += found
    return tl.where(tl.max(broken, 0) > 0, SEGMENT + 1, count), tl.sum(mass, 0)


@triton.jit
def _draw(
    candidates, tokens, counts, cutoff, inverse, seed, sequence, position, SLICES: tl.constexpr, SEGMENT: tl.constexpr, STEP: tl.constexpr,
):  # fmt: skip
    """The kept token that wins with its noise, the lowest of equals: what noise.best_of finds by going over the whole row."""
    best = tl.full((STEP,), float("-inf"), tl.float32)
    best_id = tl.full((STEP,), 0x7FFFFFFF, tl.int32)
    for start in range(0, SLICES * SEGMENT, STEP):
        place = start + tl.arange(0, STEP)
        held = place % SEGMENT < tl.load(counts + place // SEGMENT, cache_modifier=".cg")
        x = tl.load(candidates + place, held, float("-inf"), cache_modifier=".cg")
        ids = tl.load(tokens + place, held, 0, cache_modifier=".cg")
        score = noisy(x * inverse, bits_of(seed, sequence, position, ids))
        score = tl.where(held & (x >= cutoff), score, float("-inf"))
        best_id = tl.where((score > best) | ((score == best) & (ids < best_id)), ids, best_id)
        best = tl.maximum(best, score)
    return tl.min(tl.where(best == tl.max(best, 0), best_id, 0x7FFFFFFF), 0)


@triton.jit
def _cut(x, fits, bound, top, inverse, whole, limits, BITS: tl.constexpr):
    """The cut-off of a row whose candidates are x and whose mass is `whole`; NaN, left open, where they do not decide it."""
    temperature, top_k, top_p, min_p, in_k, in_p = limits
    cutoff = bound
    if in_k | in_p:
        cutoff = tl.full((), float("nan"), tl.float32)
    if fits & (in_k | in_p) & (~in_k | (top_k <= WANTED)):
        weights = tl.exp((x - top) * inverse)
        cutoff = tl.full((), float("-inf"), tl.float32)
        if in_k:
            cutoff = kth_largest(x, top_k, BITS)
            whole = tl.sum(tl.where(x >= cutoff, weights, 0.0), 0)
        if in_p:
            wanted = tl.maximum(top_p * whole, 1e-30)  # top_p 0 keeps the largest
            if tl.sum(weights, 0) >= wanted:
                cutoff = tl.maximum(cutoff, nucleus_of(x, weights, wanted, BITS))
            else:
                cutoff = tl.full((), float("nan"), tl.float32)
        if min_p > 0.0:  # an open cut-off stays open
            least = top + temperature * tl.log(min_p)
            cutoff = tl.where(cutoff < least, least, cutoff)
    return cutoff


@triton.jit
def _gathered(candidates, tokens, counts, total, SEGMENT: tl.constexpr, FEW: tl.constexpr):
    """The candidates of a row, at most FEW, and their tokens, wherever in the slices' segments they lie."""
    index = tl.arange(0, FEW)
    before = tl.cumsum(counts, 0)[None, :] <= index[:, None]
    place = tl.sum(before.to(tl.int32), 1) * SEGMENT + index - tl.sum(tl.where(before, counts[None, :], 0), 1)
    x = tl.load(candidates + place, index < total, float("-inf"), cache_modifier=".cg")
    return x, tl.load(tokens + place, index < total, 0, cache_modifier=".cg")


@triton.jit
def _finish_few(x, ids, total, bound, top, inverse, whole, limits, key, outputs, BITS: tl.constexpr, FEW: tl.constexpr):
    """The cut-off and the token of a row whose candidates are the first `total` of x."""
    cutoff_ptr, out_ptr, state_ptr, open_state = outputs
    cutoff = _cut(x, total >= 0, bound, top, inverse, whole, limits, BITS)
    tl.store(cutoff_ptr, cutoff)
    if cutoff == cutoff:
        seed, sequence, position = key
        score = noisy(x * inverse, bits_of(seed, sequence, position, ids))
        score = tl.where((tl.arange(0, FEW) < total) & (x >= cutoff), score, float("-inf"))
        tl.store(out_ptr, tl.min(tl.where(score == tl.max(score, 0), ids, 0x7FFFFFFF), 0))
        tl.store(state_ptr, DRAWN)
    else:
        tl.store(state_ptr, open_state)


@triton.jit
def _finish_many(
    candidates, tokens, counts_ptr, fits, bound, top, inverse, whole, limits, key, outputs,
    BITS: tl.constexpr, SLICES: tl.constexpr, SEGMENT: tl.constexpr,
):  # fmt: skip
    """The same over all segments; a cut-off that stays open, NaN, where the candidates do not decide it."""
    cutoff_ptr, out_ptr, state_ptr, open_state = outputs
    place = tl.arange(0, SLICES * SEGMENT)
    held = place % SEGMENT < tl.load(counts_ptr + place // SEGMENT, cache_modifier=".cg")
    x = tl.load(candidates + place, held, float("-inf"), cache_modifier=".cg")
    cutoff = _cut(x, fits, bound, top, inverse, whole, limits, BITS)
    tl.store(cutoff_ptr, cutoff)
    if fits & (cutoff == cutoff):
        seed, sequence, position = key
        tl.store(out_ptr, _draw(candidates, tokens, counts_ptr, cutoff, inverse, seed, sequence, position, SLICES, SEGMENT, 256))
        tl.store(state_ptr, DRAWN)
    elif cutoff != cutoff:
        tl.store(state_ptr, open_state)


@triton.jit
def _gather_columns(
    logits, vocab, slice_size, every, wanted, columns, bound, candidates, tokens,
    OWN: tl.constexpr, TILE: tl.constexpr, TILES: tl.constexpr, FEW: tl.constexpr, TOGETHER: tl.constexpr,
):  # fmt: skip
    """Write the logits from `bound` up of the `wanted` of the columns `every`, and their tokens, while they fit FEW: how many there are.

    OWN: columns of a slice. TILES: tiles of a slice, or more. TOGETHER: columns at a time. The columns are listed in tokens, past FEW."""
    RUN: tl.constexpr = TILE // OWN
    listed = tokens + FEW
    tl.store(listed + tl.cumsum(wanted, 0) - 1, every, wanted > 0)
    tl.debug_barrier()
    inner = tl.arange(0, TILES)[:, None] * TILE + tl.arange(0, RUN)[None, :]
    count = tl.zeros((), tl.int32)
    for first in range(0, columns, TOGETHER):
        index = first + tl.arange(0, TOGETHER)
        which = tl.load(listed + index, index < columns, 0, cache_modifier=".cg")
        end = tl.minimum((which // OWN + 1) * slice_size, vocab)
        token = (which // OWN * slice_size + which % OWN * RUN)[:, None, None] + inner[None, :, :]
        inside = (token < end[:, None, None]) & (index < columns)[:, None, None]
        x = tl.reshape(tl.load(logits + token, inside, float("-inf")).to(tl.float32), (TOGETHER * TILES * RUN,))
        token = tl.reshape(token, (TOGETHER * TILES * RUN,))
        chosen = ((x >= bound) & (x > float("-inf"))).to(tl.int32)
        place = count + tl.cumsum(chosen, 0) - 1
        tl.store(candidates + place, x, (chosen > 0) & (place < FEW))
        tl.store(tokens + place, token, (chosen > 0) & (place < FEW))
        count += tl.sum(chosen, 0)
    tl.debug_barrier()
    return count


@triton.jit(do_not_specialize_on_alignment=PER_ROW)
def _pick(
    logits_ptr, temperature_ptr, top_k_ptr, top_p_ptr, min_p_ptr, seeds_ptr, sequence_ptr, positions_ptr,
    cutoffs_ptr, states_ptr, out_ptr, bounds_ptr, maxima_ptr, candidates_ptr, tokens_ptr, vocab, stride, slice_size,
    BITS: tl.constexpr, SLICES: tl.constexpr, COLUMNS: tl.constexpr, TILE: tl.constexpr, TILES: tl.constexpr, SCRATCH: tl.constexpr,
    FEW: tl.constexpr, MOST: tl.constexpr, TOGETHER: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """The bound of a row with limits; its cut-off and its token where no more than MOST columns and FEW candidates reach the bound."""
    if EARLY:
        gdc_launch_dependents()
    row = tl.program_id(0)
    temperature, top_k, top_p, min_p, in_k, in_p, bounded = _limits(temperature_ptr, top_k_ptr, top_p_ptr, min_p_ptr, row, vocab)
    if EARLY:
        gdc_wait()
    if bounded:
        every = tl.arange(0, COLUMNS)
        maxima = tl.load(maxima_ptr + row.to(tl.int64) * COLUMNS + every)
        top = tl.max(maxima, 0)
        bound = top
        cutoff = tl.full((), float("-inf"), tl.float32)
        if in_k | in_p:
            bound = kth_largest(maxima, tl.where(in_k & (top_k <= WANTED), top_k, WANTED), BITS)
        else:
            cutoff = top + temperature * tl.log(min_p)
            bound = cutoff
        tl.store(bounds_ptr + 3 * row, bound)
        tl.store(bounds_ptr + 3 * row + 1, top)
        tl.store(cutoffs_ptr + row, cutoff)
        wanted = ((maxima >= bound) & (maxima > float("-inf"))).to(tl.int32)  # of masked rows the bound may be -inf
        columns = tl.sum(wanted, 0)
        decided = tl.where(in_k, top_k <= WANTED, ~in_p)  # without the mass of the whole row
        if decided & (columns > 0) & (columns <= MOST) & (top < float("inf")):
            candidates = candidates_ptr + row.to(tl.int64) * SCRATCH
            tokens = tokens_ptr + row.to(tl.int64) * SCRATCH
            total = _gather_columns(
                logits_ptr + row.to(tl.int64) * stride, vocab, slice_size, every, wanted, columns, bound, candidates, tokens,
                COLUMNS // SLICES, TILE, TILES, FEW, TOGETHER,
            )  # fmt: skip
            if total <= FEW:
                index = tl.arange(0, FEW)
                x = tl.load(candidates + index, index < total, float("-inf"), cache_modifier=".cg")
                ids = tl.load(tokens + index, index < total, 0, cache_modifier=".cg")
                limits = (temperature, top_k, top_p, min_p, in_k, in_p)
                key = key_of(seeds_ptr, sequence_ptr, positions_ptr, row)
                outputs = (cutoffs_ptr + row, out_ptr + row, states_ptr + row, TO_DRAW)
                _finish_few(x, ids, total, bound, top, 1.0 / temperature, tl.zeros((), tl.float32), limits, key, outputs, BITS, FEW)


@triton.jit(do_not_specialize_on_alignment=PER_ROW)
def _narrow(
    logits_ptr, temperature_ptr, top_k_ptr, top_p_ptr, min_p_ptr, seeds_ptr, sequence_ptr, positions_ptr,
    counters_ptr, cutoffs_ptr, states_ptr, out_ptr, bounds_ptr, candidates_ptr, tokens_ptr, counts_ptr, masses_ptr,
    vocab, stride, slice_size,
    BITS: tl.constexpr, SLICES: tl.constexpr, SEGMENT: tl.constexpr, FEW: tl.constexpr, TILE: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    if EARLY:
        gdc_launch_dependents()
        gdc_wait()
    row, part = tl.program_id(0), tl.program_id(1)
    if tl.load(states_ptr + row) == DRAWN:
        return
    temperature, top_k, top_p, min_p, in_k, in_p, bounded = _limits(temperature_ptr, top_k_ptr, top_p_ptr, min_p_ptr, row, vocab)
    if bounded:
        logits = logits_ptr + row.to(tl.int64) * stride
        candidates = candidates_ptr + row.to(tl.int64) * (SLICES * SEGMENT)
        tokens = tokens_ptr + row.to(tl.int64) * (SLICES * SEGMENT)
        bound, top = tl.load(bounds_ptr + 3 * row), tl.load(bounds_ptr + 3 * row + 1)
        inverse = 1.0 / temperature
        start = part * slice_size
        count, mass = _gather(
            logits, start, tl.minimum(start + slice_size, vocab), bound, top, inverse, candidates + part * SEGMENT, tokens + part * SEGMENT,
            in_p & ~in_k, TILE, SEGMENT,
        )  # fmt: skip
        tl.store(counts_ptr + row * SLICES + part, count)
        tl.store(masses_ptr + row * SLICES + part, mass)
        tl.debug_barrier()
        if arrives_last(counters_ptr + row, 0, SLICES - 1):
            slices = tl.arange(0, SLICES)
            counts = tl.load(counts_ptr + row * SLICES + slices, cache_modifier=".cg")
            whole = tl.sum(tl.load(masses_ptr + row * SLICES + slices, cache_modifier=".cg"), 0)
            fits = tl.max(counts, 0) <= SEGMENT
            limits = (temperature, top_k, top_p, min_p, in_k, in_p)
            total = tl.sum(counts, 0)
            tl.store(counters_ptr + row, 0)
            tl.store(bounds_ptr + 3 * row + 2, whole)
            key = key_of(seeds_ptr, sequence_ptr, positions_ptr, row)
            proposed = in_p & ~in_k & (top_p >= LEAST_TOP_P)
            outputs = (cutoffs_ptr + row, out_ptr + row, states_ptr + row, tl.where(proposed, PROPOSED, OPEN))
            if fits & (total <= FEW):
                x, ids = _gathered(candidates, tokens, counts, total, SEGMENT, FEW)
                _finish_few(x, ids, total, bound, top, inverse, whole, limits, key, outputs, BITS, FEW)
            else:
                _finish_many(
                    candidates, tokens, counts_ptr + row * SLICES, fits, bound, top, inverse, whole, limits, key, outputs,
                    BITS, SLICES, SEGMENT,
                )  # fmt: skip


def find_cutoffs(
    logits: Tensor, temperature: Tensor, top_k: Tensor, top_p: Tensor, min_p: Tensor, seeds: Tensor, sequence: Tensor, positions: Tensor,
    out: Tensor, work: CutoffWorkspace, slices: int | None = None,
) -> None:  # fmt: skip
    """work.cutoffs: the smallest logit that each row keeps, -inf where it keeps all, NaN where it is left open. Rows of logits may be
    strided.

    Rows that keep few have their token drawn into `out` in passing; work.states says which. See reference.sample for the arguments.

    slices: programs that share a row, a power of two; as many as fill the device if not given. The mass of a row is a sum of its
    slices' sums, so a nucleus' edge may fall differently, by rounding, with another number of them.
    """
    batch, vocab = logits.shape
    slices = configs.cut_slices(batch, vocab, logits.device) if slices is None else slices
    slice_size = triton.cdiv(triton.cdiv(vocab, _LARGE_TILE), slices) * _LARGE_TILE
    limits, draws = (temperature, top_k, top_p, min_p), (seeds, sequence, positions)
    bits, stride, early = KEY_BITS[logits.dtype], logits.stride(0), configs.is_hopper(logits.device)
    _bound[(batch, slices)](
        logits, *limits, work.cutoffs, work.states, work.maxima, vocab, stride, slice_size, slices, COLUMNS, _LARGE_TILE, early,
        num_warps=4,
    )  # fmt: skip
    tiles = triton.next_power_of_2(triton.cdiv(slice_size, _LARGE_TILE))
    together = max(_TOGETHER * COLUMNS // (_LARGE_TILE * slices * tiles), 1)
    _pick[(batch,)](
        logits, *limits, *draws, work.cutoffs, work.states, out, work.bounds, work.maxima, work.candidates, work.tokens,
        vocab, stride, slice_size, bits, slices, COLUMNS, _LARGE_TILE, tiles, work.tokens.shape[1], _FEW, _MOST, together, early,
        num_warps=8, **configs.beside_the_last(early),
    )  # fmt: skip
    _narrow[(batch, slices)](
        logits, *limits, *draws, work.counters, work.cutoffs, work.states, out, work.bounds, work.candidates, work.tokens, work.counts,
        work.masses, vocab, stride, slice_size, bits, slices, _segment(slices), _FEW, _TILE, early,
        num_warps=4, maxnreg=96, **configs.beside_the_last(early),
    )  # fmt: skip
