"""A cache of e4m3 with a scale for each KV head: written by the rope kernel, read by both attention kernels, against float64."""

import pytest
import torch
from ops import paged_case

from pagecast_kernels import decode, prefill, reference, rope

FP8 = torch.float8_e4m3fn
LENS = [1, 15, 17, 0, 64, 130]


def make(query_lens: list[int], lens: list[int], dim: int) -> tuple[paged_case.PagedCase, dict[str, torch.Tensor]]:
    case = paged_case.make(dim, lens, query_lens, 6, 2, dim, 16, torch.float16)
    scales = {"k_scale": torch.tensor([0.01, 0.004]), "v_scale": torch.tensor([0.02, 0.007])}
    pairs = zip((case.k_cache, case.v_cache), scales.values(), strict=True)
    caches = [(cache.float() / scale.view(1, -1, 1, 1)).to(FP8) for cache, scale in pairs]
    return paged_case.PagedCase(case.q, *caches, case.block_table, case.rows, case.seq_lens, case.starts), scales


@pytest.mark.parametrize(("dim", "options"), [(64, {}), (96, {"window": 20}), (128, {"softcap": 5.0})])
def test_decode(dim: int, options: dict[str, float]) -> None:
    case, scales = make([1] * len(LENS), LENS, dim)
    tables = (case.block_table, case.rows, case.seq_lens, dim**-0.5)
    got = torch.full_like(case.q, float("nan"))
    decode.paged_decode(case.q, case.k_cache, case.v_cache, *tables, out=got, **options, **scales)
    want = reference.paged_decode(case.q.double(), case.k_cache, case.v_cache, *tables, **options, **scales)
    assert paged_case.relative_error(got, want) < 2e-3
    ones = {name: torch.ones(2) for name in scales}
    unscaled = reference.paged_decode(case.q.double(), case.k_cache, case.v_cache, *tables, **options, **ones)
    assert paged_case.relative_error(unscaled, want) > 0.1


@pytest.mark.parametrize(("dim", "options"), [(64, {}), (128, {"window": 20})])
def test_prefill(dim: int, options: dict[str, float]) -> None:
    case, scales = make([1, 9, 17, 0, 30, 70], LENS, dim)
    tables = (case.block_table, case.rows, case.starts, case.seq_lens, dim**-0.5)
    got = torch.full_like(case.q, float("nan"))
    prefill.paged_prefill(case.q, case.k_cache, case.v_cache, *tables, max_query_len=70, out=got, **options, **scales)
    want = reference.paged_prefill(case.q.double(), case.k_cache, case.v_cache, *tables, max_query_len=70, **options, **scales)
    assert paged_case.relative_error(got, want) < 2e-3


@pytest.mark.parametrize("scaled", [False, True])
def test_rope_writes_what_the_twin_writes(scaled: bool) -> None:
    """Of rows that were normed, and of rows that are to be scaled for it."""
    generator = torch.Generator().manual_seed(3)
    qkv = torch.randn(5, 10 * 64, generator=generator).half()
    qkv[0] *= 1000  # out of range once divided
    angle = torch.randn(32, 32, generator=generator)
    args = (torch.cat((angle.cos(), angle.sin()), 1), torch.arange(5, dtype=torch.int32), torch.tensor([3, 20, -1, 7, 40]))
    scales = {"k_scale": torch.tensor([0.01, 0.5]), "v_scale": torch.tensor([2.0, 0.25])}
    caches = [[torch.zeros(3, 2, 16, 64).to(FP8) for _ in range(2)] for _ in range(2)]
    if scaled:
        scales["residual"] = torch.randn(5, 100, generator=generator).half() * 2
    q = rope.rope_and_write_kv(qkv, *args, *caches[0], 6, 2, 64, **scales)
    want = reference.rope_and_write_kv(qkv, *args, *caches[1], 6, 2, 64, **scales)
    assert torch.allclose(q.float(), want.float(), atol=2e-2, rtol=2e-3)
    for got, expected in zip(*caches, strict=True):
        got, expected = got.float(), expected.float()
        assert bool(got.isfinite().all()) and float(expected.abs().amax()) == 448.0
        # Neighbours of e4m3 differ by an eighth or less; the interpreter forgets the carry into the next power of two.
        assert float(((got - expected).abs() <= expected.abs() * 0.13 + 0.01).float().mean()) > 0.97
        assert torch.equal(got == 0, expected == 0) or float(((got == 0) != (expected == 0)).float().mean()) < 0.01


def test_copy_blocks_of_the_twin() -> None:
    k, v = (torch.arange(3.0).view(3, 1, 1, 1).expand(3, 2, 16, 64).contiguous().to(FP8) for _ in range(2))
    reference.copy_blocks(k, v, torch.tensor([1]), torch.tensor([2]))
    assert k.float()[:, 0, 0, 0].tolist() == v.float()[:, 1, 3, 5].tolist() == [0.0, 1.0, 1.0]
