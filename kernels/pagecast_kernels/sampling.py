"""Sampling without a sort of the vocabulary.

Two launches. `_cutoffs` finds, one program per row, the smallest logit that top-k, top-p and min-p keep; a row without such limits
costs a glance. `_choose` splits every row among programs, adds Philox noise where a row is random and a tile holds kept
tokens, and the last program of a row to arrive picks the winner.

A cut-off is exact. The first pass keeps the maxima of interleaved columns; their k-th largest bounds the row's k-th largest from
below and rather closely, so that few candidates lie above it. Among those the cut-off is built bit by bit by counting. Only
rows whose kept set is larger than the candidate buffer are searched in full, two bits of the cut-off a pass.
"""

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from pagecast_kernels import configs

_GREEDY_BELOW = tl.constexpr(1e-5)  # reference.GREEDY_BELOW
_TILE = 2048  # logits a step; the columns of the first pass
_CANDIDATES = 1024  # how many a row may have before it is searched in full
_WANTED = tl.constexpr(512)  # columns whose maxima bound the candidates where top-k does not say


@dataclass(frozen=True)
class SampleWorkspace:
    """Device memory of one `sample` at a time. counters int32[B], zero between launches; the rest is scratch."""

    counters: Tensor
    cutoffs: Tensor
    candidates: Tensor
    best: Tensor
    best_ids: Tensor


def sample_workspace(max_rows: int, device: torch.device | str) -> SampleWorkspace:
    """Workspace for at most max_rows rows; it may be made before a graph is captured and used inside it."""

    def floats(*shape: int) -> Tensor:
        return torch.empty(shape, dtype=torch.float32, device=device)

    counters, ids = (torch.zeros(n, dtype=torch.int32, device=device) for n in (max_rows, max_rows * configs.MAX_SLICES))
    return SampleWorkspace(counters, floats(max_rows), floats(max_rows, _CANDIDATES), floats(max_rows * configs.MAX_SLICES), ids)


@triton.jit
def _threshold(key):
    """The float32 at place `key` (int64, 0 to 2³² - 1) in the order of all float32; NaN outside [-inf, inf]."""
    bits = tl.where(key >= 0x80000000, key - 0x80000000, -1 - key)
    return bits.to(tl.int32).to(tl.float32, bitcast=True)


@triton.jit
def _or_all(threshold):
    """A threshold below every logit, in place of the NaN of a search that failed: rounding may put the whole mass out of reach."""
    return tl.where(threshold == threshold, threshold, float("-inf"))


@triton.jit
def _select(x, mass, min_count, min_mass):
    """The largest value at or above which x holds at least min_count values and at least min_mass of mass; -inf if there is none."""
    key = tl.zeros((), tl.int64)
    for step in range(32):
        trial = key + (tl.full((), 1, tl.int64) << (31 - step))
        above = x >= _threshold(trial)
        if (tl.sum(above.to(tl.int32), 0) >= min_count) & (tl.sum(tl.where(above, mass, 0.0), 0) >= min_mass):
            key = trial
    return _or_all(_threshold(key))


@triton.jit
def _search(logits, vocab, top, inverse, min_count, min_mass, TILE: tl.constexpr):
    """`_select` over a whole row: two bits of the key in each of 16 passes."""
    column = tl.arange(0, TILE)
    key = tl.zeros((), tl.int64)
    for step in range(16):
        unit = tl.full((), 1, tl.int64) << (30 - 2 * step)
        t1, t2, t3 = _threshold(key + unit), _threshold(key + 2 * unit), _threshold(key + 3 * unit)
        n1, n2, n3 = tl.zeros((TILE,), tl.int32), tl.zeros((TILE,), tl.int32), tl.zeros((TILE,), tl.int32)
        m1, m2, m3 = tl.zeros((TILE,), tl.float32), tl.zeros((TILE,), tl.float32), tl.zeros((TILE,), tl.float32)
        for start in range(0, vocab, TILE):
            x = tl.load(logits + start + column, start + column < vocab, float("-inf")).to(tl.float32)
            mass = tl.exp((x - top) * inverse)
            n1 += (x >= t1).to(tl.int32)
            n2 += (x >= t2).to(tl.int32)
            n3 += (x >= t3).to(tl.int32)
            m1 += tl.where(x >= t1, mass, 0.0)
            m2 += tl.where(x >= t2, mass, 0.0)
            m3 += tl.where(x >= t3, mass, 0.0)
        if (tl.sum(n3, 0) >= min_count) & (tl.sum(m3, 0) >= min_mass):
            key += 3 * unit
        elif (tl.sum(n2, 0) >= min_count) & (tl.sum(m2, 0) >= min_mass):
            key += 2 * unit
        elif (tl.sum(n1, 0) >= min_count) & (tl.sum(m1, 0) >= min_mass):
            key += unit
    return _or_all(_threshold(key))


