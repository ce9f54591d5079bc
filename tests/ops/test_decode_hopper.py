"""Which decodes go to the warp-specialised kernel, with which list of tiles; and, on a Hopper GPU, its numbers."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from ops import paged_case

pytest.importorskip("triton.experimental.gluon")

from pagecast_kernels import configs, decode_flat, decode_hopper

ROOT = Path(__file__).parents[2]


def cached(heads: int = 8, dim: int = 128, size: int = 16, dtype: torch.dtype = torch.bfloat16) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.zeros((3, heads, dim), dtype=dtype), torch.zeros((4, 2, size, dim), dtype=dtype)


@pytest.mark.parametrize("shape", [{}, {"heads": 32}, {"heads": 2}, {"dim": 64}, {"size": 8}, {"size": 128}, {"dtype": torch.float16}])
def test_what_suits(shape: dict) -> None:
    assert decode_hopper.suits(*cached(**shape))


@pytest.mark.parametrize("shape", [{"heads": 64}, {"dim": 32}, {"dim": 256}, {"size": 4}, {"size": 256}, {"dtype": torch.float32}])
def test_what_does_not(shape: dict) -> None:
    assert not decode_hopper.suits(*cached(**shape))


def test_a_soft_cap_or_another_cache_does_not_suit() -> None:
    q, cache = cached()
    assert not decode_hopper.suits(q, cache, 30.0)
    assert not decode_hopper.suits(q, cache.to(torch.float8_e4m3fn))


def test_a_hopper_gpu_takes_what_suits(monkeypatch: pytest.MonkeyPatch) -> None:
    """And everything else stays where it was, on the same workspace."""
    taken = []
    monkeypatch.setattr(decode_hopper, "launch", lambda *args: taken.append(args) or args[7])
    monkeypatch.setattr(configs, "is_hopper", lambda device: True)
    case = paged_case.make(1, [5, 0, 40], [1] * 3, 4, 2, 128, 16, torch.float16)
    work = decode_flat.step_workspace(3, 4, 2, 128, "cpu")
    args = (case.q, case.k_cache, case.v_cache, case.block_table, case.rows, case.seq_lens, 0.1)
    out = torch.empty_like(case.q)
    assert decode_flat.paged_decode(*args, workspace=work, out=out) is out
    (one,) = taken
    tiles, config = one[5], one[8]
    assert tiles.tile == config.tile and tiles.count.item() == 2 and one[6] is work.scratch
    decode_flat.paged_decode(*args, workspace=work, out=out, softcap=20.0)
    decode_flat.paged_decode(*args, workspace=work, out=out, window=8)
    assert len(taken) == 1 and bool(out.isfinite().all())


@pytest.mark.skipif(not torch.cuda.is_available() or torch.cuda.get_device_capability() != (9, 0), reason="needs a Hopper GPU")
@pytest.mark.timeout(600)
def test_numbers_on_a_hopper_gpu() -> None:
    """In a process of its own: the interpreter is chosen in this one, and a fault could hang it."""
    env = {key: value for key, value in os.environ.items() if key != "TRITON_INTERPRET"}
    command = [sys.executable, str(ROOT / "kernels/gpu_check.py"), "--parts", "hopper"]
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=500)
    assert done.returncode == 0 and "decode_hopper" in done.stdout, done.stdout + done.stderr
