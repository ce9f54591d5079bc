"""Sampling without a sort of the vocabulary.

Two launches. `_cutoffs` finds, one program per row, the smallest logit that top-k, top-p and min-p keep; a row without such limits
costs a glance. `_choose` splits every row among programs, adds Philox noise where a row is random and a tile holds kept
tokens, and the last program of a row to arrive picks the winner.

A cut-off is exact. The first pass keeps the maxima of interleaved columns; their k-th largest bounds the row's k-th largest from
below and rather closely, so that few candidates lie above it. Among those the cut-off is built bit by bit by counting. A
nucleus too wide for the candidate buffer is bracketed by passes over the row first.
"""

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from pagecast_kernels import configs

_GREEDY_BELOW = tl.constexpr(1e-5)  # reference.GREEDY_BELOW
_MOST_NOISE = tl.constexpr(16.7)  # more than -log(-log u) of the largest u, 1 - 2⁻²⁴
_CUT_TILE_BYTES = 16384  # of logits a step of `_cutoffs`, which has a whole row before it
_COLUMNS = 2048  # interleaved columns of its first pass
_TILE = 2048  # logits a step of `_choose`
_CANDIDATES = 1024  # how many a row may have before it is searched in full
_WANTED = tl.constexpr(512)  # columns whose maxima bound the candidates where top-k does not say


# The bits of a float32 that can differ between values of a type: sign, exponent, and as much of the fraction as it has.
_KEY_BITS = {torch.bfloat16: 16, torch.float16: 19, torch.float32: 32}


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
def _kth(x, count, BITS: tl.constexpr):
    """The `count`-th largest of x, its key cut to BITS bits (rounded down); -inf if there is none."""
    key = tl.zeros((), tl.int64)
    for step in range(BITS):
        trial = key + (tl.full((), 1, tl.int64) << (31 - step))
        if tl.sum((x >= _threshold(trial)).to(tl.int32), 0) >= count:
            key = trial
    return _or_all(_threshold(key))


@triton.jit
def _nucleus(x, mass, wanted, BITS: tl.constexpr):
    """The largest value, its key cut to BITS bits, at or above which x holds at least `wanted` of mass; -inf if there is none."""
    key = tl.zeros((), tl.int64)
    for step in range(BITS):
        trial = key + (tl.full((), 1, tl.int64) << (31 - step))
        if tl.sum(tl.where(x >= _threshold(trial), mass, 0.0), 0) >= wanted:
            key = trial
    return _or_all(_threshold(key))


@triton.jit
def _search(logits, vocab, top, inverse, min_count, wanted, BITS: tl.constexpr, TILE: tl.constexpr):
    """The largest threshold at or above which lie min_count logits and `wanted` of mass: one bit of its key a pass over the row.

    Right for any row; only rows with thousands of equal logits, or top_k in the thousands, come here.
    """
    column = tl.arange(0, TILE)
    key = tl.zeros((), tl.int64)
    for step in range(BITS):
        trial = key + (tl.full((), 1, tl.int64) << (31 - step))
        least = _threshold(trial)
        count, mass = tl.zeros((TILE,), tl.int32), tl.zeros((TILE,), tl.float32)
        for start in range(0, vocab, TILE):
            x = tl.load(logits + start + column, start + column < vocab, float("-inf")).to(tl.float32)
            count += (x >= least).to(tl.int32)
            mass += tl.where(x >= least, tl.exp((x - top) * inverse), 0.0)
        if (tl.sum(count, 0) >= min_count) & (tl.sum(mass, 0) >= wanted):
            key = trial
    return _or_all(_threshold(key))


