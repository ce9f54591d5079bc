"""Staging for a CUDA device: pinned memory, a stream for results, events instead of waiting."""

import math
from collections import deque

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

UPLOAD_SLOTS = 8
UPLOAD_WORDS = 1 << 18  # int32 words in one pinned upload buffer: 1 MiB


class CudaStaging:
    """Uploads leave from a ring of pinned buffers; a buffer is filled again only after its copy has run.

    Results: a copy on the main stream saves the small output (a graph replays into the same memory), the side stream brings it
    down. Buffers of both kinds, and events, are reused from free lists.
    """

    def __init__(self, device: torch.device, max_rows: int) -> None:
        self.device = device
        self._ring = [torch.empty(UPLOAD_WORDS, dtype=torch.int32, pin_memory=True) for _ in range(UPLOAD_SLOTS)]
        self._copied: list[torch.cuda.Event | None] = [None] * UPLOAD_SLOTS
        self._next = 0
        self._side = torch.cuda.Stream(device)
        self._max_rows = max_rows
        self._free: deque[tuple[Tensor, Tensor]] = deque()
        self._kept: list[tuple[Tensor, Tensor, tuple[int, ...]]] = []
        self._free_events: deque[StepEvents] = deque()
        self._events = StepEvents()

    def begin(self) -> None:
        self._kept = []
        self._events = self._free_events.popleft() if self._free_events else StepEvents()
        self._events.began.record()

    def upload(self, flat: NDArray[np.int32]) -> Tensor:
        """Through the ring; a step too large for a buffer gets pinned memory of its own, which torch keeps until the copy has run."""
        source = torch.from_numpy(flat)
        if len(flat) > UPLOAD_WORDS:
            return source.pin_memory().to(self.device, non_blocking=True)
        slot, self._next = self._next, (self._next + 1) % UPLOAD_SLOTS
        event = self._copied[slot]
        if event is None:
            event = self._copied[slot] = torch.cuda.Event()
        else:
            event.synchronize()
        pinned = self._ring[slot][: len(flat)]
        pinned.copy_(source)
        uploaded = pinned.to(self.device, non_blocking=True)
        event.record()
        return uploaded

    def keep(self, out: Tensor) -> None:
        """out: int32; beyond 2 * max_rows words it gets memory of its own."""
        words = max(out.numel(), 2 * self._max_rows)
        if self._free and words == 2 * self._max_rows:
            saved, pinned = self._free.popleft()
        else:
            saved = torch.empty(words, dtype=torch.int32, device=self.device)
            pinned = torch.empty(words, dtype=torch.int32, pin_memory=True)
        saved[: out.numel()].view(out.shape).copy_(out)
        self._kept.append((saved, pinned, tuple(out.shape)))

    def download(self) -> "CudaDownload":
        events, main = self._events, torch.cuda.current_stream(self.device)
        events.done.record(main)
        self._side.wait_event(events.done)
        torch.cuda.set_stream(self._side)
        try:
            for saved, pinned, shape in self._kept:
                words = math.prod(shape)
                pinned[:words].copy_(saved[:words], non_blocking=True)
        finally:
            torch.cuda.set_stream(main)
        events.arrived.record(self._side)
        return CudaDownload(self._kept, events, self._free, self._free_events, 2 * self._max_rows)


class StepEvents:
    """Where a step's work began and was done on the main stream, and where its results had arrived on the side stream."""

    def __init__(self) -> None:
        self.began, self.done = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        self.arrived = torch.cuda.Event()


class CudaDownload:
    """One plan's results under way; `wait` gives its buffers back."""

    def __init__(
        self,
        kept: list[tuple[Tensor, Tensor, tuple[int, ...]]],
        events: StepEvents,
        free: deque[tuple[Tensor, Tensor]],
        free_events: deque[StepEvents],
        usual_words: int,
    ) -> None:
        self._kept, self._events, self._free, self._free_events = kept, events, free, free_events
        self._usual_words = usual_words

    def ready(self) -> bool:
        return bool(self._events.arrived.query())

    def wait(self) -> tuple[list[NDArray[np.int32]], int]:
        events = self._events
        events.arrived.synchronize()
        arrays = [pinned[: math.prod(shape)].view(shape).numpy().copy() for _, pinned, shape in self._kept]
        self._free.extend((saved, pinned) for saved, pinned, _ in self._kept if len(saved) == self._usual_words)
        device_us = int(events.began.elapsed_time(events.done) * 1000)
        self._free_events.append(events)
        return arrays, device_us
