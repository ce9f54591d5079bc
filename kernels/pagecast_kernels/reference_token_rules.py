"""Plain torch twins of the operators for token rules; see `reference`, which offers them under its own name."""

import torch
from torch import Tensor

PENALTIES, BIAS, WORDS, EARLY = 1, 2, 4, 8
"""Bits of `kinds`: which token rules a row has."""


def adjust_logits(
    logits: Tensor, places: Tensor, rows: Tensor, kinds: Tensor, counts: Tensor, bias: Tensor, penalties: Tensor, masks: Tensor,
    mask_index: Tensor,
) -> Tensor:  # fmt: skip
    """float32[K, V]: logits[places] with each row's penalties, then its bias, then its mask.

    places int32[K] into logits[B, V]; rows int32[K], distinct, into the state of R rows: counts int32[R, V], twice the times that a
    token is in the output, plus 1 if it is in the prompt; bias float32[R, V]; penalties float32[R, 3]: presence, frequency,
    repetition. kinds int32[K] says which of them count. masks int32[M, ⌈V/32⌉] holds a bit for every token, bit v % 32 of word
    v // 32 for token v, 1 if it may be chosen; mask_index int32[K], -1 for none.
    """
    index = rows.long()
    x = logits.index_select(0, places.long())
    x = x if x.dtype == torch.float64 else x.float()
    penalised = torch.nonzero(kinds & PENALTIES).flatten()
    if penalised.numel():
        count = counts.index_select(0, index[penalised])
        presence, frequency, repetition = penalties[index[penalised]].to(x.dtype).unsqueeze(-1).unbind(1)
        values, times = x[penalised], count >> 1
        values = torch.where(count > 0, torch.where(values > 0, values / repetition, values * repetition), values)
        x[penalised] = values - (times > 0) * presence - times * frequency
    biased = torch.nonzero(kinds & BIAS).flatten()
    if biased.numel():
        x[biased] += bias[index[biased]]
    masked = torch.nonzero(mask_index >= 0).flatten()
    if masked.numel():
        words = masks.index_select(0, mask_index[masked].long())
        bits = (words.unsqueeze(-1) >> torch.arange(32, device=words.device, dtype=torch.int32)) & 1
        x[masked] = x[masked].masked_fill(bits.flatten(1)[:, : x.shape[1]] == 0, -torch.inf)
    return x


def forbid_tokens(logits: Tensor, rows: Tensor, kinds: Tensor, words: Tensor, recent: Tensor, stops: Tensor) -> Tensor:
    """logits float32[K, V] with -inf, in place, where a bad word would end, and at the stops of rows that may not end yet (EARLY).

    words int32[R, W, L]: each of W words holds its tokens at the end of its L places, -1 before them and all over in one that is
    not used. recent int32[R, L - 1]: the row's last tokens, the newest last, -1 before the first. stops int32[R, S], -1 fills up.
    """
    index = rows.long()
    worded = torch.nonzero(kinds & WORDS).flatten()
    if worded.numel():
        held, before = words[index[worded]], recent[index[worded]].unsqueeze(1)
        follows = ((held[..., :-1] < 0) | (held[..., :-1] == before)).all(-1) & (held[..., -1] >= 0)
        place, word = torch.nonzero(follows, as_tuple=True)
        logits[worded[place], held[place, word, -1].long()] = -torch.inf
    early = torch.nonzero(kinds & EARLY).flatten()
    if early.numel():
        ids = stops[index[early]]
        place, at = torch.nonzero(ids >= 0, as_tuple=True)
        logits[early[place], ids[place, at].long()] = -torch.inf
    return logits


def note_tokens(tokens: Tensor, rows: Tensor, kinds: Tensor, counts: Tensor, recent: Tensor) -> None:
    """Rows int32[K], distinct, hold one output token more: counts (see adjust_logits) and recent (see forbid_tokens) move on."""
    index = rows.long()
    counted, worded = torch.nonzero(kinds & PENALTIES).flatten(), torch.nonzero(kinds & WORDS).flatten()
    counts[index[counted], tokens[counted].long()] += 2
    recent[index[worded]] = torch.cat((recent[index[worded], 1:], tokens[worded].unsqueeze(1)), 1)
