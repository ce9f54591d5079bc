"""Log-probabilities of chosen and of the most probable tokens; one program a row, one pass over it for each token wanted."""

import torch
import triton
import triton.language as tl
from torch import Tensor

_TILE = 4096


@triton.jit(do_not_specialize=["num"])
def _top_logprobs(logits_ptr, tokens_ptr, chosen_ptr, ids_ptr, logprobs_ptr, vocab, stride, num, TILE: tl.constexpr):
    row = tl.program_id(0)
    logits = logits_ptr + row.to(tl.int64) * stride
    column = tl.arange(0, TILE)
    top = tl.full((TILE,), float("-inf"), tl.float32)
    total = tl.zeros((TILE,), tl.float32)
    for start in range(0, vocab, TILE):
        x = tl.load(logits + start + column, start + column < vocab, float("-inf")).to(tl.float32)
        new_top = tl.maximum(top, x)
        base = tl.where(new_top == float("-inf"), 0.0, new_top)
        total = total * tl.exp(top - base) + tl.exp(x - base)
        top = new_top
    peak = tl.max(top, 0)
    norm = peak + tl.log(tl.sum(total * tl.exp(top - peak), 0))
    tl.store(chosen_ptr + row, tl.load(logits + tl.load(tokens_ptr + row)).to(tl.float32) - norm)

    # The next in order (largest first, lowest id first of equals) after the last one found.
    last, last_id = tl.full((), float("inf"), tl.float32), tl.full((), -1, tl.int32)
    for rank in range(num):
        best = tl.full((TILE,), float("-inf"), tl.float32)
        best_id = tl.full((TILE,), 0x7FFFFFFF, tl.int32)
        for start in range(0, vocab, TILE):
            ids = start + column
            x = tl.load(logits + ids, ids < vocab, float("-inf")).to(tl.float32)
            after = (ids < vocab) & ((x < last) | ((x == last) & (ids > last_id)))
            better = after & ((x > best) | (best_id == 0x7FFFFFFF))
            best = tl.where(better, x, best)
            best_id = tl.where(better, ids, best_id)
        last = tl.max(best, 0)
        last_id = tl.min(tl.where(best == last, best_id, 0x7FFFFFFF), 0)
        tl.store(ids_ptr + row * num + rank, last_id)
        tl.store(logprobs_ptr + row * num + rank, last - norm)


def top_logprobs(logits: Tensor, tokens: Tensor, num: int) -> tuple[Tensor, Tensor, Tensor]:
    """See reference.top_logprobs. Rows of logits may be strided; num is at most V."""
    batch, vocab = logits.shape
    chosen = torch.empty(batch, dtype=torch.float32, device=logits.device)
    ids = torch.empty((batch, num), dtype=torch.int32, device=logits.device)
    logprobs = torch.empty((batch, num), dtype=torch.float32, device=logits.device)
    if batch:
        _top_logprobs[(batch,)](logits, tokens, chosen, ids, logprobs, vocab, logits.stride(0), num, _TILE, num_warps=8)
    return chosen, ids, logprobs
