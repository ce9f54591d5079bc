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
    """The four Philox words of tokens 4 · quad to 4 · quad + 3: reference.gumbel_noise."""
    none = quad * 0
    return tl.philox(seed, none + position.to(tl.uint32), none + sequence.to(tl.uint32), quad, none)


@triton.jit
def bits_from(seed, sequence, position, start, QUADS: tl.constexpr):
    """The 23 random bits of 4 · QUADS tokens from `start`, a multiple of 4."""
    w0, w1, w2, w3 = _words(seed, sequence, position, (start // 4 + tl.arange(0, QUADS)).to(tl.uint32))
    words = tl.reshape(tl.join(tl.join(w0, w2), tl.join(w1, w3)), (4 * QUADS,))
    return (words >> 9).to(tl.int32)


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
def best_of(logits, begin, end, cutoff, random, inverse, key, ABOVE: tl.constexpr, TILE: tl.constexpr):
    """Of the tokens [begin, end) of a row whose logits are at least `cutoff`, or more than that if ABOVE: (the best score, infinite
    where a logit is NaN or infinite; its token, the lowest of equals). A score is a logit, with noise if random; key: see key_of."""
    seed, sequence, position = key
    column = tl.arange(0, TILE)
    best = tl.full((TILE,), float("-inf"), tl.float32)
    best_id = tl.zeros((TILE,), tl.int32)
    broken = tl.zeros((TILE,), tl.int32)
    leader = tl.full((), float("-inf"), tl.float32)
    following = tl.load(logits + begin + column, begin + column < end, float("-inf"))
    for start in range(begin, end, TILE):
        x = following.to(tl.float32)
        following = tl.load(logits + start + TILE + column, start + TILE + column < end, float("-inf"))
        broken |= ((x != x) | (x == float("inf"))).to(tl.int32)
        x = tl.where(x > cutoff if ABOVE else x >= cutoff, x, float("-inf"))
        if random:
            x = x * inverse
            if tl.max(x, 0) + _MOST_NOISE > leader:
                bits = bits_from(seed, sequence, position, start, TILE // 4)
                # -log u >= 1 - u, so -log(1 - u) bounds the noise from above, and what may lead has 1 - u < e^(x - leader), with
                # something to spare for rounding: few tiles need the exact noise.
                rest = (8388607 - bits).to(tl.float32) + 0.5
                may_lead = rest < tl.exp2((x - leader) * 1.4426950408889634 + (23.0 + 2e-3))
                if tl.max(may_lead.to(tl.int32), 0) > 0:
                    score = noisy(x, bits)
                    best_id = tl.where(score > best, start + column, best_id)
                    best = tl.maximum(best, score)
                    leader = tl.maximum(leader, tl.max(score, 0))
        else:
            best_id = tl.where(x > best, start + column, best_id)
            best = tl.maximum(best, x)
    top = tl.max(best, 0)
    token = tl.min(tl.where(best == top, best_id, 0x7FFFFFFF), 0)
    return tl.where(tl.max(broken, 0) > 0, float("inf"), top), token
