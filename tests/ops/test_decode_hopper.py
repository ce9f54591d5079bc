"""Which decodes go to the warp-specialised kernel, with which list of tiles; and, on a Hopper GPU, its numbers."""

import dataclasses
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from ops import paged_case

pytest.importorskip("triton.experimental.gluon")

from pagecast_kernels import configs, decode_flat, decode_hopper, reference

ROOT = Path(__file__).parents[2]


def cached(heads: int = 8, dim: int = 128, size: int = 16, dtype: torch.dtype = torch.bfloat16) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.zeros((3, heads, dim), dtype=dtype), torch.zeros((4, 2, size, dim), dtype=dtype)


@pytest.mark.parametrize("shape", [{}, {"heads": 32}, {"heads": 2}, {"dim": 64}, {"size": 8}, {"size": 128}, {"dtype": torch.float16}])
def test_what_suits(shape: dict) -> None:
    assert decode_hopper.suits(*cached(**shape))


@pytest.mark.parametrize(
    "shape", [{"heads": 64}, {"dim": 32}, {"dim": 256}, {"size": 4}, {"dim": 64, "size": 8}, {"size": 256}, {"dtype": torch.float32}]
)
def test_what_does_not(shape: dict) -> None:
    assert not decode_hopper.suits(*cached(**shape))


def test_a_soft_cap_or_another_cache_does_not_suit() -> None:
    q, cache = cached()
    assert not decode_hopper.suits(q, cache, 30.0)
    assert not decode_hopper.suits(q, cache.to(torch.float8_e4m3fn))


Taken = list[tuple[decode_flat.TileList, configs.HopperDecode]]


@pytest.fixture
def taken(monkeypatch: pytest.MonkeyPatch) -> Taken:
    """What the kernel is launched with, on a machine that looks like a Hopper GPU."""
    calls: Taken = []
    monkeypatch.setattr(decode_hopper, "launch", lambda *args: calls.append((args[5], args[8])) or args[7])
    monkeypatch.setattr(configs, "is_hopper", lambda device: True)
    return calls


def attend(case: paged_case.PagedCase, work: decode_flat.StepWorkspace, **looks: float) -> torch.Tensor:
    tables, out = (case.block_table, case.rows, case.seq_lens), torch.full_like(case.q, float("nan"))
    assert decode_flat.paged_decode(case.q, case.k_cache, case.v_cache, *tables, 0.1, workspace=work, out=out, **looks) is out
    return out


def test_a_hopper_gpu_takes_few_sequences_that_suit(taken: Taken) -> None:
    """And everything else stays where it was, on the same workspace."""
    case = paged_case.make(1, [5, 0, 40], [1] * 3, 32, 2, 128, 16, torch.float16)
    work = decode_flat.step_workspace(65, 32, 2, 128, "cpu")
    attend(case, work)
    ((tiles, config),) = taken
    assert tiles.tile == config.tile and tiles.count.item() == 2
    assert attend(case, work, softcap=20.0).isfinite().all()
    assert attend(case, work, window=8).isfinite().all()
    assert attend(paged_case.make(1, [3] * 65, [1] * 65, 32, 2, 128, 16, torch.float16), work).isfinite().all()
    assert len(taken) == 1


def test_steps_of_one_workspace_may_differ_in_their_tile(taken: Taken, monkeypatch: pytest.MonkeyPatch) -> None:
    """Few sequences, then many, then the few again as a graph replays them, and layers of one step that go two ways."""
    taken_few = configs.HopperDecode(tile=128, depth=1, programs=3, registers=144)
    monkeypatch.setattr(configs, "decode_hopper", lambda batch, *_: taken_few if batch < 33 else None)
    few, many = (paged_case.make(2, lens, [1] * len(lens), 6, 2, 64, 16, torch.float16) for lens in ([200, 70], [100] * 33))
    work = decode_flat.step_workspace(33, 6, 2, 64, "cpu")
    exact = many.to(torch.float64)
    want = reference.paged_decode(exact.q, exact.k_cache, exact.v_cache, many.block_table, many.rows, many.seq_lens, 0.1)
    for _ in range(2):
        attend(few, work)
        tiles, config = taken[-1]
        assert tiles.tile == config.tile == 128
        assert tiles.tiles[: tiles.count.item()].tolist() == [[0, 0, 2, 200], [0, 0, 2, 72], [1, 2, 1, 70]]
        assert paged_case.relative_error(attend(many, work), want) < 6e-3
        assert attend(few, work, softcap=20.0).isfinite().all()
        assert taken[-1][0].count.item() == 3  # the list that the graph's launches hold was left alone
    assert len(taken) == 2


