"""CUDA graphs of whole decode steps, one per batch bucket: a step costs the CPU one launch."""

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor

from pagecast_worker.step_outputs import Decoded


def buckets(max_num_seqs: int) -> list[int]:
    """Batch sizes that get a graph: 1, 2, 4, multiples of 8 up to 64 and of 32 from there, the last one holding max_num_seqs."""
    return [size for size in (1, 2, 4, *range(8, 64, 8), *range(64, max_num_seqs, 32)) if size < max_num_seqs] + [max_num_seqs]


class DecodeGraphs:
    """Captured steps over one static row buffer. Unused places of a bucket hold the padding row, which kernels skip.

    decode: computes one step of int32[B] rows; it must not wait for the device nor look at values on the CPU.
    """

    def __init__(self, decode: Callable[[Tensor], Decoded], max_num_seqs: int, padding: int, device: torch.device) -> None:
        self._decode = decode
        self._padding = padding
        self.sizes = buckets(max_num_seqs)
        self.rows = torch.full((self.sizes[-1],), padding, dtype=torch.int32, device=device)
        self._held: tuple[int, bytes] = (0, b"")
        self._graphs: dict[int, tuple[torch.cuda.CUDAGraph, Decoded]] = {}

    def capture(self, pool: Any, progress: Callable[[int, int], None]) -> None:
        """Capture every bucket, largest first so that the smaller ones fit into its memory. progress: done and total."""
        for done, size in enumerate(reversed(self.sizes), 1):
            self._decode(self.rows[:size])
            torch.cuda.synchronize()
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph, pool=pool, capture_error_mode="thread_local"):  # NCCL has a thread that looks after it
                decoded = self._decode(self.rows[:size])
            self._graphs[size] = (graph, decoded)
            progress(done, len(self.sizes))

    def padded(self, rows: "np.ndarray[tuple[int], np.dtype[np.int64]]") -> "np.ndarray[tuple[int], np.dtype[np.int64]] | None":
        """The row numbers to send for this step, padded to the bucket; None if the buffer holds them already."""
        size = self._bucket(len(rows))
        key = (size, rows.tobytes())
        if key == self._held:
            return None
        self._held = key
        return np.concatenate((rows, np.full(size - len(rows), self._padding)))

    def replay(self, count: int, sent: Tensor | None) -> Decoded:
        """One step of `count` rows. sent: what `padded` asked for, on the device. The result covers the whole bucket."""
        size = self._bucket(count)
        if sent is not None:
            self.rows[:size].copy_(sent)
        graph, decoded = self._graphs[size]
        graph.replay()
        return decoded

    def _bucket(self, count: int) -> int:
        return next(size for size in self.sizes if size >= count)