@triton.jit
def _maxima(logits, vocab, COLUMNS: tl.constexpr, TILE: tl.constexpr):
    """The largest logit of each of COLUMNS interleaved columns."""
    column = tl.arange(0, TILE)
    most = tl.full((TILE,), float("-inf"), tl.float32)
    following = tl.load(logits + column, column < vocab, float("-inf"))
    for start in range(0, vocab, TILE):
        x = following.to(tl.float32)
        following = tl.load(logits + start + TILE + column, start + TILE + column < vocab, float("-inf"))
        most = tl.maximum(most, x)
    return tl.max(tl.reshape(most, (TILE // COLUMNS, COLUMNS)), 0)


@triton.jit
def _collect(logits, vocab, low, high, top, inverse, candidates, TILE: tl.constexpr, CANDIDATES: tl.constexpr):
    """Write the logits in [low, high) to `candidates`, while they fit. Returns how many there are, and the mass of the whole row."""
    column = tl.arange(0, TILE)
    count = tl.zeros((), tl.int32)
    mass = tl.zeros((TILE,), tl.float32)
    following = tl.load(logits + column, column < vocab, float("-inf"))
    for start in range(0, vocab, TILE):
        x = following.to(tl.float32)
        following = tl.load(logits + start + TILE + column, start + TILE + column < vocab, float("-inf"))
        mass += tl.exp((x - top) * inverse)
        chosen = ((x >= low) & (x < high)).to(tl.int32)
        found = tl.sum(chosen, 0)
        if found > 0:
            if count < CANDIDATES:
                place = count + tl.cumsum(chosen, 0) - 1
                tl.store(candidates + place, x, (chosen > 0) & (place < CANDIDATES))
            count += found
    # Other threads read the candidates next.
    tl.debug_barrier()
    return count, tl.sum(mass, 0)


@triton.jit
def _masses(logits, vocab, t1, t2, t3, top, inverse, TILE: tl.constexpr):
    """The masses at or above three thresholds."""
    column = tl.arange(0, TILE)
    m1, m2, m3 = tl.zeros((TILE,), tl.float32), tl.zeros((TILE,), tl.float32), tl.zeros((TILE,), tl.float32)
    following = tl.load(logits + column, column < vocab, float("-inf"))
    for start in range(0, vocab, TILE):
        x = following.to(tl.float32)
        following = tl.load(logits + start + TILE + column, start + TILE + column < vocab, float("-inf"))
        mass = tl.exp((x - top) * inverse)
        m1 += tl.where(x >= t1, mass, 0.0)
        m2 += tl.where(x >= t2, mass, 0.0)
        m3 += tl.where(x >= t3, mass, 0.0)
    return tl.sum(m1, 0), tl.sum(m2, 0), tl.sum(m3, 0)


@triton.jit
def _wide_nucleus(
    logits, vocab, high, mass_high, wanted, top, inverse, candidates, BITS: tl.constexpr, TILE: tl.constexpr, CANDIDATES: tl.constexpr,
):  # fmt: skip
    """The nucleus of a row that is too flat for the candidates above `high`, at or above which lies mass_high < wanted.

    Quarters a bracket of values by passes over the row until its logits fit the candidate buffer, and finishes there.
    """
    low = top - 30.0 / inverse  # what lies below has no mass that float32 sums could show
    rounds = 0
    cutoff = low
    while rounds < 9:
        quarter = (high - low) * 0.25
        t1, t2, t3 = low + quarter, low + 2 * quarter, low + 3 * quarter
        m1, m2, m3 = _masses(logits, vocab, t1, t2, t3, top, inverse, TILE)
        if m3 >= wanted:
            low = t3
        elif m2 >= wanted:
            low, high, mass_high = t2, t3, m3
        elif m1 >= wanted:
            low, high, mass_high = t1, t2, m2
        else:
            high, mass_high = t1, m1
        rounds += 1
        # From the fourth round on a smooth row's bracket may be narrow enough.
        if rounds >= 4:
            count, _ = _collect(logits, vocab, low, high, top, inverse, candidates, TILE, CANDIDATES)
            if count <= CANDIDATES:
                index = tl.arange(0, CANDIDATES)
                x = tl.load(candidates + index, index < count, float("-inf"))
                cutoff = tl.maximum(_nucleus(x, tl.exp((x - top) * inverse), wanted - mass_high, BITS), low)
                rounds = 99
    if rounds < 99:
        cutoff = _search(logits, vocab, top, inverse, 1, wanted, BITS, TILE)
    return cutoff


@triton.jit
def _cutoffs(
    logits_ptr, temperature_ptr, top_k_ptr, top_p_ptr, min_p_ptr, cutoffs_ptr, candidates_ptr, vocab, stride,
    BITS: tl.constexpr, COLUMNS: tl.constexpr, TILE: tl.constexpr, CANDIDATES: tl.constexpr,
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
        most = _maxima(logits, vocab, COLUMNS, TILE)
        top = tl.max(most, 0)
        if in_k | in_p:
            short = in_k & (top_k <= _WANTED)
            high = _kth(most, tl.where(short, top_k, _WANTED), BITS)
            count, whole = _collect(logits, vocab, high, float("inf"), top, inverse, candidates, TILE, CANDIDATES)
            index = tl.arange(0, CANDIDATES)
            few = count <= CANDIDATES
            x = tl.load(candidates + index, index < count, float("-inf"))
            mass = tl.exp((x - top) * inverse)
            if in_k:
                if short & few:
                    cutoff = _kth(x, top_k, BITS)
                    whole = tl.sum(tl.where(x >= cutoff, mass, 0.0), 0)
                else:
                    cutoff = _search(logits, vocab, top, inverse, top_k, 0.0, BITS, TILE)
                    whole, _, _ = _masses(logits, vocab, cutoff, cutoff, cutoff, top, inverse, TILE)
            if in_p:
                held = tl.sum(mass, 0)
                wanted = tl.maximum(top_p * whole, 1e-30)  # top_p 0 keeps the largest
                if few & (held >= wanted):
                    nucleus = _nucleus(x, mass, wanted, BITS)
                elif few:
                    nucleus = _wide_nucleus(logits, vocab, high, held, wanted, top, inverse, candidates, BITS, TILE, CANDIDATES)
                else:
                    nucleus = _search(logits, vocab, top, inverse, 1, wanted, BITS, TILE)
                cutoff = tl.maximum(cutoff, nucleus)
        if min_p > 0.0:
            cutoff = tl.maximum(cutoff, top + temperature * tl.log(min_p))
    tl.store(cutoffs_ptr + row, cutoff)


@triton.jit
def _bits(seed, sequence, position, start, QUADS: tl.constexpr):
    """The 23 random bits of 4 · QUADS tokens from `start`, a multiple of 4: reference.gumbel_noise."""
    quad = (start // 4 + tl.arange(0, QUADS)).to(tl.uint32)
    none = quad * 0
    w0, w1, w2, w3 = tl.philox(seed, none + position.to(tl.uint32), none + sequence.to(tl.uint32), quad, none)
    words = tl.reshape(tl.join(tl.join(w0, w2), tl.join(w1, w3)), (4 * QUADS,))
    return (words >> 9).to(tl.int32)


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
                bits = _bits(seed, sequence, position, start, TILE // 4)
                # -log u >= 1 - u, so -log(1 - u) bounds the noise from above: few tiles need the exact one.
                bound = x - tl.log2((8388607 - bits).to(tl.float32) + 0.5) * 0.6931471805599453 + (15.942385152878742 + 1e-3)
                if tl.max(bound, 0) > leader:
                    score = x - tl.log(-tl.log((bits.to(tl.float32) + 0.5) * 1.1920928955078125e-07))
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
            _KEY_BITS[logits.dtype], _COLUMNS, _CUT_TILE_BYTES // logits.element_size(), _CANDIDATES, num_warps=16,
        )  # fmt: skip
    slices = configs.sample_slices(batch, vocab, logits.device)
    slice_size = triton.cdiv(triton.cdiv(vocab, _TILE), slices) * _TILE
    _choose[(batch, slices)](
        logits, temperature, top_k, seeds, sequence, positions, work.cutoffs, out, work.counters, work.best, work.best_ids,
        vocab, logits.stride(0), slice_size, slices, filtered, _TILE, num_warps=8,
    )  # fmt: skip
    return out
