"""Rows whose candidates do not decide what they keep, in the interpreter against the twin: the token is the twin's, bit for bit."""

import pytest
import torch

from pagecast_kernels import cutoffs, reference, sampling

LIMITS = [  # temperature, top_k, top_p, min_p
    (1.0, 0, 0.9, 0.0), (1.0, 0, 0.4, 0.0), (0.7, 0, 0.97, 0.0), (1.5, 0, 0.6, 0.01), (0.0, 0, 0.9, 0.0), (1.0, 50, 0.9, 0.0),
    (1.0, 0, 0.1, 0.0), (1.0, 0, 1.0, 0.0), (1.0, 1, 0.9, 0.0), (1e-4, 0, 0.9, 0.0), (1.0, 5000, 0.5, 0.0), (1.0, 7, 1.0, 0.0),
    (1.0, 0, 0.3, 0.0), (1.0, 900, 1.0, 0.2),
]  # fmt: skip


def case(seed: int, vocab: int, spread: float, repeats: int) -> tuple[torch.Tensor, list[torch.Tensor]]:
    g = torch.Generator().manual_seed(seed)
    rows = len(LIMITS) * repeats
    logits = torch.randn((rows, vocab), generator=g) * spread
    columns = [torch.tensor(column * repeats) for column in zip(*LIMITS)]
    columns[1] = columns[1].int()
    index = torch.arange(rows, dtype=torch.int32)
    return logits, [*columns, torch.randint(-(2**62), 2**62, (rows,), generator=g), index % 3, index]


def flat(rows: int, top_p: float) -> tuple[torch.Tensor, list[torch.Tensor]]:
    index = torch.arange(rows, dtype=torch.int32)
    limits = [torch.ones(rows), torch.zeros(rows, dtype=torch.int32), torch.full((rows,), top_p), torch.zeros(rows)]
    return torch.randn((rows, 3001), generator=torch.Generator().manual_seed(5)) * 0.2, [*limits, index.long() * 977, index, index]


@pytest.mark.parametrize(("spread", "slices"), [(0.3, None), (0.3, 4), (2.5, 2)])
def test_every_row_gets_its_twins_token(spread: float, slices: int | None) -> None:
    logits, args = case(int(spread * 10), 5003, spread, 1)
    logits[3, 100:] = -torch.inf
    work = sampling.sample_workspace(len(logits), "cpu")
    want = reference.sample(logits, *args).tolist()
    for _ in range(2):
        out = torch.full((len(logits),), -7, dtype=torch.int32)
        assert sampling.sample(logits, *args, out=out, workspace=work, cut_slices=slices).tolist() == want
        assert not work.counters.any() and not work.narrowing.counters.any()
    states = set(work.narrowing.states.tolist())
    if spread < 1:
        assert states == {state.value for state in (cutoffs.TO_DRAW, cutoffs.DRAWN, cutoffs.PROPOSED, cutoffs.OPEN)}


def test_what_lies_outside_the_nucleus_is_drawn_again() -> None:
    """At top_p 0.4 six of ten draws from whole rows lie outside, some of them more than once."""
    logits, args = flat(12, 0.4)
    work = sampling.sample_workspace(12, "cpu")
    got = sampling.sample(logits, *args, workspace=work).tolist()
    assert (work.narrowing.states == cutoffs.PROPOSED.value).all()
    free = reference.sample(logits, *args[:2], torch.ones(12), *args[3:]).tolist()
    assert got == reference.sample(logits, *args).tolist()
    assert 3 <= sum(a != b for a, b in zip(got, free)) < 12


def test_a_rows_token_is_the_same_in_any_company() -> None:
    logits, args = flat(12, 0.6)
    together = sampling.sample(logits, *args).tolist()
    for row in (0, 7, 11):
        assert sampling.sample(logits[row : row + 1], *(a[row : row + 1] for a in args)).tolist() == [together[row]]


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
def test_a_broken_row_gives_minus_one(bad: float) -> None:
    logits, args = case(1, 3000, 0.3, 1)
    for row in (0, 10, 12):  # proposed, and open for two reasons
        logits[row, 2900] = bad
        if bad < 0:
            logits[row] = bad
    got = sampling.sample(logits, *args).tolist()
    assert got == reference.sample(logits, *args).tolist()
    assert [got[0], got[10], got[12]] == [-1] * 3


def test_ties_at_the_edge_are_kept_together() -> None:
    logits = torch.randint(0, 3, (6, 4000), generator=torch.Generator().manual_seed(0)).float()
    rows = torch.arange(6, dtype=torch.int32)
    limits = (torch.ones(6), torch.zeros(6, dtype=torch.int32), torch.tensor([0.5, 0.6, 0.7, 0.8, 0.9, 0.99]), torch.zeros(6))
    args = (*limits, rows.long(), rows, rows)
    assert sampling.sample(logits, *args).tolist() == reference.sample(logits, *args).tolist()
