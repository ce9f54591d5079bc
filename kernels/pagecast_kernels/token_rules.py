"""What requests ask of their tokens beyond temperature and cut-offs: penalties, biases, masks, forbidden tokens.

Only the rows that ask are touched: they are picked out of the step's logits, in float32, and drawn from on their own. A row's counts of
tokens stay on the device and are moved on by what was drawn.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from pagecast_kernels.reference_token_rules import BIAS, EARLY, PENALTIES, WORDS

_TILE = 2048
_PENALTIES, _BIAS, _WORDS, _EARLY = tl.constexpr(PENALTIES), tl.constexpr(BIAS), tl.constexpr(WORDS), tl.constexpr(EARLY)


@triton.jit(do_not_specialize=["mask_words", "state_stride"])
def _adjust_logits(
    logits_ptr, places_ptr, rows_ptr, kinds_ptr, counts_ptr, bias_ptr, penalties_ptr, masks_ptr, mask_index_ptr, out_ptr,
    vocab, stride, state_stride, mask_words, out_stride, TILE: tl.constexpr,
):  # fmt: skip
    place, part = tl.program_id(0), tl.program_id(1)
    ids = part * TILE + tl.arange(0, TILE)
    inside = ids < vocab
    x = tl.load(logits_ptr + tl.load(places_ptr + place).to(tl.int64) * stride + ids, inside, float("-inf")).to(tl.float32)
    row, kind = tl.load(rows_ptr + place).to(tl.int64), tl.load(kinds_ptr + place)
    if kind & _PENALTIES:
        presence, frequency = tl.load(penalties_ptr + row * 3), tl.load(penalties_ptr + row * 3 + 1)
        repetition = tl.load(penalties_ptr + row * 3 + 2)
        count = tl.load(counts_ptr + row * state_stride + ids, inside, 0)
        x = tl.where(count > 0, tl.where(x > 0, x / repetition, x * repetition), x)
        times = count >> 1
        x -= tl.where(times > 0, presence, 0.0) + frequency * times.to(tl.float32)
    if kind & _BIAS:
        x += tl.load(bias_ptr + row * state_stride + ids, inside, 0.0)
    mask = tl.load(mask_index_ptr + place)
    if mask >= 0:
        word = tl.load(masks_ptr + mask.to(tl.int64) * mask_words + ids // 32, inside, 0)
        x = tl.where((word >> (ids % 32)) & 1 != 0, x, float("-inf"))
    tl.store(out_ptr + place.to(tl.int64) * out_stride + ids, x, inside)


def adjust_logits(
    logits: Tensor, places: Tensor, rows: Tensor, kinds: Tensor, counts: Tensor, bias: Tensor, penalties: Tensor, masks: Tensor,
    mask_index: Tensor,
) -> Tensor:  # fmt: skip
    """See reference.adjust_logits. Rows of logits may be strided."""
    batch, vocab = places.shape[0], logits.shape[1]
    # Rows start at multiples of 16 bytes: kernels are compiled once more for strides that do not.
    out = torch.empty((batch, -(-vocab // 16) * 16), dtype=torch.float32, device=logits.device)[:, :vocab]
    if batch:
        _adjust_logits[(batch, triton.cdiv(vocab, _TILE))](
            logits, places, rows, kinds, counts, bias, penalties, masks, mask_index, out,
            vocab, logits.stride(0), counts.stride(0), masks.stride(0), out.stride(0), _TILE, num_warps=8,
        )  # fmt: skip
    return out


@triton.jit
def _forbid_tokens(
    logits_ptr, rows_ptr, kinds_ptr, words_ptr, recent_ptr, stops_ptr, stride,
    COUNT: tl.constexpr, LENGTH: tl.constexpr, STOPS: tl.constexpr, LANES: tl.constexpr,
):  # fmt: skip
    place = tl.program_id(0)
    row, kind = tl.load(rows_ptr + place).to(tl.int64), tl.load(kinds_ptr + place)
    logits = logits_ptr + place.to(tl.int64) * stride
    if kind & _WORDS:
        word = words_ptr + (row * COUNT + tl.arange(0, COUNT)) * LENGTH
        last = tl.load(word + LENGTH - 1)
        follows = last >= 0
        for at in range(LENGTH - 1):
            wanted = tl.load(word + at)
            follows &= (wanted < 0) | (wanted == tl.load(recent_ptr + row * (LENGTH - 1) + at))
        tl.store(logits + last, tl.full((COUNT,), float("-inf"), tl.float32), follows)
    if kind & _EARLY:
        lane = tl.arange(0, LANES)
        ids = tl.load(stops_ptr + row * STOPS + lane, lane < STOPS, -1)
        tl.store(logits + ids, tl.full((LANES,), float("-inf"), tl.float32), ids >= 0)


def forbid_tokens(logits: Tensor, rows: Tensor, kinds: Tensor, words: Tensor, recent: Tensor, stops: Tensor) -> Tensor:
    """See reference.forbid_tokens. Words and stops are contiguous; the number of words is a power of two."""
    batch, num_stops = rows.shape[0], stops.shape[1]
    if batch:
        _forbid_tokens[(batch,)](
            logits, rows, kinds, words, recent, stops, logits.stride(0),
            words.shape[1], words.shape[2], num_stops, triton.next_power_of_2(num_stops), num_warps=4,
        )  # fmt: skip
    return logits


@triton.jit(do_not_specialize=["counts_stride"])
def _note_tokens(tokens_ptr, rows_ptr, kinds_ptr, counts_ptr, recent_ptr, counts_stride, HELD: tl.constexpr, LANES: tl.constexpr):
    place = tl.program_id(0)
    row, kind, token = tl.load(rows_ptr + place).to(tl.int64), tl.load(kinds_ptr + place), tl.load(tokens_ptr + place)
    if kind & _PENALTIES:
        count = counts_ptr + row * counts_stride + token
        tl.store(count, tl.load(count) + 2)
    if kind & _WORDS:
        lane = tl.arange(0, LANES)
        recent = recent_ptr + row * HELD
        following = tl.load(recent + lane + 1, lane < HELD - 1, -1)
        tl.debug_barrier()
        tl.store(recent + lane, tl.where(lane == HELD - 1, token, following), lane < HELD)


def note_tokens(tokens: Tensor, rows: Tensor, kinds: Tensor, counts: Tensor, recent: Tensor) -> None:
    """See reference.note_tokens."""
    held = recent.shape[1]
    if rows.shape[0]:
        _note_tokens[(rows.shape[0],)](
            tokens, rows, kinds, counts, recent, counts.stride(0), held, triton.next_power_of_2(held), num_warps=1
        )
