"""Every family's forward pass with the Triton operators, in the interpreter, beside the CPU's: a chunk, a step alone, a step of two."""

import os

os.environ.setdefault("TRITON_INTERPRET", "1")

import pytest
import torch
from worker.family_model import Forward, executor_for, write_family

from pagecast_worker.backend import cuda_operators
from pagecast_worker.models.registry import architectures

def logits(executor, length: int) -> list[torch.Tensor]:
    forward = Forward(executor)
    return [forward.chunk([(37 * i) % 150 + 3 for i in range(length)]), forward.decode(5), forward.chunk([7, 11]), forward.decode(9)]


@pytest.mark.parametrize("name", sorted(architectures()))
def test_kernels_compute_what_the_cpu_computes(tmp_path, monkeypatch, name):
    """With windows the context is longer than a kernel's tile, so that tiles before the window are left out."""
    windowed = "sliding_window" in architectures()[name].example
    folder, _ = write_family(name, tmp_path, **({"sliding_window": 6} if windowed else {}))
    executor = executor_for(folder)
    length = 80 if windowed else 13
    expected = logits(executor, length)
    monkeypatch.setattr(executor, "ops", cuda_operators(executor.config, executor.model, torch.device("cpu")))
    for got, want in zip(logits(executor, length), expected, strict=True):
        torch.testing.assert_close(got, want, rtol=0, atol=1e-4)
