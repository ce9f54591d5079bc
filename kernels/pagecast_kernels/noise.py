"""The random part of sampling, of a row of logits: what decides a draw, Philox bits for each token, and Gumbel noise from them."""

import triton
import triton.language as tl

PER_ROW = (
    "temperature_ptr", "top_k_ptr", "top_p_ptr", "min_p_ptr", "seeds_ptr", "sequence_ptr", "positions_ptr", "out_ptr",
    "counters_ptr",
)  # fmt: skip
"""Arguments of kernels of which a row has one value: rows of a packed table, begun wherever a batch's size puts them, which is nothing
to compile a kernel anew for."""
GREEDY_BELOW = tl.constexpr(1e-5)  # reference.GREEDY_BELOW
_MOST_NOISE = tl.constexpr(16.7)  # more than -log(-log u) of the largest u, 1 - 2⁻²⁴
_ROUNDING = tl.constexpr(2.4e-7)  # of a score, more than what its product and its sum may be rounded by
NO_LEADER = tl.constexpr(-2139095041)  # ordered(-inf)


@triton.jit
def scale_of(temperature_ptr, top_k_ptr, row):
    """(whether a row is drawn at random, what its logits are multiplied by)."""
    temperature = tl.load(temperature_ptr + row)
    random = (temperature >= GREEDY_BELOW) & (tl.load(top_k_ptr + row) != 1)
    return random, 1.0 / tl.where(random, temperature, 1.0)


@triton.jit
def key_of(seeds_ptr, sequence_ptr, positions_ptr, row):
    """(seed, sequence, position): what a row's random bits are a function of, beside the token."""
    return tl.load(seeds_ptr + row), tl.load(sequence_ptr + row), tl.load(positions_ptr + row)


@triton.jit
def _words(seed, sequence, position, quad):
    """The four Philox words of tokens 4 · quad to 4 · quad + 3: reference.gumbel_noise. Products of twice the width give both halves."""
    none = quad * 0
    c0, c1, c2, c3 = none + position.to(tl.uint32), none + sequence.to(tl.uint32), quad, none
    k0, k1 = (seed & 0xFFFFFFFF).to(tl.uint32), ((seed >> 32) & 0xFFFFFFFF).to(tl.uint32)
    for _ in tl.static_range(10):
        a, b = c0.to(tl.uint64) * 0xD2511F53, c2.to(tl.uint64) * 0xCD9E8D57
        c0, c2 = (b >> 32).to(tl.uint32) ^ c1 ^ k0, (a >> 32).to(tl.uint32) ^ c3 ^ k1
        c1, c3 = b.to(tl.uint32), a.to(tl.uint32)
        k0, k1 = k0 + 0x9E3779B9, k1 + 0xBB67AE85
    return c0, c1, c2, c3