@triton.jit
def _maxima(logits, vocab, TILE: tl.constexpr):
    """The largest logit of each of TILE interleaved columns."""
    column = tl.arange(0, TILE)
    most = tl.full((TILE,), float("-inf"), tl.float32)
    for start in range(0, vocab, TILE):
        most = tl.maximum(most, tl.load(logits + start + column, start + column < vocab, float("-inf")).to(tl.float32))
    return most


@triton.jit
def _collect(logits, vocab, at_least, top, inverse, candidates, TILE: tl.constexpr, CANDIDATES: tl.constexpr):
    """Write the logits that are at_least or more to `candidates`, while they fit. Returns how many there are, and the row's whole mass."""
    column = tl.arange(0, TILE)
    count = tl.zeros((), tl.int32)
    mass = tl.zeros((TILE,), tl.float32)
    for start in range(0, vocab, TILE):
        x = tl.load(logits + start + column, start + column < vocab, float("-inf")).to(tl.float32)
        mass += tl.exp((x - top) * inverse)
        chosen = (x >= at_least).to(tl.int32)
        found = tl.sum(chosen, 0)
        if found > 0:
            place = count + tl.cumsum(chosen, 0) - 1
            tl.store(candidates + place, x, (chosen > 0) & (place < CANDIDATES))
            count += found
    return count, tl.sum(mass, 0)


@triton.jit
def _mass_above(logits, vocab, cutoff, top, inverse, TILE: tl.constexpr):
    column = tl.arange(0, TILE)
    mass = tl.zeros((TILE,), tl.float32)
    for start in range(0, vocab, TILE):
        x = tl.load(logits + start + column, start + column < vocab, float("-inf")).to(tl.float32)
        mass += tl.where(x >= cutoff, tl.exp((x - top) * inverse), 0.0)
    return tl.sum(mass, 0)


@triton.jit
def _cutoffs(
    logits_ptr, temperature_ptr, top_k_ptr, top_p_ptr, min_p_ptr, cutoffs_ptr, candidates_ptr, vocab, stride,
    TILE: tl.constexpr, CANDIDATES: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0)
    temperature, top_k = tl.load(temperature_ptr + row), tl.load(top_k_ptr + row)
    top_p, min_p = tl.load(top_p_ptr + row), tl.load(min_p_ptr + row)
    in_k, in_p = (top_k > 0) & (top_k < vocab), top_p < 1.0
    cutoff = tl.full((), float("-inf"), tl.float32)
    if (temperature >= _GREEDY_BELOW) & (top_k != 1) & (in_k | in_p | (min_p > 0.0)):
        logits = logits_ptr + row.to(tl.int64) * stride
        candidates = candidates_ptr + row * CANDIDATES
        inverse = 1.0 / temperature
        most = _maxima(logits, vocab, TILE)
        top = tl.max(most, 0)
        if in_k | in_p:
            short = in_k & (top_k <= _WANTED)
            at_least = _select(most, most * 0.0, tl.where(short, top_k, _WANTED), 0.0)
            count, whole = _collect(logits, vocab, at_least, top, inverse, candidates, TILE, CANDIDATES)
            # Other threads' candidates are read below.
            tl.debug_barrier()
            index = tl.arange(0, CANDIDATES)
            few = count <= CANDIDATES
            x = tl.load(candidates + index, index < count, float("-inf"))
            mass = tl.exp((x - top) * inverse)
            if in_k:
                if short & few:
                    cutoff = _select(x, mass, top_k, 0.0)
                    whole = tl.sum(tl.where(x >= cutoff, mass, 0.0), 0)
                else:
                    cutoff = _search(logits, vocab, top, inverse, top_k, 0.0, TILE)
                    whole = _mass_above(logits, vocab, cutoff, top, inverse, TILE)
            if in_p:
                wanted = top_p * whole
                if few & (tl.sum(mass, 0) >= wanted):
                    nucleus = _select(x, mass, 1, wanted)
                else:
                    nucleus = _search(logits, vocab, top, inverse, 1, wanted, TILE)
                cutoff = tl.maximum(cutoff, nucleus)
        if min_p > 0.0:
            cutoff = tl.maximum(cutoff, top + temperature * tl.log(min_p))
    tl.store(cutoffs_ptr + row, cutoff)


