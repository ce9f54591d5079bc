"""Paged attention in the interpreter against float64, over head sizes, group sizes, ragged lengths and page edges."""

import pytest
import torch
from ops import paged_case

from pagecast_kernels import configs, decode, prefill, reference

SHAPES = [  # query heads, KV heads, head size, block size
    (4, 4, 64, 16), (6, 2, 64, 16), (8, 2, 128, 32), (8, 1, 128, 16), (4, 1, 96, 16), (2, 1, 256, 32), (3, 1, 64, 128), (9, 3, 64, 64),
]  # fmt: skip
LENS = [1, 15, 16, 17, 0, 63, 64, 65, 130]


def decode_both(case: paged_case.PagedCase, scale: float, **options: object) -> tuple[torch.Tensor, torch.Tensor]:
    exact = case.to(torch.float64)
    args = ("block_table", "rows", "seq_lens")
    tables = [getattr(case, name) for name in args]
    got = torch.full_like(case.q, float("nan"))
    decode.paged_decode(case.q, case.k_cache, case.v_cache, *tables, scale, out=got, **options)
    options.pop("config", None)
    return got, reference.paged_decode(exact.q, exact.k_cache, exact.v_cache, *tables, scale, **options)


@pytest.mark.parametrize(("heads", "kv_heads", "dim", "size"), SHAPES)
def test_decode_equals_float64(heads: int, kv_heads: int, dim: int, size: int) -> None:
    case = paged_case.make(heads * dim, LENS, [1] * len(LENS), heads, kv_heads, dim, size)
    got, want = decode_both(case, dim**-0.5)
    assert paged_case.relative_error(got, want) < 1e-5
    assert not got[LENS.index(0)].any()


@pytest.mark.parametrize("options", [{"window": 20}, {"window": 1}, {"softcap": 5.0}, {"window": 70, "softcap": 2.0}])
def test_decode_window_and_softcap(options: dict[str, float]) -> None:
    case = paged_case.make(3, LENS, [1] * len(LENS), 4, 2, 64, 16)
    got, want = decode_both(case, 0.2, **options)
    assert paged_case.relative_error(got, want) < 1e-5


@pytest.mark.parametrize("programs", [1, 2, 7, 12])
def test_decode_is_the_same_however_the_work_is_cut(programs: int) -> None:
    """One or two programs have a queue here, more do not."""
    lens = [300, 1, 0, 77, 500]
    case = paged_case.make(5, lens, [1] * len(lens), 6, 2, 64, 16)
    work = decode.decode_workspace(5, 6, 2, 64, "cpu")
    got, want = decode_both(case, 0.125, config=configs.Decode(tile=32, warps=4, stages=2, programs=programs), workspace=work)
    assert not work.counters.any()
    assert paged_case.relative_error(got, want) < 1e-5


def test_decode_workspace_can_be_used_again() -> None:
    work = decode.decode_workspace(8, 4, 2, 64, "cpu")
    for seed, lens in enumerate(([200, 3], [1], [64, 64, 64], [0, 500])):
        case = paged_case.make(seed, lens, [1] * len(lens), 4, 2, 64, 16)
        got, want = decode_both(case, 0.125, workspace=work)
        assert paged_case.relative_error(got, want) < 1e-5
        assert not work.counters.any()


def test_decode_of_many_short_rows() -> None:
    g = torch.Generator().manual_seed(1)
    lens = torch.randint(0, 9, (1024,), generator=g).tolist()
    case = paged_case.make(9, lens, [1] * len(lens), 1, 1, 64, 16)
    got, want = decode_both(case, 0.125, config=configs.Decode(tile=16, warps=4, stages=2, programs=12))
    assert paged_case.relative_error(got, want) < 1e-5


