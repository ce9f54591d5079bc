"""Latent attention in the interpreter against float64: heads in one group and in two, ragged lengths, page edges, cut-up work."""

import pytest
import torch
from ops import paged_case

from pagecast_kernels import configs, latent, reference

RANK, ROPE = 32, 16
LENS = [1, 15, 16, 17, 0, 63, 64, 65, 130]


def case_of(seed: int, lens: list[int], query_lens: list[int], heads: int, size: int = 16):
    """(q_latent, q_rope, k_cache, v_cache, block_table, rows), seq_lens, starts: blocks scattered, NaN where nothing may look."""
    case = paged_case.make(seed, lens, query_lens, heads, 1, RANK + ROPE, size)
    k_cache, v_cache = case.k_cache[..., :ROPE].contiguous(), case.v_cache[..., :RANK].contiguous()
    q_latent, q_rope = case.q[..., :RANK].contiguous(), case.q[..., RANK:].contiguous()
    return (q_latent, q_rope, k_cache, v_cache, case.block_table, case.rows), case.seq_lens, case.starts


def exact(args):
    return tuple(x.double() if x.is_floating_point() else x for x in args)


@pytest.mark.parametrize("heads", [1, 6, 16, 80])
def test_decode_equals_float64(heads: int) -> None:
    args, lens, _ = case_of(heads, LENS, [1] * len(LENS), heads)
    got = latent.latent_decode(*args, lens, 0.2, out=torch.full_like(args[0], float("nan")))
    assert paged_case.relative_error(got, reference.latent_decode(*exact(args), lens, 0.2)) < 1e-5
    assert not got[LENS.index(0)].any()


@pytest.mark.parametrize("programs", [1, 2, 7, 12])
def test_decode_is_the_same_however_the_work_is_cut(programs: int) -> None:
    args, lens, _ = case_of(3, [300, 1, 0, 77, 500], [1] * 5, 16, 32)
    work = latent.latent_workspace(5, 16, RANK, "cpu")
    config = configs.LatentDecode(rows=16, tile=32, warps=4, stages=2, programs=programs)
    got = latent.latent_decode(*args, lens, 0.2, config=config, workspace=work)
    assert paged_case.relative_error(got, reference.latent_decode(*exact(args), lens, 0.2)) < 1e-5


@pytest.mark.parametrize(("heads", "lens_of_batch"), [(9, [100, 0, 200]), (16, [100, 0, 200]), (16, [70, 0, 130, 20, 1, 64, 300])])
def test_a_hopper_gpu_takes_what_suits(monkeypatch: pytest.MonkeyPatch, heads: int, lens_of_batch: list[int]) -> None:
    """Its kernel gets a list of tiles, and leaves parts where the other one would, which stands in for it here; of more than a few
    sequences it adds them up itself."""
    latent_hopper = pytest.importorskip("pagecast_kernels.latent_hopper")
    count = len(lens_of_batch)
    case = paged_case.make(heads, lens_of_batch, [1] * count, heads, 1, 576, 16, torch.float16)
    q, caches = case.q.split((512, 64), 2), (case.k_cache[..., :64].contiguous(), case.v_cache[..., :512].contiguous())
    args = (*(x.contiguous() for x in q), *caches, case.block_table, case.rows, case.seq_lens)
    work, calls = latent.latent_workspace(count, heads, 512, "cpu"), []

    def launch(q_latent, q_rope, k_cache, v_cache, seq_lens, scale, tiles, scratch, out, config, ahead) -> None:
        assert ahead == bool(calls)  # the first one's list was made in its own call
        calls.append(tiles)
        assert tiles.tile == config.tile == 64 and scratch is work.scratch
        assert tiles.count.item() == sum(-(-n // 64) for n in lens_of_batch)
        latent.latent_decode(*args, scale, out=out, workspace=work, config=configs.LatentDecode(16, 64, 4, 2, config.programs))
        assert bool(config.team) == (count > configs.LATENT_FEW)
        if config.team:
            scratch.parts.fill_(float("nan"))  # nobody adds them up again

    monkeypatch.setattr(latent_hopper, "launch", launch)
    monkeypatch.setattr(configs, "is_hopper", lambda device: True)
    want = reference.latent_decode(*exact(args), 0.1)
    for _ in range(2):
        got = latent.latent_decode(*args, 0.1, workspace=work, out=torch.full_like(args[0], float("nan")))
        assert paged_case.relative_error(got, want) < 2e-3
    assert len(calls) == 2
    small, lens, _ = case_of(heads, LENS, [1] * len(LENS), heads)
    assert latent.latent_decode(*small, lens, 0.2).isfinite().all() and len(calls) == 2, "latents of another size go the other way"


@pytest.mark.parametrize("heads", [2, 16, 80])
def test_prefill_equals_float64(heads: int) -> None:
    chunks = [(1, 1), (17, 17), (64, 5), (65, 65), (0, 0), (130, 1), (100, 40)]
    lens, query_lens = [list(x) for x in zip(*chunks)]
    args, seq_lens, starts = case_of(heads, lens, query_lens, heads)
    got = latent.latent_prefill(*args, starts, seq_lens, 0.2, max_query_len=65, out=torch.full_like(args[0], float("nan")))
    want = reference.latent_prefill(*exact(args), starts, seq_lens, 0.2, max_query_len=65)
    assert paged_case.relative_error(got, want) < 1e-5


def test_prefill_begins_where_the_first_sequence_does() -> None:
    args, seq_lens, starts = case_of(4, [20, 9], [20, 9], 4)
    q_latent, q_rope = (torch.cat((torch.randn(3, *q.shape[1:]), q)) for q in args[:2])
    out = torch.full_like(q_latent, 7.0)
    latent.latent_prefill(q_latent, q_rope, *args[2:], starts + 3, seq_lens, 0.2, max_query_len=20, out=out)
    assert (out[:3] == 7.0).all()
    assert paged_case.relative_error(out[3:], reference.latent_prefill(*exact(args), starts, seq_lens, 0.2, max_query_len=20)) < 1e-5


@pytest.mark.parametrize(("heads", "rank"), [(3, 32), (11, 24)])
def test_rope_and_write_equals_float64(heads: int, rank: int) -> None:
    g = torch.Generator().manual_seed(heads)
    q, kv = torch.randn((5, heads, 8 + ROPE), generator=g), torch.randn((5, 40 + rank + ROPE), generator=g)[:, 40:]
    norm, angles = torch.randn(rank, generator=g), torch.randn((64, ROPE), generator=g)
    positions, slots = torch.tensor([3, 0, 63, 8, 9], dtype=torch.int32), torch.tensor([40, 3, -1, 17, 18])
    made = []
    for ops, kind in ((latent, torch.float32), (reference, torch.float64)):
        caches = [torch.zeros((4, 1, 16, dim), dtype=kind) for dim in (ROPE, rank)]
        given = (q[..., 8:].to(kind), kv.to(kind), norm.to(kind), 1e-6, angles, positions, slots, *caches)
        made.append((ops.latent_rope_and_write(*given), *caches))
    for got, want in zip(*made):
        assert paged_case.relative_error(got, want) < 1e-5
