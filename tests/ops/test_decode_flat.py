"""Decode over a list of tiles, in the interpreter, against float64: however the list is cut, and with sequences of any length."""

import pytest
import torch
from ops import paged_case

from pagecast_kernels import configs, decode, decode_flat, reference

LENS = [1, 15, 16, 17, 0, 63, 64, 65, 130, 0, 200]


def both(case: paged_case.PagedCase, config: configs.Decode, softcap: float = 0.0) -> tuple[torch.Tensor, torch.Tensor]:
    (batch, heads, dim), (kv_heads, size) = case.q.shape, case.k_cache.shape[1:3]
    work = decode.decode_workspace(batch, heads, kv_heads, dim, "cpu")
    tables = (case.block_table, case.rows, case.seq_lens)
    tiles = decode_flat.tile_list(batch, case.block_table.shape[1], size, config.tile, "cpu")
    decode_flat.list_tiles(tiles, *tables, size)
    got = torch.full_like(case.q, float("nan"))
    decode_flat.launch(case.q, case.k_cache, case.v_cache, case.seq_lens, 0.1, softcap, tiles, work, got, config)
    assert not work.counters.any()
    exact = case.to(torch.float64)
    return got, reference.paged_decode(exact.q, exact.k_cache, exact.v_cache, *tables, 0.1, softcap=softcap)


@pytest.mark.parametrize("programs", [1, 2, 7, 12])
@pytest.mark.parametrize(("heads", "kv_heads", "dim", "size"), [(4, 2, 64, 16), (3, 1, 64, 128), (4, 1, 96, 16), (9, 3, 64, 64)])
def test_flat_decode_equals_float64(heads: int, kv_heads: int, dim: int, size: int, programs: int) -> None:
    case = paged_case.make(dim + programs, LENS, [1] * len(LENS), heads, kv_heads, dim, size)
    got, want = both(case, configs.Decode(tile=32, warps=4, stages=2, programs=programs), softcap=20.0 if programs == 7 else 0.0)
    assert paged_case.relative_error(got, want) < 1e-5
    assert not got[LENS.index(0)].any()


def test_one_long_sequence_falls_to_many_programs() -> None:
    case = paged_case.make(3, [700], [1], 4, 2, 64, 16)
    got, want = both(case, configs.Decode(tile=16, warps=4, stages=2, programs=12))
    assert paged_case.relative_error(got, want) < 1e-5


def test_a_thousand_ragged_rows() -> None:
    lens = torch.randint(0, 9, (1024,), generator=torch.Generator().manual_seed(1)).tolist()
    case = paged_case.make(9, lens, [1] * len(lens), 1, 1, 64, 16)
    got, want = both(case, configs.Decode(tile=16, warps=4, stages=2, programs=12))
    assert paged_case.relative_error(got, want) < 1e-5


def test_a_batch_of_padding_gives_zeros() -> None:
    case = paged_case.make(3, [0, 0, 16], [1, 1, 1], 4, 2, 64, 16)
    case.seq_lens.zero_()
    got, _ = both(case, configs.Decode(tile=16, warps=4, stages=2, programs=3))
    assert not got.any()