@triton.jit
def bits_of(seed, sequence, position, ids):
    """The 23 random bits of each of some tokens, wherever they are."""
    w0, w1, w2, w3 = _words(seed, sequence, position, (ids // 4).to(tl.uint32))
    word = tl.where(ids % 4 == 0, w0, tl.where(ids % 4 == 1, w1, tl.where(ids % 4 == 2, w2, w3)))
    return (word >> 9).to(tl.int32)


@triton.jit
def noisy(x, bits):
    """x with Gumbel noise: -log(-log u) of u = (bits + 0.5) · 2⁻²³."""
    return x - tl.log(-tl.log((bits.to(tl.float32) + 0.5) * 1.1920928955078125e-07))


@triton.jit
def _larger(a, b):
    """The larger of each pair; NaN where one is."""
    return tl.maximum(a, b, propagate_nan=tl.PropagateNan.ALL)


@triton.jit
def _largest_of_four(x, WIDE: tl.constexpr):
    """The largest of every four neighbours among x; NaN where one is."""
    even, odd = tl.split(tl.reshape(x, (WIDE // 2, 2)))
    left, right = tl.split(tl.reshape(_larger(even, odd), (WIDE // 4, 2)))
    return _larger(left, right)


@triton.jit
def ordered(score):
    """A float32 as an int32 of the same order."""
    bits = score.to(tl.int32, bitcast=True)
    return bits ^ (bits >> 31 & 0x7FFFFFFF)


@triton.jit
def _score_of(key):
    """The float32 that `ordered` made of this."""
    return (key ^ (key >> 31 & 0x7FFFFFFF)).to(tl.float32, bitcast=True)


@triton.jit
def best_of(
    logits, begin, end, first, cutoff, random, inverse, key, leader_ptr, ABOVE: tl.constexpr, SHARED: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """Of the logits [begin, end) of a row, whose tokens are `first` (a multiple of 4) and those that follow: (the best score, infinite
    where a logit is NaN or infinite; its token, the lowest of equals). A score is a logit; if random, scaled by `inverse` and with noise,
    of logits of at least `cutoff` alone, or more than that if ABOVE. key: see key_of.

    SHARED: leader_ptr holds the `ordered` best score of all programs that share a random row, or NO_LEADER, and is kept up. Else it is
    not looked at."""
    FOURS: tl.constexpr = TILE // 4
    seed, sequence, position = key
    column = tl.arange(0, TILE)
    best = tl.full((), float("-inf"), tl.float32)
    best_at = tl.zeros((), tl.int32)
    broken = tl.zeros((FOURS,), tl.int32)
    leader = best
    known = tl.full((), NO_LEADER, tl.int32)
    following = tl.load(logits + begin + column, begin + column < end, float("-inf"))
    for start in range(begin, end, TILE):
        x = following.to(tl.float32)
        following = tl.load(logits + start + TILE + column, start + TILE + column < end, float("-inf"))
        most = _largest_of_four(x, TILE)
        broken |= (~(most < float("inf"))).to(tl.int32)
        top = tl.max(most, 0)
        if random:
            if SHARED:
                leader = tl.maximum(leader, _score_of(known))
                known = tl.load(leader_ptr, cache_modifier=".cg")
            least = leader - tl.abs(leader) * _ROUNDING  # an equal score of a lower token wins, whoever was first to tell of his
            if (top * inverse + _MOST_NOISE > least) & (top > cutoff if ABOVE else top >= cutoff):
                # Broken rows have no winner, whatever their words; `most` is asked so that words lie where the logits do.
                quad = tl.where(most < float("inf"), (first + start) // 4 + tl.arange(0, FOURS), 0)
                w0, w1, w2, w3 = _words(seed, sequence, position, quad.to(tl.uint32))
                words = tl.reshape(tl.join(tl.join(w0, w2), tl.join(w1, w3)), (TILE,))
                # -log u >= 1 - u, so -log(1 - u) bounds the noise from above, and what may lead has 1 - u < e^(x - leader). Four tokens
                # are judged by their largest logit and their largest u, with something to spare for rounding: few tiles need the noise.
                one_and_u = ((_largest_of_four(words, TILE) >> 9) | 0x3F800000).to(tl.float32, bitcast=True)
                may_lead = one_and_u > (2.0 - 1.3e-7) - tl.exp2((most * inverse - least) * 1.4426950408889634 + 2e-3)
                if tl.max(may_lead.to(tl.int32), 0) > 0:
                    score = noisy(x * inverse, (words >> 9).to(tl.int32))
                    score = tl.where(x > cutoff if ABOVE else x >= cutoff, score, float("-inf"))
                    found = tl.max(score, 0)
                    if found > best:
                        best = found
                        best_at = start + tl.min(tl.where(score == found, column, 0x7FFFFFFF), 0)
                        if SHARED and found > leader:
                            tl.atomic_max(leader_ptr, ordered(found), sem="relaxed")
                        leader = tl.maximum(leader, found)
        elif top > best:
            best = top
            best_at = start + tl.min(tl.where(x == top, column, 0x7FFFFFFF), 0)
    return tl.where(tl.max(broken, 0) > 0, float("inf"), best), first + best_at
