"""Decode over a list of tiles, in the interpreter, against float64: however the list is cut, and with sequences of any length."""

from dataclasses import replace

import pytest
import torch
from ops import paged_case
from ops.flat_decode import both

from pagecast_kernels import configs, decode_flat

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


@pytest.mark.parametrize(("programs", "kv_heads"), [(1, 2), (5, 2), (12, 3)])
def test_flat_decode_over_bytes_equals_float64(programs: int, kv_heads: int) -> None:
    case = paged_case.make(programs, LENS, [1] * len(LENS), 2 * kv_heads, kv_heads, 128, 16).to(torch.float16)
    case = replace(case, k_cache=case.k_cache.to(torch.float8_e4m3fn), v_cache=case.v_cache.to(torch.float8_e4m3fn))
    scales = (torch.rand(kv_heads) + 0.5, torch.rand(kv_heads) + 0.5)
    launch = configs.Decode(tile=32, warps=4, stages=2, programs=programs)
    got, want = both(case, launch, softcap=20.0 if programs == 5 else 0.0, scales=scales)
    assert paged_case.relative_error(got, want) < 2e-3
    assert not got[LENS.index(0)].any()


def test_bytes_take_the_list_where_they_have_a_launch(monkeypatch: pytest.MonkeyPatch) -> None:
    launch, ones = configs.Decode(tile=64, warps=2, stages=3, programs=4), torch.ones(8)
    many, few = torch.zeros(64, 32, 128), torch.zeros(8, 32, 128)
    cache = torch.zeros(1, 8, 16, 128)
    for bytes_launch in (None, launch):
        monkeypatch.setattr(configs, "BYTES", bytes_launch)
        assert decode_flat.suits(many, cache, 0, ones) == (bytes_launch is not None)
        assert not decode_flat.suits(few, cache, 0, ones) and decode_flat.suits(few, cache)
    assert configs.decode_bytes(64, 8, 128, "cpu") == replace(launch, programs=12)
