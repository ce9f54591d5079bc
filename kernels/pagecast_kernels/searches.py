"""The largest value of a row that leaves enough at or above it: so many values, or so much mass. Found bit by bit, without a sort.

Over a program's own values, or over a whole row of logits, which takes a pass over it for each bit, or for each two.
"""

import triton
import triton.language as tl


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
def kth_largest(x, count, BITS: tl.constexpr):
    """The `count`-th largest of x, its key cut to BITS bits (rounded down); -inf if there is none."""
    key = tl.zeros((), tl.int64)
    for step in range(BITS):
        trial = key + (tl.full((), 1, tl.int64) << (31 - step))
        if tl.sum((x >= _threshold(trial)).to(tl.int32), 0) >= count:
            key = trial
    return _or_all(_threshold(key))


@triton.jit
def nucleus_of(x, mass, wanted, BITS: tl.constexpr):
    """The largest value, its key cut to BITS bits, at or above which x holds at least `wanted` of mass; -inf if there is none."""
    key = tl.zeros((), tl.int64)
    for step in range(BITS):
        trial = key + (tl.full((), 1, tl.int64) << (31 - step))
        if tl.sum(tl.where(x >= _threshold(trial), mass, 0.0), 0) >= wanted:
            key = trial
    return _or_all(_threshold(key))


@triton.jit
def search_row(logits, vocab, top, inverse, min_count, wanted, BITS: tl.constexpr, TILE: tl.constexpr):
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
def column_maxima(logits, vocab, COLUMNS: tl.constexpr, TILE: tl.constexpr):
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
def collect(logits, vocab, low, high, top, inverse, candidates, TILE: tl.constexpr, CANDIDATES: tl.constexpr):
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
def masses_above(logits, vocab, t1, t2, t3, top, inverse, TILE: tl.constexpr):
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
def wide_nucleus(
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
        m1, m2, m3 = masses_above(logits, vocab, t1, t2, t3, top, inverse, TILE)
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
            count, _ = collect(logits, vocab, low, high, top, inverse, candidates, TILE, CANDIDATES)
            if count <= CANDIDATES:
                index = tl.arange(0, CANDIDATES)
                x = tl.load(candidates + index, index < count, float("-inf"))
                cutoff = tl.maximum(nucleus_of(x, tl.exp((x - top) * inverse), wanted - mass_high, BITS), low)
                rounds = 99
    if rounds < 99:
        cutoff = search_row(logits, vocab, top, inverse, 1, wanted, BITS, TILE)
    return cutoff
