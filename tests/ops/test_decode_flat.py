"""Decode over a list of tiles, in the interpreter, against float64: however the list is cut, and with sequences of any length."""

import pytest
import torch
from ops import paged_case
from ops.flat_decode import both

from pagecast_kernels import configs

LENS = [1, 15, 16, 17, 0, 63, 64, 65, 130, 0, 200]


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
