"""Places of a batch that are padding: of length 0 they get zeros, of length -1 they are somebody else's and stay as they are."""

from collections.abc import Callable

import pytest
import torch
from ops import paged_case
from torch import Tensor

from pagecast_kernels import decode, decode_flat, invariant, latent, reference

LENS = [5, 0, 40, 0, 1, 70, 0]
LEFT = [3, 6]
"""Of those without tokens, the ones whose place is another's."""


def _decodes(case: paged_case.PagedCase, out: Tensor) -> dict[str, Callable[[], Tensor]]:
    args = (case.q, case.k_cache, case.v_cache, case.block_table, case.rows, case.seq_lens, 0.1)
    work = decode_flat.step_workspace(len(LENS), 4, 2, 64, "cpu")
    return {
        "twin": lambda: reference.paged_decode(*args, out=out), "decode": lambda: decode.paged_decode(*args, out=out),
        "window": lambda: decode.paged_decode(*args, window=16, out=out),
        "flat": lambda: decode_flat.paged_decode(*args, workspace=work, out=out),
    }  # fmt: skip


@pytest.mark.parametrize("name", ["twin", "decode", "window", "flat"])
def test_decode_leaves_the_places_of_others(name: str) -> None:
    case = paged_case.make(5, LENS, [1] * len(LENS), 4, 2, 64, 16)
    exact = case.to(torch.float64)
    looks = {"window": 16} if name == "window" else {}
    want = reference.paged_decode(exact.q, exact.k_cache, exact.v_cache, case.block_table, case.rows, case.seq_lens, 0.1, **looks)
    case.seq_lens[LEFT] = -1
    out = torch.full_like(case.q, 7.0)
    _decodes(case, out)[name]()
    assert (out[LEFT] == 7.0).all() and not out[1].any()
    rest = [n for n in range(len(LENS)) if n not in LEFT]
    assert paged_case.relative_error(out[rest], want[rest]) < 1e-5


@pytest.mark.parametrize("attend", [reference.latent_decode, latent.latent_decode], ids=["twin", "kernel"])
def test_latent_decode_leaves_them_too(attend: Callable[..., Tensor]) -> None:
    case = paged_case.make(5, LENS, [1] * len(LENS), 4, 1, 48, 16)
    q = (case.q[..., :32].contiguous(), case.q[..., 32:].contiguous())
    caches = (case.k_cache[..., :16].contiguous(), case.v_cache[..., :32].contiguous())
    tables = (case.block_table, case.rows, case.seq_lens, 0.2)
    want = reference.latent_decode(*q, *caches, *tables)
    case.seq_lens[LEFT] = -1
    out = torch.full_like(q[0], 7.0)
    attend(*q, *caches, *tables, out=out)
    assert (out[LEFT] == 7.0).all() and not out[1].any()
    rest = [n for n in range(len(LENS)) if n not in LEFT]
    assert paged_case.relative_error(out[rest], want[rest]) < 1e-5


def test_invariant_decode_writes_where_there_are_tokens_alone() -> None:
    lens = [5, 40, 1, 0, 0]  # its padding comes last
    case = paged_case.make(5, lens, [1] * len(lens), 4, 2, 64, 16)
    tables = (case.block_table, case.rows, case.seq_lens, 0.1)
    want = reference.paged_decode(case.q, case.k_cache, case.v_cache, *tables)
    case.seq_lens[3:] = -1
    out = torch.full_like(case.q, 7.0)
    invariant.InvariantDecode()(case.q, case.k_cache, case.v_cache, *tables, out=out)
    assert (out[3:] == 7.0).all() and paged_case.relative_error(out[:3], want[:3]) < 1e-5
