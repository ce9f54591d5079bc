"""Every family's forward pass with the Triton operators, in the interpreter, beside the CPU's: a chunk, steps alone, a step of two."""

import os

os.environ.setdefault("TRITON_INTERPRET", "1")

import pytest
import torch
from worker.family_model import Forward, executor_for, write_family

from pagecast_worker import cpu_ops
from pagecast_worker.backend import cuda_operators
from pagecast_worker.models.registry import architectures


def logits(executor, ops, before: int) -> list[torch.Tensor]:
    """before: tokens that the CPU's operators compute first, so that a window leaves whole tiles of a kernel out."""
    executor.ops = cpu_ops
    forward = Forward(executor)
    if before:
        forward.chunk([(41 * i) % 150 + 3 for i in range(before)])
    executor.ops = ops
    return [forward.chunk([(37 * i) % 150 + 3 for i in range(13)]), forward.decode(5), forward.chunk([7, 11]), forward.decode(9)]


@pytest.mark.parametrize("name", sorted(architectures()))
def test_kernels_compute_what_the_cpu_computes(tmp_path, name):
    example = architectures()[name].example
    windowed = "sliding_window" in example.get("text_config", example)
    folder, _ = write_family(name, tmp_path, **({"sliding_window": 6} if windowed else {}))
    executor = executor_for(folder)
    before = 71 if windowed else 0
    triton = cuda_operators(executor.config, executor.model, torch.device("cpu"))
    for got, want in zip(logits(executor, triton, before), logits(executor, cpu_ops, before), strict=True):
        torch.testing.assert_close(got, want, rtol=0, atol=1e-4)