def test_decode_refuses_a_workspace_that_is_too_small() -> None:
    case = paged_case.make(1, [3, 3], [1, 1], 4, 2, 64, 16)
    work = decode.decode_workspace(1, 4, 2, 64, "cpu")
    with pytest.raises(ValueError, match=r"for 2 \(sequence, KV head\) pairs and \d+ programs, the launch needs 4 and"):
        decode_both(case, 0.125, workspace=work)


def prefill_both(case: paged_case.PagedCase, scale: float, **options: object) -> tuple[torch.Tensor, torch.Tensor]:
    exact = case.to(torch.float64)
    tables = [case.block_table, case.rows, case.starts, case.seq_lens]
    longest = int(case.starts.diff().max())
    got = torch.full_like(case.q, float("nan"))
    prefill.paged_prefill(case.q, case.k_cache, case.v_cache, *tables, scale, max_query_len=longest, out=got, **options)
    options.pop("config", None)
    return got, reference.paged_prefill(exact.q, exact.k_cache, exact.v_cache, *tables, scale, max_query_len=longest, **options)


CHUNKS = [(1, 1), (17, 17), (64, 5), (65, 65), (0, 0), (130, 1), (100, 40), (33, 32)]  # (seq_len, query_len)


@pytest.mark.parametrize(("heads", "kv_heads", "dim", "size"), SHAPES)
def test_prefill_equals_float64(heads: int, kv_heads: int, dim: int, size: int) -> None:
    lens, query_lens = [list(x) for x in zip(*CHUNKS)]
    case = paged_case.make(heads + dim, lens, query_lens, heads, kv_heads, dim, size)
    got, want = prefill_both(case, dim**-0.5)
    assert paged_case.relative_error(got, want) < 1e-5


@pytest.mark.parametrize("options", [{"window": 20}, {"window": 1}, {"softcap": 5.0}, {"window": 70, "softcap": 2.0}, {"window": 33}])
def test_prefill_window_and_softcap(options: dict[str, float]) -> None:
    lens, query_lens = [list(x) for x in zip(*CHUNKS)]
    case = paged_case.make(3, lens, query_lens, 4, 2, 64, 16)
    got, want = prefill_both(case, 0.2, config=configs.Prefill(rows=32, tile=16, warps=4, stages=2), **options)
    assert paged_case.relative_error(got, want) < 1e-5


def test_prefill_leaves_tokens_of_no_sequence_alone() -> None:
    case = paged_case.make(3, [20, 9], [20, 9], 4, 2, 64, 16)
    padded = torch.cat((case.q, torch.randn(13, 4, 64)))
    out = torch.full_like(padded, 7.0)
    starts = torch.cat((case.starts, case.starts[-1:].expand(2)))
    rows, lens = torch.cat((case.rows, case.rows)), torch.cat((case.seq_lens, torch.zeros(2, dtype=torch.int32)))
    prefill.paged_prefill(padded, case.k_cache, case.v_cache, case.block_table, rows, starts, lens, 0.125, max_query_len=42, out=out)
    assert (out[29:] == 7.0).all()
    _, want = prefill_both(case, 0.125)
    assert paged_case.relative_error(out[:29], want) < 1e-5


def test_prefill_leaves_tokens_before_the_first_sequence_alone() -> None:
    """As in a step whose decoding rows come first: far more tokens in front than the chunks have."""
    case = paged_case.make(4, [70, 9], [5, 3], 4, 2, 64, 16)
    padded = torch.cat((torch.randn(150, 4, 64), case.q))
    out = torch.full_like(padded, 7.0)
    tables = (case.block_table, case.rows, case.starts + 150, case.seq_lens)
    config = configs.Prefill(rows=32, tile=16, warps=4, stages=2)
    prefill.paged_prefill(padded, case.k_cache, case.v_cache, *tables, 0.125, max_query_len=5, out=out, config=config)
    assert (out[:150] == 7.0).all()
    _, want = prefill_both(case, 0.125)
    assert paged_case.relative_error(out[150:], want) < 1e-5
