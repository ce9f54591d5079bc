"""Every family's forward pass with the Triton operators, in the interpreter, beside the CPU's: a chunk, a step alone, a step of two."""

import os

os.environ.setdefault("TRITON_INTERPRET", "1")

import pytest
import torch
from worker.family_model import Forward, executor_for, write_family

from pagecast_worker.backend import cuda_operators
from pagecast_worker.models.registry import architectures

PROMPT = [(37 * i) % 150 + 3 for i in range(13)]


def logits(executor) -> list[torch.Tensor]:
    forward = Forward(executor)
    return [forward.chunk(PROMPT), forward.decode(5), forward.chunk([7, 11])]


@pytest.mark.parametrize("name", sorted(architectures()))
def test_kernels_compute_what_the_cpu_computes(tmp_path, monkeypatch, name):
    window = {"sliding_window": 6} if "sliding_window" in architectures()[name].example else {}
    folder, _ = write_family(name, tmp_path, **window)
    executor = executor_for(folder)
    expected = logits(executor)
    monkeypatch.setattr(executor, "ops", cuda_operators(executor.config, executor.model, torch.device("cpu")))
    for got, want in zip(logits(executor), expected, strict=True):
        torch.testing.assert_close(got, want, rtol=0, atol=1e-4)
