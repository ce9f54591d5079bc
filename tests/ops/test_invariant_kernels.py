"""What an operator gives for a row is the same, bit for bit, alone and in company."""

import pytest
import torch
from ops import paged_case

from pagecast_kernels import reference
from pagecast_kernels.invariant import InvariantDecode, invariant_linear


@pytest.mark.parametrize(("columns", "depth"), [(100, 96), (64, 200)])
def test_a_product_s_row_does_not_depend_on_the_others(columns: int, depth: int) -> None:
    g = torch.Generator().manual_seed(depth)
    x, weight = torch.randn(300, depth, generator=g), torch.randn(columns, depth, generator=g)
    bias = torch.randn(columns, generator=g)
    whole = invariant_linear(x, weight, bias)
    assert paged_case.relative_error(whole, reference.linear(x.double(), weight.double(), bias.double())) < 1e-5
    # The interpreter's products depend on a row's place in its tile, as a GPU's do not (tests/worker/test_torch_gpu.py).
    for rows in (slice(0, 1), slice(0, 7), slice(0, 200), slice(128, 129), slice(256, 300)):
        assert torch.equal(invariant_linear(x[rows].contiguous(), weight, bias), whole[rows])


def test_a_decode_is_the_prefill_of_one_token() -> None:
    lens = [1, 33, 64, 90, 0, 0]
    case = paged_case.make(2, lens, [1] * len(lens), 4, 2, 64, 16)
    tables = (case.block_table, case.rows, case.seq_lens)
    whole = InvariantDecode()(case.q, case.k_cache, case.v_cache, *tables, 0.1)
    exact = case.to(torch.float64)
    assert paged_case.relative_error(whole, reference.paged_decode(exact.q, exact.k_cache, exact.v_cache, *tables, 0.1)) < 1e-5
    for n in range(4):
        own = (case.rows[n : n + 1], case.seq_lens[n : n + 1])
        alone = InvariantDecode()(case.q[n : n + 1], case.k_cache, case.v_cache, case.block_table, *own, 0.1)
        assert torch.equal(alone, whole[n : n + 1])
