"""The online softmax of attention: rows of base-2 scores that come tile by tile, and results of parts that become one.

State of ROWS rows: `top`, the largest score so far; `total`, the sum of exp2(score - top); `values`, the sum of exp2(score - top) · v.
The result is values / total. (Milakov and Gimelshein, "Online normalizer calculation for softmax", 2018.)
"""

import triton
import triton.language as tl


@triton.jit
def nothing_seen(ROWS: tl.constexpr, LANES: tl.constexpr):
    """(top, total, values) before the first tile."""
    top = tl.full((ROWS,), float("-inf"), tl.float32)
    total = tl.zeros((ROWS,), tl.float32)
    values = tl.zeros((ROWS, LANES), tl.float32)
    return top, total, values


@triton.jit
def capped(scores, softcap, SOFTCAP: tl.constexpr):
    """softcap · tanh of scores that `configs.score_scale` scaled for it: 1 - 2 / (exp2(score) + 1) is the tanh."""
    if SOFTCAP:
        return softcap * (1.0 - 2.0 / (tl.exp2(scores) + 1.0))
    else:
        return scores


@triton.jit
def raise_top(top, other, EMPTY: tl.constexpr):
    """(new maxima, what to subtract from scores). EMPTY: a row may have seen nothing yet, and -inf - -inf must not become NaN."""
    new_top = tl.maximum(top, other)
    if EMPTY:
        return new_top, tl.where(new_top == float("-inf"), 0.0, new_top)
    else:
        return new_top, new_top


@triton.jit
def weigh(scores, top, total, EMPTY: tl.constexpr):
    """Add a tile of scores [ROWS, tokens]: (weights of its tokens, the factor for values so far, top, total)."""
    new_top, base = raise_top(top, tl.max(scores, 1), EMPTY)
    weights = tl.exp2(scores - base[:, None])
    decay = tl.exp2(top - base)
    return weights, decay, new_top, total * decay + tl.sum(weights, 1)


@triton.jit
def add_tile(scores, v, top, total, values, EMPTY: tl.constexpr):
    """Add a tile of scores [ROWS, tokens] and its v [tokens, LANES]: (top, total, values)."""
    weights, decay, top, total = weigh(scores, top, total, EMPTY)
    return top, total, tl.dot(weights.to(v.dtype), v, values * decay[:, None], input_precision="ieee")


@triton.jit
def add_parts(part_top, part_total, part_values, top, total, values):
    """Add the states of parts, [parts, ROWS] and [parts, ROWS, LANES], to a state. Rows that nobody holds have no maximum."""
    new_top, base = raise_top(top, tl.max(part_top, 0), True)
    weight = tl.exp2(part_top - base[None, :])
    decay = tl.exp2(top - base)
    total = total * decay + tl.sum(part_total * weight, 0)
    return new_top, total, values * decay[:, None] + tl.sum(part_values * weight[:, :, None], 0)