def test_the_layer_that_makes_the_list_does_not_read_it_ahead(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its launch follows the one that writes the list; those of the step's other layers come later. Steps that differ in their tile have
    a list each."""
    ahead: list[bool] = []
    monkeypatch.setattr(decode_hopper, "launch", lambda *args: ahead.append(args[9]) or args[7])
    monkeypatch.setattr(configs, "is_hopper", lambda device: True)
    one, other = (paged_case.make(4, [5, 40], [1] * 2, 8, 2, 128, 16, torch.float16) for _ in range(2))
    work = decode_flat.step_workspace(2, 8, 2, 128, "cpu")
    for case in (one, one, one, other, other, one):
        attend(case, work)
    config = configs.decode_hopper(2, 2, 4, 128, 16, "cpu")
    assert config
    monkeypatch.setattr(configs, "decode_hopper", lambda *_: dataclasses.replace(config, tile=128))
    attend(one, work)
    attend(one, work)
    assert ahead == [False, True, True, False, True, False, False, True]


@pytest.mark.parametrize(("processors", "even"), [(132, 128), (114, 114), (78, 78)])
def test_equal_sequences_fall_in_equal_parts(monkeypatch: pytest.MonkeyPatch, processors: int, even: int) -> None:
    monkeypatch.setattr(configs, "processors", lambda device: processors)
    few = [configs.decode_hopper(1, kv_heads, 4, dim, 16, "cpu") for kv_heads, dim in ((8, 128), (5, 128), (3, 64))]
    assert [config and config.programs for config in few] == [even, processors, processors]


def test_many_sequences_are_shared_by_head_where_that_is_faster(monkeypatch: pytest.MonkeyPatch) -> None:
    """And what would spill stays with the other kernel."""
    monkeypatch.setattr(configs, "processors", lambda device: 132)
    shapes = ((17, 8, 4, 16, 128), (256, 8, 4, 64, 128), (1000, 3, 3, 16, 64), (65, 2, 7, 128, 64), (5, 32, 1, 16, 128))
    for batch, kv_heads, group, size, dim in shapes:
        cache = torch.empty((9, kv_heads, size, dim), dtype=torch.bfloat16)
        config = decode_hopper.launch_for(torch.empty((batch, group * kv_heads, dim), dtype=torch.bfloat16), cache)
        assert config and config.by_head and config.programs == 396 // kv_heads * kv_heads
    q = torch.empty((512, 32, 128), dtype=torch.bfloat16)
    for shape, softcap in (((9, 8, 16, 128), 30.0), ((9, 8, 8, 128), 0.0), ((9, 2, 16, 128), 0.0)):
        assert decode_hopper.launch_for(q, torch.empty(shape, dtype=q.dtype), softcap) is None
    few = {n: decode_hopper.launch_for(q[:n], torch.empty((9, 8, 16, 128), dtype=q.dtype)) for n in (3, 8, 16)}
    assert [config and (config.by_head, config.programs) for config in few.values()] == [(False, 128)] * 3


def test_a_hopper_gpu_takes_many_sequences_that_suit(taken: Taken) -> None:
    case = paged_case.make(3, [1, 70, 0, 130] * 16, [1] * 64, 32, 8, 128, 16, torch.float16)
    attend(case, decode_flat.step_workspace(64, 32, 8, 128, "cpu"))
    ((tiles, config),) = taken
    assert config.by_head and tiles.tile == config.tile == 64 and tiles.count.item() == 6 * 16


@pytest.mark.skipif(not torch.cuda.is_available() or torch.cuda.get_device_capability() != (9, 0), reason="needs a Hopper GPU")
@pytest.mark.timeout(600)
def test_numbers_on_a_hopper_gpu() -> None:
    """In a process of its own: the interpreter is chosen in this one, and a fault could hang it."""
    env = {key: value for key, value in os.environ.items() if key != "TRITON_INTERPRET"}
    command = [sys.executable, str(ROOT / "kernels/gpu_check.py"), "--parts", "hopper"]
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=500)
    assert done.returncode == 0 and "decode_hopper" in done.stdout, done.stdout + done.stderr
