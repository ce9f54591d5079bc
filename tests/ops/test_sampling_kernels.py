"""Sampling and log-probabilities in the interpreter against the twins, and the twins against first principles."""

import pytest
import torch
from ops import paged_case

from pagecast_kernels import cutoffs, logprobs, noise, reference, sampling


def limits(rows: int, temperature: float = 1.0, top_k: int = 0, top_p: float = 1.0, min_p: float = 0.0) -> list[torch.Tensor]:
    return [
        torch.full((rows,), temperature), torch.full((rows,), top_k, dtype=torch.int32),
        torch.full((rows,), top_p), torch.full((rows,), min_p),
    ]  # fmt: skip


def draws(rows: int, seed: int = 7) -> list[torch.Tensor]:
    g = torch.Generator().manual_seed(seed)
    seeds = torch.randint(-(2**63), 2**63 - 1, (rows,), generator=g)
    return [seeds, torch.arange(rows, dtype=torch.int32) % 3, torch.randint(0, 9999, (rows,), generator=g, dtype=torch.int32)]


def test_philox_matches_the_published_vectors() -> None:
    """Known answers of Random123: counter and key all zeros, and all ones."""
    zeros, ones = (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8), (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD)
    for word, want in ((0, zeros), (0xFFFFFFFF, ones)):
        x = torch.tensor([word])
        assert tuple(int(w) for w in reference.philox((x, x, x, x), (x, x))) == want


LIMITS = [
    {}, {"temperature": 0.0}, {"temperature": 0.3}, {"top_k": 1}, {"top_k": 5}, {"top_k": 700}, {"top_p": 0.5}, {"top_p": 0.95},
    {"min_p": 0.05}, {"top_p": 0.0}, {"top_k": 20, "top_p": 0.8}, {"top_k": 900, "top_p": 0.9, "min_p": 0.001}, {"top_k": 10**6},
    {"temperature": 1e-4, "top_p": 0.9},
]  # fmt: skip


@pytest.mark.parametrize("options", LIMITS)
def test_sample_equals_its_twin(options: dict[str, float]) -> None:
    logits = torch.randn(6, 5003, generator=torch.Generator().manual_seed(2)) * 2
    logits[5, 100:] = -torch.inf  # a mask leaves few
    args = [*limits(6, **options), *draws(6)]
    got = sampling.sample(logits, *args, out=torch.full((6,), -7, dtype=torch.int32))
    assert got.tolist() == reference.sample(logits, *args).tolist()


def test_rows_with_different_limits_do_not_mix() -> None:
    logits = torch.randn(len(LIMITS), 4999, generator=torch.Generator().manual_seed(4))
    columns = [torch.cat(column) for column in zip(*(limits(1, **options) for options in LIMITS))]
    args = [*columns, *draws(len(LIMITS))]
    work = sampling.sample_workspace(len(LIMITS), "cpu")
    want = reference.sample(logits, *args).tolist()
    for _ in range(2):
        assert sampling.sample(logits, *args, workspace=work).tolist() == want
        assert not work.counters.any() and not work.narrowing.counters.any()