@triton.jit
def _noise(seed, sequence, position, start, QUADS: tl.constexpr):
    """Gumbel noise of 4 · QUADS tokens from `start`, a multiple of 4: reference.gumbel_noise."""
    quad = (start // 4 + tl.arange(0, QUADS)).to(tl.uint32)
    none = quad * 0
    w0, w1, w2, w3 = tl.philox(seed, none + position.to(tl.uint32), none + sequence.to(tl.uint32), quad, none)
    words = tl.reshape(tl.join(tl.join(w0, w2), tl.join(w1, w3)), (4 * QUADS,))
    uniform = ((words >> 9).to(tl.float32) + 0.5) * 1.1920928955078125e-07
    return -tl.log(-tl.log(uniform))


@triton.jit
def _choose(
    logits_ptr, temperature_ptr, top_k_ptr, seeds_ptr, sequence_ptr, positions_ptr, cutoffs_ptr, out_ptr,
    counters_ptr, best_ptr, best_ids_ptr, vocab, stride, slice_size,
    SLICES: tl.constexpr, FILTERED: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    row, part = tl.program_id(0), tl.program_id(1)
    logits = logits_ptr + row.to(tl.int64) * stride
    temperature = tl.load(temperature_ptr + row)
    random = (temperature >= _GREEDY_BELOW) & (tl.load(top_k_ptr + row) != 1)
    cutoff = tl.full((), float("-inf"), tl.float32)
    if FILTERED:
        cutoff = tl.load(cutoffs_ptr + row)
    seed, sequence, position = tl.load(seeds_ptr + row), tl.load(sequence_ptr + row), tl.load(positions_ptr + row)
    inverse = 1.0 / tl.where(random, temperature, 1.0)
    column = tl.arange(0, TILE)
    best = tl.full((TILE,), float("-inf"), tl.float32)
    best_id = tl.zeros((TILE,), tl.int32)
    broken = tl.zeros((TILE,), tl.int32)
    for start in range(part * slice_size, tl.minimum((part + 1) * slice_size, vocab), TILE):
        x = tl.load(logits + start + column, start + column < vocab, float("-inf")).to(tl.float32)
        broken |= ((x != x) | (x == float("inf"))).to(tl.int32)
        x = tl.where(x >= cutoff, x, float("-inf"))
        if random:
            if tl.max(x, 0) > float("-inf"):
                score = x * inverse + _noise(seed, sequence, position, start, TILE // 4)
                best_id = tl.where(score > best, start + column, best_id)
                best = tl.maximum(best, score)
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
    if tl.atomic_add(counters_ptr + row, 1, sem="acq_rel") == SLICES - 1:
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
) -> Tensor:
    """See reference.sample. Rows of logits may be strided. filtered False promises that no row uses top-k, top-p or min-p.

    Sums of probabilities are float32: a token within rounding of the nucleus' edge may fall on either side of it.
    """
    batch, vocab = logits.shape
    out = torch.empty(batch, dtype=torch.int32, device=logits.device) if out is None else out
    if not batch:
        return out
    work = sample_workspace(batch, logits.device) if workspace is None else workspace
    if filtered:
        _cutoffs[(batch,)](
            logits, temperature, top_k, top_p, min_p, work.cutoffs, work.candidates, vocab, logits.stride(0),
            _TILE, _CANDIDATES, num_warps=8,
        )  # fmt: skip
    slices = configs.sample_slices(batch, vocab, logits.device)
    slice_size = triton.cdiv(triton.cdiv(vocab, _TILE), slices) * _TILE
    _choose[(batch, slices)](
        logits, temperature, top_k, seeds, sequence, positions, work.cutoffs, out, work.counters, work.best, work.best_ids,
        vocab, logits.stride(0), slice_size, slices, filtered, _TILE, num_warps=8,
    )  # fmt: skip
    return out
