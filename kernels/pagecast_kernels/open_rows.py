"""The last of sampling: rows whose candidates did not decide what they keep.

A wide nucleus needs no cut-off. Noise belongs to the token, so the winner of a set that holds the nucleus, if it lies in the nucleus,
is the nucleus' winner. It lies there when less than the wanted mass lies strictly above its logit. `sampling` has drawn from the whole
row; here programs that share the row add up the mass above what was drawn, and the last of them draws again, where it must, from the
tokens above it, or above the highest of three further values that leave the wanted mass. 1 - top_p of the rows come to that.

Other rows are few: top_k in the hundreds, thousands of equal logits, a flat row with a small top_p. One program searches such a row
for its cut-off, as often as it takes, and draws from what it keeps.
"""

import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_wait

from pagecast_kernels import configs
from pagecast_kernels.cutoffs import COLUMNS, KEY_BITS, PROPOSED, WANTED, CutoffWorkspace
from pagecast_kernels.noise import PER_ROW, best_of, key_of
from pagecast_kernels.searches import collect, column_maxima, kth_largest, masses_above, nucleus_of, search_row, wide_nucleus
from pagecast_kernels.shares import arrives_last

_ROW_TILE_BYTES = 8192  # of logits a step where a program has a whole row before it
_TILE = 2048  # logits a step where masses are added and tokens drawn
_CANDIDATES = 1024  # how many a row may have before it is searched in full


@triton.jit
def _whole_row(
    logits, temperature, top_k, top_p, min_p, candidates, vocab,
    BITS: tl.constexpr, WIDE: tl.constexpr, TILE: tl.constexpr, CANDIDATES: tl.constexpr,
):  # fmt: skip
    """The cut-off of any row, by one program."""
    in_k, in_p = (top_k > 0) & (top_k < vocab), top_p < 1.0
    cutoff = tl.full((), float("-inf"), tl.float32)
    inverse = 1.0 / temperature
    most = column_maxima(logits, vocab, WIDE, TILE)
    top = tl.max(most, 0)
    if in_k | in_p:
        short = in_k & (top_k <= WANTED)
        high = kth_largest(most, tl.where(short, top_k, WANTED), BITS)
        count, whole = collect(logits, vocab, high, float("inf"), top, inverse, candidates, TILE, CANDIDATES)
        index = tl.arange(0, CANDIDATES)
        few = count <= CANDIDATES
        x = tl.load(candidates + index, index < count, float("-inf"))
        mass = tl.exp((x - top) * inverse)
        if in_k:
            if short & few:
                cutoff = kth_largest(x, top_k, BITS)
                whole = tl.sum(tl.where(x >= cutoff, mass, 0.0), 0)
            else:
                cutoff = search_row(logits, vocab, top, inverse, top_k, 0.0, BITS, TILE)
                whole, _, _ = masses_above(logits, vocab, cutoff, cutoff, cutoff, top, inverse, TILE)
        if in_p:
            held = tl.sum(mass, 0)
            wanted = tl.maximum(top_p * whole, 1e-30)  # top_p 0 keeps the largest
            if few & (held >= wanted):
                nucleus = nucleus_of(x, mass, wanted, BITS)
            elif few:
                nucleus = wide_nucleus(logits, vocab, high, held, wanted, top, inverse, candidates, BITS, TILE, CANDIDATES)
            else:
                nucleus = search_row(logits, vocab, top, inverse, 1, wanted, BITS, TILE)
            cutoff = tl.maximum(cutoff, nucleus)
    if min_p > 0.0:
        cutoff = tl.maximum(cutoff, top + temperature * tl.log(min_p))
    return cutoff


@triton.jit
def _masses_over(logits, begin, end, drawn, top, inverse, TILE: tl.constexpr):
    """The masses strictly above `drawn` and above three values between it and `top`, of the logits [begin, end)."""
    column, step = tl.arange(0, TILE), (top - drawn) * 0.25
    m0, m1, m2, m3 = (tl.zeros((TILE,), tl.float32),) * 4
    for start in tl.range(begin, end, TILE, num_stages=4):
        x = tl.load(logits + start + column, start + column < end, float("-inf")).to(tl.float32)
        mass = tl.exp((x - top) * inverse)
        m0 += tl.where(x > drawn, mass, 0.0)
        m1 += tl.where(x > drawn + step, mass, 0.0)
        m2 += tl.where(x > drawn + 2 * step, mass, 0.0)
        m3 += tl.where(x > drawn + 3 * step, mass, 0.0)
    return tl.sum(m0, 0), tl.sum(m1, 0), tl.sum(m2, 0), tl.sum(m3, 0)


@triton.jit
def _raised(drawn, top, wanted, m1, m2, m3):
    """The highest of `drawn` and the three values above it that leaves the wanted mass above it."""
    step = (top - drawn) * 0.25
    return tl.where(m3 >= wanted, drawn + 3 * step, tl.where(m2 >= wanted, drawn + 2 * step, tl.where(m1 >= wanted, drawn + step, drawn)))


@triton.jit
def _is_kept(drawn, top, mass, wanted, temperature, min_p):
    """Whether a token of logit `drawn` is in the nucleus, with `mass` strictly above it, and as likely as min-p asks. The likeliest
    always is, whatever rounding made of the masses."""
    least = tl.where(min_p > 0.0, top + temperature * tl.log(tl.where(min_p > 0.0, min_p, 1.0)), float("-inf"))
    return ((mass < wanted) & (drawn >= least)) | (drawn >= top)


