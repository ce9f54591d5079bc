"""Token rules in the interpreter and their twins, both against plain arithmetic in float64."""

from types import ModuleType

import numpy as np
import pytest
import torch
from ops import paged_case

from pagecast_kernels import reference, token_rules
from pagecast_kernels.reference_token_rules import BIAS, EARLY, PENALTIES, WORDS

assert paged_case  # chooses the interpreter
ROWS, VOCAB, WORD_COUNT, WORD_LENGTH = 6, 2603, 8, 4
BOTH = pytest.mark.parametrize("ops", [token_rules, reference], ids=["triton", "twin"])


def state(seed: int) -> dict[str, torch.Tensor]:
    """Rows with an output of 30 tokens and a prompt of 40, some in both; a bias on a tenth of the ids."""
    g = torch.Generator().manual_seed(seed)
    counts = torch.zeros((ROWS, VOCAB), dtype=torch.int32)
    for row in range(ROWS):
        counts[row, torch.randint(0, 200, (40,), generator=g)] = 1
        counts[row].index_add_(0, torch.randint(0, 100, (30,), generator=g), torch.full((30,), 2, dtype=torch.int32))
    bias = torch.randn((ROWS, VOCAB), generator=g) * 5 * (torch.rand((ROWS, VOCAB), generator=g) < 0.1)
    bias[2, 7:] = -torch.inf
    penalties = torch.tensor([[0.5, 0.25, 1.3], [-1.0, 0.0, 1.0], [0.0, 2.0, 0.7], [2.0, -0.3, 1.0], [0.0, 0.0, 1.9], [0.1, 0.2, 1.1]])
    return {"counts": counts, "bias": bias, "penalties": penalties}


def by_hand(logits: np.ndarray, kind: int, counts: np.ndarray, bias: np.ndarray, penalties: np.ndarray, allowed: set[int] | None):
    """One row in float64, one token at a time, by the definitions in SamplingParams."""
    wanted = np.empty(len(logits))
    presence, frequency, repetition = penalties.tolist()
    for token, x in enumerate(logits.astype(np.float64).tolist()):
        in_prompt, times = bool(counts[token] & 1), int(counts[token]) // 2
        if kind & PENALTIES:
            if in_prompt or times:
                x = x / repetition if x > 0 else x * repetition
            x -= (presence if times else 0.0) + frequency * times
        if kind & BIAS:
            x += float(bias[token])
        wanted[token] = x if allowed is None or token in allowed else -np.inf
    return wanted


@BOTH
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_adjusted_logits_against_float64(ops: ModuleType, dtype: torch.dtype) -> None:
    held = state(3)
    logits = (torch.randn((9, VOCAB + 5), generator=torch.Generator().manual_seed(1)) * 4).to(dtype)[:, :VOCAB]
    places, rows = torch.tensor([8, 0, 3, 4, 1], dtype=torch.int32), torch.tensor([5, 2, 0, 3, 1], dtype=torch.int32)
    kinds = torch.tensor([PENALTIES | BIAS, BIAS, PENALTIES | WORDS, EARLY, PENALTIES], dtype=torch.int32)
    sets = [set(range(0, VOCAB, 3)) | {VOCAB - 1}, {31, 32, 33, 2559}]
    bits = np.zeros((2, -(-VOCAB // 32) * 32), dtype=np.uint8)
    for which, ids in enumerate(sets):
        bits[which, sorted(ids)] = 1
    masks = torch.from_numpy(np.packbits(bits, axis=1, bitorder="little").view(np.int32))
    mask_index = torch.tensor([1, -1, 0, -1, -1], dtype=torch.int32)
    got = ops.adjust_logits(logits, places, rows, kinds, *held.values(), masks, mask_index)
    assert got.dtype == torch.float32
    for at, (place, row, kind, mask) in enumerate(zip(places, rows, kinds, mask_index)):
        allowed = sets[mask] if mask >= 0 else None
        wanted = by_hand(logits[place].float().numpy(), int(kind), *(x[row].numpy() for x in held.values()), allowed)
        np.testing.assert_allclose(got[at].numpy(), wanted, rtol=1e-6, atol=1e-5)


def words_of(words: list[list[int]]) -> torch.Tensor:
    table = torch.full((WORD_COUNT, WORD_LENGTH), -1, dtype=torch.int32)
    for at, word in enumerate(words):
        table[at, WORD_LENGTH - len(word) :] = torch.tensor(word)
    return table


@BOTH
def test_the_last_token_of_a_word_is_forbidden_only_where_the_others_came_before(ops: ModuleType) -> None:
    words = torch.stack([words_of([[5], [1, 2, 3, 9], [3, 10], [7, 3, 11], [4, 1, 2, 12]]), words_of([[6]]), words_of([[20, 21]])])
    recent = torch.tensor([[1, 2, 3], [-1, -1, -1], [-1, -1, 20]], dtype=torch.int32)
    stops = torch.tensor([[50, 50], [51, 52], [53, -1]], dtype=torch.int32)
    rows = torch.tensor([2, 0, 1], dtype=torch.int32)
    kinds = torch.tensor([WORDS | EARLY, WORDS, EARLY], dtype=torch.int32)
    got = ops.forbid_tokens(torch.zeros(3, VOCAB), rows, kinds, words, recent, stops)
    forbidden = [sorted(torch.nonzero(got[at] == -torch.inf).flatten().tolist()) for at in range(3)]
    assert forbidden == [[21, 53], [5, 9, 10], [51, 52]]


@BOTH
def test_what_was_drawn_is_noted(ops: ModuleType) -> None:
    counts, recent = torch.zeros((4, 50), dtype=torch.int32), torch.full((4, WORD_LENGTH - 1), -1, dtype=torch.int32)
    counts[1, 9] = 1
    rows = torch.tensor([1, 3, 0], dtype=torch.int32)
    kinds = torch.tensor([PENALTIES | WORDS, WORDS, BIAS], dtype=torch.int32)
    for tokens in ([9, 1, 4], [9, 2, 5], [8, 3, 6], [7, 4, 7]):
        ops.note_tokens(torch.tensor(tokens, dtype=torch.int32), rows, kinds, counts, recent)
    assert counts[1].nonzero().flatten().tolist() == [7, 8, 9] and counts[1, 7:10].tolist() == [2, 2, 5]
    assert not counts[[0, 2, 3]].any()
    assert recent.tolist() == [[-1] * 3, [9, 8, 7], [-1] * 3, [2, 3, 4]]
