"""The CPU's fast operators against the plain reference ones, in float32 and bfloat16."""

import pytest
import torch

from pagecast_kernels import reference
from pagecast_worker import cpu_ops

TOLERANCE = {torch.float32: 2e-5, torch.bfloat16: 3e-2}
types = pytest.mark.parametrize("dtype", list(TOLERANCE))


def close(found, expected):
    torch.testing.assert_close(found, expected, rtol=TOLERANCE[expected.dtype], atol=TOLERANCE[expected.dtype])


@types
def test_norms_and_activations(dtype):
    torch.manual_seed(0)
    x, residual, weight = torch.randn(5, 64).to(dtype), torch.randn(5, 64).to(dtype), torch.rand(64).to(dtype)
    close(cpu_ops.rms_norm(x, weight, 1e-5), reference.rms_norm(x, weight, 1e-5))
    mine, theirs = residual.clone(), residual.clone()
    close(cpu_ops.add_rms_norm(x, mine, weight, 1e-5), reference.add_rms_norm(x, theirs, weight, 1e-5))
    close(mine, theirs)
    product = torch.randn(96, 64).to(dtype) / 8
    close(cpu_ops.linear_silu_mul(x, product), reference.linear_silu_mul(x, product))
    ids = torch.tensor([3, 40, 95, 2], dtype=torch.int32)
    close(cpu_ops.embedding(ids, product, start=3), reference.embedding(ids, product, start=3))


@types
@pytest.mark.parametrize("options", [{}, {"window": 7}, {"softcap": 5.0}])
def test_cache_writes_and_decode(dtype, options):
    torch.manual_seed(1)
    heads, kv_heads, dim, size, rows = 6, 2, 16, 16, 4
    caches = [torch.randn(12, kv_heads, size, dim).to(dtype) for _ in range(2)]
    others = [cache.clone() for cache in caches]
    qkv, norm = torch.randn(3, (heads + 2 * kv_heads) * dim).to(dtype), torch.rand(dim).to(dtype)
    table = torch.randperm(11)[: rows * 2].add(1).view(rows, 2).int()
    angles, positions, slots = torch.randn(64, dim), torch.tensor([5, 30, 0], dtype=torch.int32), torch.tensor([37, -1, 90])
    late = {"residual": torch.randn(3, 24).to(dtype) + 2, "bias": torch.randn(qkv.shape[1]).to(dtype)}
    for norms, options_of_rope in (((None, None), {}), ((None, None), late), ((norm, norm), late), ((norm, norm), {})):
        arguments = (qkv, angles, positions, slots)
        found = cpu_ops.rope_and_write_kv(*arguments, *caches, heads, kv_heads, dim, *norms, **options_of_rope)
        close(found, reference.rope_and_write_kv(*arguments, *others, heads, kv_heads, dim, *norms, **options_of_rope))
        for mine, theirs in zip(caches, others):
            close(mine, theirs)
    picked, lens = torch.tensor([2, 0, 3], dtype=torch.int32), torch.tensor([17, 0, 32], dtype=torch.int32)
    found = cpu_ops.paged_decode(found, *caches, table, picked, lens, 0.25, **options)
    query = reference.rope_and_write_kv(*arguments, *others, heads, kv_heads, dim, norm, norm)
    close(found, reference.paged_decode(query, *others, table, picked, lens, 0.25, **options))
    lens = torch.tensor([17, -1, 32], dtype=torch.int32)  # the second place is another's
    taken = cpu_ops.paged_decode(query, *caches, table, picked, lens, 0.25, out=torch.full_like(query, 7.0), **options)
    close(taken[::2], found[::2])
    assert (taken[1] == 7.0).all()


@pytest.mark.parametrize("spread", [0.1, 1.0, 6.0])
def test_sampling_is_exact(spread):
    """Pruned noise must never change a token, however flat the logits are."""
    torch.manual_seed(2)
    count, vocab = 24, 3001
    logits = torch.randn(count, vocab) * spread
    logits[3, 5] = float("nan")
    arguments = (
        torch.linspace(0, 1.5, count), torch.tensor([0, 1, 40] * 8, dtype=torch.int32), torch.tensor([1.0, 0.7] * 12),
        torch.tensor([0.0, 0.0, 0.0, 0.05] * 6), torch.randint(-(1 << 62), 1 << 62, (count,)),
        torch.arange(count, dtype=torch.int32) % 3, torch.arange(count, dtype=torch.int32) * 7,
    )
    assert torch.equal(cpu_ops.sample(logits, *arguments), reference.sample(logits, *arguments))
    off = (torch.zeros(count, dtype=torch.int32), torch.ones(count), torch.zeros(count))
    plain = (arguments[0], *off, *arguments[4:])
    assert torch.equal(cpu_ops.sample(logits, *plain), reference.sample(logits, *plain))
