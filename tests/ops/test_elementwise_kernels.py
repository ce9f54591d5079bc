"""Norms, activations, gathers, copies, and rotary embedding with the KV write, in the interpreter against float64."""

import pytest
import torch
from ops import paged_case

from pagecast_kernels import elementwise, norms, reference, rope, row_scales


@pytest.mark.parametrize(("tokens", "hidden"), [(1, 64), (3, 576), (5, 4096), (2, 100)])
def test_norms(tokens: int, hidden: int) -> None:
    torch.manual_seed(hidden)
    x, residual, weight = torch.randn(tokens, hidden * 2)[:, :hidden], torch.randn(tokens, hidden), torch.randn(hidden)
    got = norms.rms_norm(x, weight, 1e-5, out=torch.full((tokens, hidden), float("nan")))
    assert paged_case.relative_error(got, reference.rms_norm(x.double(), weight.double(), 1e-5)) < 1e-6
    total = residual.double()
    want = reference.add_rms_norm(x.double(), total, weight.double(), 1e-5)
    got = norms.add_rms_norm(x, residual, weight, 1e-5)
    assert paged_case.relative_error(got, want) < 1e-6
    assert paged_case.relative_error(residual, total) < 1e-6


@pytest.mark.parametrize(("tokens", "inner"), [(1, 64), (3, 1536), (2, 1025)])
def test_silu_mul(tokens: int, inner: int) -> None:
    x = torch.randn(tokens, 2 * inner, generator=torch.Generator().manual_seed(inner)) * 4
    got = elementwise.silu_mul(x, out=torch.full((tokens, inner), float("nan")))
    assert paged_case.relative_error(got, reference.silu_mul(x.double())) < 1e-6


@pytest.mark.parametrize(("tokens", "hidden", "inner"), [(1, 64, 64), (3, 576, 1536), (65, 100, 1025), (257, 48, 80)])
def test_silu_mul_of_rows_that_were_not_normed(tokens: int, hidden: int, inner: int) -> None:
    g = torch.Generator().manual_seed(inner)
    residual, weight = torch.randn(tokens, hidden, generator=g) * 20, torch.randn(2 * inner, hidden, generator=g) / hidden**0.5
    want = reference.silu_mul(reference.rms_norm(residual.double(), torch.ones(hidden).double(), 1e-5) @ weight.double().t())
    x, nan = residual @ weight.t(), torch.full((tokens, inner), float("nan"))
    assert paged_case.relative_error(elementwise.silu_mul(x, nan, residual, 1e-5), want) < 2e-6
    assert paged_case.relative_error(reference.silu_mul(x, residual=residual, eps=1e-5), want) < 2e-6


@pytest.mark.parametrize("start", [0, 40])
def test_embedding_of_a_vocabulary_shard(start: int) -> None:
    weight = torch.randn(50, 576)
    ids = torch.tensor([0, 39, 40, 49, 50, 89, 90], dtype=torch.int32)
    got = elementwise.embedding(ids, weight, start=start)
    want = torch.stack([weight[i - start] if start <= i < start + 50 else torch.zeros(576) for i in ids.tolist()])
    assert torch.equal(got, want)
    assert torch.equal(reference.embedding(ids, weight, start=start), want)


def test_copy_blocks() -> None:
    k, v = torch.randn(9, 2, 16, 64), torch.randn(9, 2, 16, 64)
    want = k.clone(), v.clone()
    src, dst = torch.tensor([3, 1, 0]), torch.tensor([5, 7, 0])
    elementwise.copy_blocks(k, v, src, dst)
    for got, before in zip((k, v), want):
        before[dst] = before[src]
        assert torch.equal(got, before)


