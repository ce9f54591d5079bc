"""Decode with shared leading blocks read once, in the interpreter, against float64 over each sequence's own table."""

import pytest
import torch
from ops import paged_case

from pagecast_kernels import configs, decode, reference, shared_prefix


def sharing(groups: list[tuple[list[int], int]], heads: int, kv_heads: int, batch: int, tables: torch.Tensor, rows: torch.Tensor):
    """SharedPrefixes of (members, tokens) groups, the places that are not used at the end; makes their tables begin alike."""
    skip, members, items = torch.zeros(batch, dtype=torch.int32), [], []
    most = shared_prefix.seqs_per_item(heads, kv_heads)
    for group, tokens in groups:
        for begin in range(0, len(group), most):
            part = group[begin : begin + most]
            items.append((len(members), len(part), tokens, int(rows[group[0]])))
            members += part
        skip[group] = tokens
    places = shared_prefix.max_items(batch, heads, kv_heads)
    items += [(0, 0, 0, 0)] * (places - len(items))
    members += [0] * (batch - len(members))
    as_int = lambda values: torch.tensor(values, dtype=torch.int32)
    return shared_prefix.SharedPrefixes(skip, as_int(members), as_int(items))


@pytest.mark.parametrize(("heads", "kv_heads", "dim", "size"), [(4, 2, 64, 16), (8, 2, 128, 32), (9, 3, 64, 16), (2, 1, 256, 16)])
def test_shared_decode_equals_float64(heads: int, kv_heads: int, dim: int, size: int) -> None:
    lens = [200, 65, 1, 0, 130, 97, 161, 80, 300]
    groups = [([0, 4, 6], 128), ([1, 7, 5], 64)]
    case = paged_case.make(dim, lens, [1] * len(lens), heads, kv_heads, dim, size)
    for group, tokens in groups:
        case.block_table[case.rows[group].long(), : tokens // size] = case.block_table[case.rows[group[0]].long(), : tokens // size]
    shared = sharing(groups, heads, kv_heads, len(lens), case.block_table, case.rows)
    tables = (case.block_table, case.rows, case.seq_lens, 0.1)
    work = shared_prefix.shared_workspace(len(lens), heads, kv_heads, dim, "cpu")
    exact = case.to(torch.float64)
    want = reference.paged_decode(exact.q, exact.k_cache, exact.v_cache, *tables)
    for config in (None, configs.Decode(tile=32, warps=4, stages=2, programs=7)):
        got = torch.full_like(case.q, float("nan"))
        shared_prefix.paged_decode_shared(case.q, case.k_cache, case.v_cache, *tables, shared, workspace=work, out=got, config=config)
        assert paged_case.relative_error(got, want) < 1e-5
        assert not work.scratch.counters.any()


def test_more_members_than_one_program_takes() -> None:
    lens = [40 + n % 7 for n in range(75)]
    case = paged_case.make(1, lens, [1] * len(lens), 8, 1, 64, 16)
    case.block_table[case.rows.long(), :2] = case.block_table[case.rows[0].long(), :2]
    shared = sharing([(list(range(75)), 32)], 8, 1, 75, case.block_table, case.rows)
    assert (shared.items[:, 1] > 0).sum() > 1
    tables = (case.block_table, case.rows, case.seq_lens, 0.1)
    exact = case.to(torch.float64)
    got = shared_prefix.paged_decode_shared(case.q, case.k_cache, case.v_cache, *tables, shared, softcap=20.0)
    want = reference.paged_decode(exact.q, exact.k_cache, exact.v_cache, *tables, softcap=20.0)
    assert paged_case.relative_error(got, want) < 1e-5


def test_a_window_is_refused() -> None:
    case = paged_case.make(1, [40], [1], 4, 1, 64, 16)
    results = decode.PrefixResults(torch.zeros(1), torch.zeros(1), torch.zeros(1), 1)
    with pytest.raises(ValueError, match="window of 8"):
        tables = (case.block_table, case.rows, case.seq_lens, 0.1)
        decode.paged_decode(case.q, case.k_cache, case.v_cache, *tables, window=8, prefix=results)