def test_many_rows_are_drawn_by_programs_that_tell_each_other_their_best() -> None:
    """Of every kind of row, drawn twice, so that what the programs of a row share must have been left as it was found."""
    rows, vocab = 36, 6007
    logits = torch.randn(rows, vocab, generator=torch.Generator().manual_seed(9)) * torch.linspace(0.1, 9.0, rows).unsqueeze(1)
    logits[4] = -torch.inf
    logits[5, 5000] = torch.nan
    logits[6, 17] = torch.inf
    logits[7] = 3.0
    logits[8, 1:] = -torch.inf
    logits[9] -= 1e30
    temperature = torch.tensor([1.0, 0.0, 0.3, 5.0]).repeat(rows // 4)
    args = [temperature, *limits(rows)[1:], *draws(rows)]
    work = sampling.sample_workspace(rows, "cpu")
    want = reference.sample(logits, *args).tolist()
    assert want[4:7] == [-1, -1, -1] and want[8] == 0
    for _ in range(2):
        assert sampling.sample(logits, *args, workspace=work, filtered=False).tolist() == want
        assert not work.counters.any() and (work.leaders == noise.NO_LEADER.value).all()


def test_whoever_tells_of_his_best_first_the_lowest_of_equal_scores_wins() -> None:
    """Scores so large that noise is rounded to 1/4: many tokens share the best one."""
    rows, vocab = 32, 1024
    args = [*limits(rows, temperature=2.0**-16), *draws(rows)]
    logits = torch.full((rows, vocab), 32.0)
    work = sampling.sample_workspace(rows, "cpu")
    want = reference.sample(logits, *args).tolist()
    assert sampling.sample(logits, *args, workspace=work, filtered=False).tolist() == want
    best = work.best[: 2 * rows].view(rows, 2)  # by the programs of a row
    assert (best[:, 0] == best[:, 1]).any()
    work.leaders.copy_(best.amax(1).view(torch.int32))  # as if another program had been there: positive floats order as their bits do
    assert sampling.sample(logits, *args, workspace=work, filtered=False).tolist() == want


def test_ties_are_kept_together_and_greedy_takes_the_lowest_id() -> None:
    logits = torch.zeros(2, 6000)
    logits[:, 3000:3010] = 1.0
    args = [*limits(2, top_k=3), *draws(2)]
    args[0][0] = 0.0
    got = sampling.sample(logits, *args).tolist()
    assert got == reference.sample(logits, *args).tolist()
    assert got[0] == 3000
    kept = reference.keep_mask(logits, *args[1:4])
    assert kept.sum(-1).tolist() == [10, 10]


def test_more_ties_than_the_candidate_buffer_holds() -> None:
    logits = torch.randint(0, 3, (2, 5000), generator=torch.Generator().manual_seed(0)).float()
    args = [*limits(2, top_k=4, top_p=0.3), *draws(2)]
    assert sampling.sample(logits, *args).tolist() == reference.sample(logits, *args).tolist()


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_a_row_without_sound_logits_gives_minus_one(bad: float) -> None:
    logits = torch.randn(3, 5000)
    logits[0, 4321] = bad
    logits[1] = -torch.inf
    for options in ({}, {"temperature": 0.0}, {"top_p": 0.9}, {"top_k": 3}):
        args = [*limits(3, **options), *draws(3)]
        got = sampling.sample(logits, *args).tolist()
        assert got[:2] == [-1, -1] and got[2] >= 0
        assert reference.sample(logits, *args).tolist() == got


def test_sampled_frequencies_follow_the_softmax() -> None:
    """Chi-square of 4,000 draws over 8 tokens: 7 degrees of freedom, 1 in 10^6 beyond 41."""
    row = torch.tensor([2.0, 1.5, 1.0, 0.5, 0.0, -0.5, -1.0, 1.2])
    n = 4000
    tokens = reference.sample(
        row.expand(n, 8), *limits(n), torch.full((n,), 42), torch.zeros(n, dtype=torch.int32), torch.arange(n, dtype=torch.int32)
    )
    expected = torch.softmax(row, 0) * n
    seen = torch.bincount(tokens.long(), minlength=8)
    assert float(((seen - expected) ** 2 / expected).sum()) < 41


def test_keep_mask_by_definition() -> None:
    """top-k, then top-p over what is left, then min-p, token by token in sorted order."""
    scaled = torch.randn(8, 300, dtype=torch.float64, generator=torch.Generator().manual_seed(1)) * 2
    top_k, top_p, min_p = torch.tensor([0, 10, 0, 50, 7, 300, 0, 20]), torch.tensor([1, 1, 0.7, 0.9, 0.2, 0.99, 1, 1.0]), torch.zeros(8)
    min_p[6:] = 0.1
    kept = reference.keep_mask(scaled, top_k, top_p, min_p)
    for row in range(8):
        order = scaled[row].argsort(descending=True).tolist()[: int(top_k[row]) or None]
        probs = torch.softmax(scaled[row, order], 0).tolist()
        want, mass = set(), 0.0
        for token, prob in zip(order, probs):
            if (mass < float(top_p[row]) and prob >= float(min_p[row]) * probs[0]) or not want:
                want.add(token)
            mass += prob
        assert set(kept[row].nonzero().flatten().tolist()) == want


@pytest.mark.parametrize("num", [0, 1, 5])
def test_top_logprobs(num: int) -> None:
    logits = torch.randn(3, 5001, generator=torch.Generator().manual_seed(3))
    logits[0, [7, 70, 700, 4100]] = 9.0
    logits[2, 3:] = -torch.inf
    tokens = torch.tensor([7, 5000, 1], dtype=torch.int32)
    got = logprobs.top_logprobs(logits, tokens, min(num, 3))
    want = reference.top_logprobs(logits.double(), tokens, min(num, 3))
    assert torch.equal(got[1], want[1])
    for a, b in ((got[0], want[0]), (got[2], want[2])):
        assert paged_case.relative_error(a, b) < 1e-5 or a.numel() == 0
    assert want[1].shape == (3, min(num, 3))


@pytest.mark.parametrize("slices", [2, 16])
def test_cut_offs_do_not_depend_on_how_a_row_is_split(slices: int) -> None:
    """Likely tokens all over the vocabulary, and all in one place, where they outgrow a slice's share of the candidates."""
    g = torch.Generator().manual_seed(slices)
    logits = torch.randn(len(LIMITS), 40_000, generator=g) * 3
    logits[::2, 100:900] += 14.0
    columns = [torch.cat(column) for column in zip(*(limits(1, **options) for options in LIMITS))]
    columns[2] = torch.where(columns[2] == 0.5, 0.5001, columns[2])
    work = cutoffs.cutoff_workspace(len(LIMITS), "cpu")
    drawing = draws(len(LIMITS))
    out = torch.full((len(LIMITS),), -7, dtype=torch.int32)
    cutoffs.find_cutoffs(logits, *columns, *drawing, out, work, slices=slices)
    kept = logits >= work.cutoffs[:, None]
    drawn, settled = work.states == cutoffs.DRAWN.value, work.cutoffs == work.cutoffs
    assert drawn.any() and (out[~drawn] == -7).all()
    wanted = reference.sample(logits, *columns, *drawing)
    assert (out == wanted)[drawn].sum() >= drawn.sum() - 1
    want = reference.keep_mask(logits / columns[0].clamp(min=1e-5)[:, None], *columns[1:])
    random = (columns[0] >= reference.GREEDY_BELOW) & (columns[1] != 1) & settled
    assert (kept == want)[random].all(1).sum() >= random.sum() - 1  # a token on a nucleus' edge may fall on either side
    assert not work.counters.any()


def test_columns_that_reach_the_bound_decide_rows_without_another_look_at_them() -> None:
    """What `_narrow` does not gather has no counts. Where too many columns or candidates reach the bound, or the whole mass is asked for,
    it gathers."""
    logits = torch.randn(6, 40_001, generator=torch.Generator().manual_seed(9)).bfloat16() * 3
    logits[4, 512:1400] = 16.0  # 888 candidates in 111 columns
    options = [{"top_k": 50, "top_p": 0.9}, {"top_k": 7}, {"min_p": 0.1}, {"top_k": 300}, {"top_k": 9}, {"top_p": 0.9}]
    args = [*(torch.cat(column) for column in zip(*(limits(1, **each) for each in options))), *draws(6)]
    work, out = sampling.sample_workspace(6, "cpu"), torch.full((6,), -7, dtype=torch.int32)
    got = sampling.sample(logits, *args, out=out, workspace=work, cut_slices=4).tolist()
    assert got == reference.sample(logits, *args).tolist()
    assert work.narrowing.counts.flatten()[: 6 * 4].view(6, 4).any(1).tolist() == [False, False, False, True, True, True]
    assert (work.narrowing.states[:4] == cutoffs.DRAWN.value).all()


def test_rows_of_which_a_mask_leaves_fewer_tokens_than_top_k_are_drawn_at_once() -> None:
    """As rules of structured output leave them: nothing but their tokens is above -inf. A row without any has no token."""
    logits = torch.full((3, 9001), float("-inf")).bfloat16()
    logits[0, [4, 700, 8999]] = torch.tensor([1.0, 3.0, 2.5]).bfloat16()
    logits[1, 6000] = -40.0
    args = [*limits(3, top_k=20, top_p=0.95), *draws(3)]
    work, out = sampling.sample_workspace(3, "cpu"), torch.full((3,), -7, dtype=torch.int32)
    got = sampling.sample(logits, *args, out=out, workspace=work, cut_slices=4).tolist()
    assert got == reference.sample(logits, *args).tolist() and got[1:] == [6000, -1]
    assert (work.narrowing.states[:2] == cutoffs.DRAWN.value).all() and not work.narrowing.counters.any()