@pytest.mark.parametrize(("heads", "kv_heads", "dim"), [(9, 3, 64), (4, 1, 128), (8, 8, 96), (3, 1, 256), (32, 8, 64)])
@pytest.mark.parametrize("norm", [False, True])
def test_rope_and_write_kv(heads: int, kv_heads: int, dim: int, norm: bool) -> None:
    torch.manual_seed(heads + dim)
    tokens, size, blocks = 5, 16, 4
    qkv = torch.randn(tokens, (heads + 2 * kv_heads) * dim)
    angle = torch.randn(40, dim // 2)
    cos_sin = torch.cat((angle.cos(), angle.sin()), 1)
    positions = torch.tensor([0, 7, 39, 3, 3], dtype=torch.int32)
    slots = torch.tensor([63, 0, -1, 16, 31])
    q_norm, k_norm = (torch.randn(dim), torch.randn(dim)) if norm else (None, None)
    caches = [torch.full((blocks, kv_heads, size, dim), float("nan")) for _ in range(2)]
    exact = [cache.double() for cache in caches]
    got = rope.rope_and_write_kv(qkv, cos_sin, positions, slots, *caches, heads, kv_heads, dim, q_norm, k_norm, 1e-5)
    weights = [None if w is None else w.double() for w in (q_norm, k_norm)]
    want = reference.rope_and_write_kv(qkv.double(), cos_sin, positions, slots, *exact, heads, kv_heads, dim, *weights, 1e-5)
    assert paged_case.relative_error(got, want) < 1e-6
    for cache, expected in zip(caches, exact):
        assert torch.equal(cache.isnan(), expected.isnan())
        assert paged_case.relative_error(cache.nan_to_num(), expected.nan_to_num()) < 1e-6


def test_rope_only_one_of_the_norms() -> None:
    qkv, angle = torch.randn(2, 4 * 64), torch.randn(4, 32)
    cos_sin, positions, slots = torch.cat((angle.cos(), angle.sin()), 1), torch.tensor([1, 2], dtype=torch.int32), torch.tensor([0, 1])
    for norms_ in ((torch.randn(64), None), (None, torch.randn(64))):
        caches = [torch.zeros(1, 1, 16, 64) for _ in range(4)]
        got = rope.rope_and_write_kv(qkv, cos_sin, positions, slots, *caches[:2], 2, 1, 64, *norms_)
        want = reference.rope_and_write_kv(qkv, cos_sin, positions, slots, *caches[2:], 2, 1, 64, *norms_)
        assert torch.allclose(got, want, atol=1e-5) and torch.allclose(caches[0], caches[2], atol=1e-5)


@pytest.mark.parametrize(
    ("tokens", "hidden", "heads", "kv_heads", "dim"), [(1, 64, 4, 1, 128), (5, 576, 9, 3, 64), (67, 100, 4, 4, 96), (259, 48, 2, 1, 64)]
)
@pytest.mark.parametrize(("norm", "biased"), [(False, False), (True, False), (False, True), (True, True)])
def test_rope_of_rows_that_were_not_normed(
    tokens: int, hidden: int, heads: int, kv_heads: int, dim: int, norm: bool, biased: bool
) -> None:
    """Against float64 of the product of normed rows; qkv's own rows lie within wider ones."""
    g = torch.Generator().manual_seed(tokens)
    width = (heads + 2 * kv_heads) * dim
    residual, weight = torch.randn(tokens, hidden, generator=g) * 20, torch.randn(width, hidden, generator=g) / hidden**0.5
    bias, norms_ = torch.randn(width, generator=g) if biased else None, [torch.randn(dim, generator=g) if norm else None for _ in range(2)]
    angle = torch.randn(300, dim // 2, generator=g)
    cos_sin, positions = torch.cat((angle.cos(), angle.sin()), 1), torch.randint(0, 300, (tokens,), generator=g, dtype=torch.int32)
    slots = torch.randperm(tokens + 16, generator=g)[:tokens]
    slots[tokens // 2] = -1
    layout = (cos_sin, positions, slots)
    exact = [torch.zeros(tokens // 16 + 2, kv_heads, 16, dim, dtype=torch.float64) for _ in range(2)]
    qkv = reference.rms_norm(residual.double(), torch.ones(hidden).double(), 1e-5) @ weight.double().t()
    wide = [None if w is None else w.double() for w in (bias, *norms_)]
    qkv = qkv if wide[0] is None else qkv + wide[0]
    want = reference.rope_and_write_kv(qkv, *layout, *exact, heads, kv_heads, dim, *wide[1:], 1e-5)
    strided = torch.empty(tokens, width + 32)[:, :width].copy_(residual @ weight.t())
    for op, rows in ((rope.rope_and_write_kv, strided), (reference.rope_and_write_kv, strided.contiguous())):
        caches = [torch.zeros_like(cache, dtype=torch.float32) for cache in exact]
        got = op(rows, *layout, *caches, heads, kv_heads, dim, *norms_, 1e-5, residual=residual, bias=bias)
        for mine, theirs in ((got, want), *zip(caches, exact, strict=True)):
            assert paged_case.relative_error(mine, theirs) < 2e-6 or not bool(theirs.any())
            assert torch.equal(mine == 0, theirs == 0)


def test_rope_adds_a_bias_to_rows_that_were_normed() -> None:
    qkv, bias, angle = torch.randn(3, 4 * 64), torch.randn(4 * 64), torch.randn(4, 32)
    layout = torch.cat((angle.cos(), angle.sin()), 1), torch.tensor([1, 2, 3], dtype=torch.int32), torch.tensor([0, 1, 9])
    caches = [torch.zeros(1, 1, 16, 64) for _ in range(4)]
    got = rope.rope_and_write_kv(qkv, *layout, *caches[:2], 2, 1, 64, bias=bias)
    want = reference.rope_and_write_kv(qkv + bias, *layout, *caches[2:], 2, 1, 64)
    assert all(torch.allclose(mine, theirs, atol=1e-5) for mine, theirs in zip((got, *caches[:2]), (want, *caches[2:])))


def test_launches_by_rows_are_chosen_by_powers_of_two() -> None:
    """Kernels are compiled ahead for one number of rows of each power of two (precompile.launch_all)."""
    starts = [launch.rows for launch in row_scales.LAUNCHES]
    assert starts == sorted(set(starts)) and starts[0] == 1 and all(rows & (rows - 1) == 0 for rows in starts)
    assert [row_scales.launch_for(rows).rows for rows in starts] == starts
    assert [row_scales.launch_for(rows - 1).rows for rows in starts[1:]] == starts[:-1]
    assert row_scales.columns_and_warps(1 << 20, 96)[0] == 128 and row_scales.heads_and_warps(1 << 20, 5, 64)[0] == 8