@triton.jit
def _draw_again(logits, vocab, above, top, wanted, temperature, min_p, inverse, key, TILE: tl.constexpr):
    """The token that wins in the nucleus, which lies above the logit `above`."""
    refused = tl.full((), 1, tl.int32)
    token = tl.zeros((), tl.int32)
    while refused > 0:
        _best, token = best_of(logits, 0, vocab, 0, above, True, inverse, key, logits, True, False, TILE)
        drawn = tl.load(logits + token).to(tl.float32)
        m0, m1, m2, m3 = _masses_over(logits, 0, vocab, drawn, top, inverse, TILE)
        if _is_kept(drawn, top, m0, wanted, temperature, min_p):
            refused = tl.zeros((), tl.int32)
        else:
            above = _raised(drawn, top, wanted, m1, m2, m3)
    return token


@triton.jit(do_not_specialize_on_alignment=PER_ROW)
def _finish_open_rows(
    logits_ptr, temperature_ptr, top_k_ptr, top_p_ptr, min_p_ptr, seeds_ptr, sequence_ptr, positions_ptr,
    states_ptr, out_ptr, bounds_ptr, counters_ptr, scratch_ptr, vocab, stride, slice_size,
    BITS: tl.constexpr, SLICES: tl.constexpr, WIDE: tl.constexpr, ROW_TILE: tl.constexpr, CANDIDATES: tl.constexpr, TILE: tl.constexpr,
    EARLY: tl.constexpr,
):  # fmt: skip
    if EARLY:
        gdc_wait()
    row, part = tl.program_id(0), tl.program_id(1)
    state = tl.load(states_ptr + row)
    if state >= PROPOSED:
        logits = logits_ptr + row.to(tl.int64) * stride
        scratch = scratch_ptr + row.to(tl.int64) * CANDIDATES
        temperature, top_p, min_p = tl.load(temperature_ptr + row), tl.load(top_p_ptr + row), tl.load(min_p_ptr + row)
        inverse = 1.0 / temperature
        key = key_of(seeds_ptr, sequence_ptr, positions_ptr, row)
        if state == PROPOSED:
            token = tl.load(out_ptr + row)
            if token >= 0:  # else the row has no sound logits
                drawn = tl.load(logits + token).to(tl.float32)
                top, wanted = tl.load(bounds_ptr + 3 * row + 1), top_p * tl.load(bounds_ptr + 3 * row + 2)
                begin = part * slice_size
                m0, m1, m2, m3 = _masses_over(logits, begin, tl.minimum(begin + slice_size, vocab), drawn, top, inverse, TILE)
                own = scratch + 4 * part
                tl.store(own, m0)
                tl.store(own + 1, m1)
                tl.store(own + 2, m2)
                tl.store(own + 3, m3)
                tl.debug_barrier()
                if arrives_last(counters_ptr + row, 0, SLICES - 1):
                    tl.store(counters_ptr + row, 0)
                    every = scratch + 4 * tl.arange(0, SLICES)
                    m0 = tl.sum(tl.load(every, cache_modifier=".cg"), 0)
                    m1 = tl.sum(tl.load(every + 1, cache_modifier=".cg"), 0)
                    m2 = tl.sum(tl.load(every + 2, cache_modifier=".cg"), 0)
                    m3 = tl.sum(tl.load(every + 3, cache_modifier=".cg"), 0)
                    if not _is_kept(drawn, top, m0, wanted, temperature, min_p):
                        above = _raised(drawn, top, wanted, m1, m2, m3)
                        tl.store(out_ptr + row, _draw_again(logits, vocab, above, top, wanted, temperature, min_p, inverse, key, TILE))
        elif part == 0:
            cutoff = _whole_row(
                logits, temperature, tl.load(top_k_ptr + row), top_p, min_p, scratch, vocab, BITS, WIDE, ROW_TILE, CANDIDATES
            )  # fmt: skip
            best, token = best_of(logits, 0, vocab, 0, cutoff, True, inverse, key, logits, False, False, TILE)
            tl.store(out_ptr + row, tl.where((best == float("inf")) | (best == float("-inf")), -1, token))


def finish_open_rows(
    logits: Tensor, temperature: Tensor, top_k: Tensor, top_p: Tensor, min_p: Tensor, seeds: Tensor, sequence: Tensor, positions: Tensor,
    out: Tensor, work: CutoffWorkspace, slices: int | None = None,
) -> None:  # fmt: skip
    """Into `out` the tokens of the rows that `find_cutoffs` left open, where those that are PROPOSED in work.states have one drawn from
    all their tokens. See find_cutoffs for the arguments."""
    batch, vocab = logits.shape
    slices = configs.judge_slices(batch, vocab, logits.device) if slices is None else slices
    slice_size = triton.cdiv(triton.cdiv(vocab, _TILE), slices) * _TILE
    early = configs.is_hopper(logits.device)
    _finish_open_rows[(batch, slices)](
        logits, temperature, top_k, top_p, min_p, seeds, sequence, positions, work.states, out, work.bounds, work.counters, work.candidates,
        vocab, logits.stride(0), slice_size,
        KEY_BITS[logits.dtype], slices, COLUMNS, _ROW_TILE_BYTES // logits.element_size(), _CANDIDATES, _TILE, early,
        num_warps=16, maxnreg=128, **configs.beside_the_last(early),
    )  # fmt: skip
