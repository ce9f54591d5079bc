"""CUDA graphs of whole decode steps, one per batch bucket: a step costs the CPU one launch."""

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor

from pagecast_worker.mixed_graphs import FEWEST_PARAMETERS
from pagecast_worker.row_book import Int, RowBook
from pagecast_worker.sharing import SMALLEST_BATCH, PrefixSharing, SharedOnDevice
from pagecast_worker.step_outputs import Decoded


def buckets(max_num_seqs: int, num_parameters: int) -> list[int]:
    """Batch sizes that get a graph: 1, 2, 4, multiples of 8 up to 64 and from there, up to 256, of 8 where a row costs something, the last
    one holding max_num_seqs. All other sizes are multiples of 32.

    num_parameters: that a token meets on one GPU. Products of 8B parameters take 4.12 ms for 64 rows and 6.2 for 256 (H200), 11 us for
    each row between them, and every graph takes about 50 ms of a start.
    """
    apart = 8 if num_parameters >= FEWEST_PARAMETERS else 32
    sizes = (1, 2, 4, *range(8, 64, 8), *range(64, 256, apart), *range(256, max_num_seqs, 32))
    return [size for size in sizes if size < max_num_seqs] + [max_num_seqs]


def sizes_of_sharing(sizes: list[int]) -> list[int]:
    """Of them, those that get a second graph, which reads shared prefixes once."""
    return [size for size in sizes if size >= SMALLEST_BATCH and (size % 64 == 0 or size == sizes[-1])]


def warm_sizes(max_num_seqs: int) -> list[int]:
    """Numbers of sequences that between them need every compiled variant: attention is compiled for powers of 4 from 16 on, and of
    three KV heads otherwise for 17 than for 32, sampling for how many programs share a row, and 1 has a product of its own."""
    powers = {1 << bit for bit in range(max_num_seqs.bit_length())}
    return sorted({min(size, max_num_seqs) for size in powers | {17, max_num_seqs}})


class DecodeGraphs:
    """Captured steps over one static row buffer. Unused places of a bucket hold the padding row, which kernels skip.

    decode: computes one step of int32[B] rows; it must not wait for the device nor look at values on the CPU. Where prefixes can be
    shared, larger buckets have a second graph that reads a shared prefix once, and a second buffer that says which.
    """

    def __init__(
        self, decode: Callable[[Tensor, SharedOnDevice | None], Decoded], sizes: list[int], padding: int, device: torch.device,
        sharing: PrefixSharing | None = None,
    ) -> None:  # fmt: skip
        """sizes: see buckets."""
        self._decode = decode
        self._padding = padding
        self._sharing = sharing
        self.sizes = sizes
        self.shared_sizes = sizes_of_sharing(sizes) if sharing is not None else []
        words = max((sharing.words(size) for size in self.shared_sizes), default=0) if sharing is not None else 0
        self._shared = torch.zeros(words, dtype=torch.int32, device=device)
        self.rows = torch.full((self.sizes[-1],), padding, dtype=torch.int32, device=device)
        self._held: tuple[tuple[int, bool], bytes] = ((0, False), b"")
        self._graphs: dict[tuple[int, bool], tuple[torch.cuda.CUDAGraph, Decoded]] = {}

    def capture(self, pool: Any, progress: Callable[[int, int], None]) -> None:
        """Capture every bucket, largest first so that the smaller ones fit into its memory. progress: done and total."""
        for done, size in enumerate(reversed(self.sizes), 1):
            self._capture(pool, size, False)
            if size in self.shared_sizes:
                self._capture(pool, size, True)
            progress(done, len(self.sizes))

    def _capture(self, pool: Any, size: int, shares: bool) -> None:
        self._run(size, shares)
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=pool, capture_error_mode="thread_local"):  # NCCL has a thread that looks after it
            decoded = self._run(size, shares)
        self._graphs[size, shares] = (graph, decoded)

    def _run(self, size: int, shares: bool) -> Decoded:
        """The step that a graph holds, over the buffers as they are."""
        shared = self._sharing.view(size, self._shared) if shares and self._sharing is not None else None
        return self._decode(self.rows[:size], shared)

    def padded(self, rows: Int, book: RowBook) -> Int | None:
        """What to send for this step: row numbers, padded to the bucket, and who shares a prefix; None if the buffers hold it already."""
        sharing = self._sharing.of(book, rows) if self._sharing is not None and len(rows) >= SMALLEST_BATCH else None
        size = next(size for size in (self.sizes if sharing is None else self.shared_sizes) if size >= len(rows))
        sent = np.concatenate((rows, np.full(size - len(rows), self._padding)))
        if sharing is not None and self._sharing is not None:
            sent = np.concatenate((sent, self._sharing.pack(sharing, size)))
        key = ((size, sharing is not None), sent.tobytes())
        if key == self._held:
            return None
        self._held = key
        return sent

    def replay(self, sent: Tensor | None) -> Decoded:
        """The step that `padded` was asked about last. sent: what it gave, on the device. The result covers the whole bucket."""
        size, shares = self._held[0]
        if sent is not None:
            self.rows[:size].copy_(sent[:size])
            if shares:
                self._shared[: len(sent) - size].copy_(sent[size:])
        return self._replay(size, shares)

    def _replay(self, size: int, shares: bool) -> Decoded:
        graph, decoded = self._graphs[size, shares]
        graph.replay()
        return decoded
