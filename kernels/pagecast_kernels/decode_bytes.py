"""Attention of decode over tiles of a cache of e4m3, read as 16-bit words of two neighbouring lanes.

Tensor cores take operands of 16 bits from shared memory in one instruction for eight rows, but bytes one by one. So words are what
travels, and each register of two words becomes two of float16, one of even lanes and one of odd lanes; both halves of a head have
products of their own. float16 and not bfloat16, because one instruction converts two values to it, and e4m3 fits into it exactly.
"""

import triton
import triton.language as tl

from pagecast_kernels.online_softmax import capped, nothing_seen, weigh
from pagecast_kernels.paging import blocks_of, load_tile, runs_of

INTERPRETED = triton.knobs.runtime.interpret
SPLIT = tl.constexpr("""{
.reg .b32 t;
.reg .b16 l, h;
prmt.b32 t, $2, $2, 0x3120;
mov.b32 {l, h}, t;
cvt.rn.f16x2.e4m3x2 $0, l;
cvt.rn.f16x2.e4m3x2 $1, h;
}""")
"""Of a register of two words: their even lanes, and their odd ones."""


@triton.jit
def _lanes(words, ASM: tl.constexpr):
    """The even and the odd lanes, float16, of int16 words."""
    if ASM:
        return tl.inline_asm_elementwise(SPLIT, "=r,=r,r", [words], (tl.float16, tl.float16), is_pure=True, pack=2)
    else:
        even, odd = (words & 255).to(tl.uint8), (words >> 8 & 255).to(tl.uint8)
        return even.to(tl.float8e4nv, bitcast=True).to(tl.float16), odd.to(tl.float8e4nv, bitcast=True).to(tl.float16)


@triton.jit
def attend_bytes(
    q, k_ptr, v_ptr, table, kv_head, length, first, count, scale, softcap,
    ROWS: tl.constexpr, NUM_KV_HEADS: tl.constexpr, BLOCK_SIZE: tl.constexpr, DIM: tl.constexpr, LANES: tl.constexpr,
    WINDOW: tl.constexpr, SOFTCAP: tl.constexpr, TILE: tl.constexpr, STAGES: tl.constexpr, ASM: tl.constexpr,
):  # fmt: skip
    """See decode.attend. k_ptr, v_ptr: int16 words of two values; scale holds K's, the values lack V's."""
    HALF: tl.constexpr = LANES // 2
    WORDS: tl.constexpr = DIM // 2
    q_even, q_odd = tl.split(q.to(tl.float16).reshape(ROWS, HALF, 2))
    top, total, even = nothing_seen(ROWS, HALF)
    odd = tl.zeros((ROWS, HALF), tl.float32)
    token = first * TILE + tl.arange(0, TILE)
    block = blocks_of(table, token, length, BLOCK_SIZE)
    for _ in tl.range(0, count, num_stages=STAGES):
        run = runs_of(block, token % BLOCK_SIZE, kv_head, NUM_KV_HEADS, BLOCK_SIZE, WORDS)
        here = token < length
        k_words = load_tile(k_ptr, run, here, WORDS, HALF, True)
        v_words = load_tile(v_ptr, run, here, WORDS, HALF, True)
        if WINDOW > 0:
            here = here & (token >= length - WINDOW)
        token += TILE
        block = blocks_of(table, token, length, BLOCK_SIZE)
        k_even, k_odd = _lanes(k_words.trans(), ASM)
        scores = capped(tl.dot(q_odd, k_odd, tl.dot(q_even, k_even)) * scale, softcap, SOFTCAP)
        scores = tl.where(here[None, :], scores, float("-inf"))
        weights, decay, top, total = weigh(scores, top, total, False)
        v_even, v_odd = _lanes(v_words, ASM)
        even = tl.dot(weights.to(tl.float16), v_even, even * decay[:, None])
        odd = tl.dot(weights.to(tl.float16), v_odd, odd * decay[:, None])
    return top, total, tl.join(even, odd).reshape(ROWS, LANES)
