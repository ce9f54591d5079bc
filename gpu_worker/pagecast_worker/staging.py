"""Moving small things between CPU and device: one upload a step, one download a step, nobody waiting.

On the CPU both are plain arrays. On CUDA uploads go through a ring of pinned buffers, and downloads through a stream of their own.
"""

import math
from typing import Protocol

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

ALIGN = 4
"""Words: parts begin at multiples of 16 bytes, as kernels are compiled once more for pointers that do not."""


class Packet:
    """Integer arrays of one step, joined into one int32 buffer and taken apart on the device. Order: `add`ed, then `take`n."""

    def __init__(self) -> None:
        self._parts: list[NDArray[np.int32]] = []
        self._shapes: list[tuple[int, ...]] = []

    def add(self, values: NDArray[np.generic]) -> None:
        """Any array whose values fit int32; float32 travels by its bits (view it as int32 first)."""
        self._shapes.append(values.shape)
        self._parts.append(np.ascontiguousarray(values, dtype=np.int32).reshape(-1))
        if rest := -values.size % ALIGN:
            self._parts.append(np.zeros(rest, dtype=np.int32))

    def upload(self, staging: "Staging") -> list[Tensor]:
        """int32 tensors on the device, in the order they were added."""
        if not self._parts:
            return []
        flat = staging.upload(np.concatenate(self._parts))
        taken: list[Tensor] = []
        begin = 0
        for shape in self._shapes:
            size = math.prod(shape)
            taken.append(flat[begin : begin + size].view(shape))
            begin += size + -size % ALIGN
        return taken


class Download(Protocol):
    """Tensors on their way to the CPU."""

    def ready(self) -> bool: ...

    def wait(self) -> tuple[list[NDArray[np.int32]], int]:
        """The arrays, and microseconds that the device worked since `begin`."""


class Staging(Protocol):
    """One device's way in and out."""

    def begin(self) -> None:
        """Marks where a step's work starts, for its time."""

    def upload(self, flat: NDArray[np.int32]) -> Tensor: ...

    def keep(self, out: Tensor) -> None:
        """Save a step's small output before a later one overwrites it."""

    def download(self) -> Download:
        """Everything kept since `begin`, on its way."""
