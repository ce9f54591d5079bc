"""Looking at what a model's forward pass gives, all of it, while an executor asks it for some tokens only."""

import dataclasses
from collections.abc import Iterator
from contextlib import contextmanager

import torch

from pagecast_worker.torch_executor import TorchExecutor


@contextmanager
def all_hidden_states(executor: TorchExecutor) -> Iterator[list[torch.Tensor]]:
    """Hidden states [T, H] of every forward pass that runs as Python meanwhile."""
    seen, forward = [], executor.model.forward

    def watched(ops, step, caches):
        seen.append(forward(ops, dataclasses.replace(step, wanted=None), caches))
        return seen[-1] if step.wanted is None else seen[-1].index_select(0, step.wanted)

    executor.model.forward = watched
    try:
        yield seen
    finally:
        del executor.model.forward
