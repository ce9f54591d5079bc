"""CUDA graphs without CUDA: a replay computes the step again, over the same static buffers."""

import torch

from pagecast_worker.graphs import DecodeGraphs
from pagecast_worker.mixed_graphs import MixedGraphs, view_step


class ReplayedHere(DecodeGraphs):
    """Graphs without CUDA: a replay computes the padded bucket again, into the same row buffer."""

    def _replay(self, size, shares):
        return self._run(size, shares)


class MixedHere(MixedGraphs):
    """Mixed graphs without CUDA. used: sizes that were replayed."""

    def __init__(self, compute, sizes, padding):
        super().__init__(compute, sizes, padding, torch.device("cpu"))
        self.ready = list(sizes)
        self.used = []

    def _run(self, size):
        self.used.append(size)
        return self._compute(view_step(size, self._buffer))
