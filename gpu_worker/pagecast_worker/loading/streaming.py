"""Weights from safetensors files straight to the device: several threads read pieces of the files into pinned memory, from where each is
copied while others are read. A mapped file would be faulted in page by page and copied through the driver's own buffer."""

import json
import math
import os
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from pagecast_worker.executor import LoadError
from pagecast_worker.models.weights import Source

PIECE_BYTES = 4 << 20
READING = 12
"""Pieces that are being read, or wait to be copied."""
COPYING = 4
"""Pieces whose copies may still be under way."""
THREADS = 8
_TYPES = {"F32": torch.float32, "BF16": torch.bfloat16, "F16": torch.float16}


@dataclass(frozen=True, slots=True)
class Extent:
    """Where a tensor's values stand in a file, from byte `start` on, row by row."""

    path: Path
    start: int
    shape: tuple[int, ...]
    dtype: torch.dtype

    @property
    def row_bytes(self) -> int:
        """Of an index along the first dimension."""
        return math.prod(self.shape[1:]) * self.dtype.itemsize


@dataclass(frozen=True, slots=True)
class Piece:
    """Rows of a source that are read at once: `rows` of them from row `first` of what this rank takes on."""

    source: Source
    extent: Extent
    first: int
    rows: int

    @property
    def offset(self) -> int:
        """In the file."""
        return self.extent.start + (_rows_held(self.source)[0] + self.first) * self.extent.row_bytes

    @property
    def size(self) -> int:
        """In bytes."""
        return self.rows * self.extent.row_bytes

    def place(self) -> Tensor:
        """What is filled."""
        return self.source.place().narrow(0, self.first, self.rows)


def extents(paths: Iterable[Path]) -> dict[str, Extent]:
    """Every tensor of a plain float type, by name, from the files' headers (which were found to be good when they were opened)."""
    found = {}
    for path in paths:
        with path.open("rb") as file:
            length = int.from_bytes(file.read(8), "little")
            header = json.loads(file.read(length))
        for name, entry in header.items():
            if name != "__metadata__" and entry["dtype"] in _TYPES:
                found[name] = Extent(path, 8 + length + entry["data_offsets"][0], tuple(entry["shape"]), _TYPES[entry["dtype"]])
    return found


def streamable(source: Source, extent: Extent | None) -> bool:
    """Whether rows of the file can go to their place as they are, or by columns. What cannot is read whole, and refused there if it is
    not what the model needs."""
    return extent is not None and source.change is None and extent.shape == source.shape and 0 < extent.row_bytes <= PIECE_BYTES


def pieces(sources: Iterable[Source], where: dict[str, Extent]) -> list[Piece]:
    """All that these sources need, in the order of the files."""
    found = [piece for source in sources for piece in _cut(source, where[source.name])]
    return sorted(found, key=lambda piece: (piece.extent.path, piece.offset))


def _cut(source: Source, extent: Extent) -> Iterator[Piece]:
    start, stop = _rows_held(source)
    step = PIECE_BYTES // extent.row_bytes
    for first in range(0, stop - start, step):
        yield Piece(source, extent, first, min(step, stop - start - first))


def _rows_held(source: Source) -> tuple[int, int]:
    """The rows of the checkpoint tensor that this rank reads."""
    start = 0 if source.take is None else source.take[0]
    if source.part is not None and source.part.dim == 0:
        return start + source.part.start, start + source.part.stop
    return start, start + source.rows()


class Stream:
    """Fills places on one device from pieces of files. Owns the pinned memory and the threads; used once."""

    def __init__(self, device: torch.device) -> None:
        self._device, self._cuda = device, device.type == "cuda"
        count = READING + COPYING
        memory = torch.empty(count * PIECE_BYTES, dtype=torch.uint8, pin_memory=self._cuda)
        self._slots = memory.split(PIECE_BYTES)
        self._views = [memoryview(slot.numpy()) for slot in self._slots]
        self._copied: list[torch.cuda.Event | None] = [None] * count
        self._files: dict[Path, int] = {}

    def fill(self, wanted: list[Piece], filled: Callable[[Piece], None]) -> None:
        """filled: told of every piece in its turn. Raises LoadError naming a file that cannot be read."""
        reading: deque[tuple[Piece, int, Future[None]]] = deque()
        pool = ThreadPoolExecutor(THREADS, thread_name_prefix="weights")
        try:
            for number, piece in enumerate(wanted):
                if len(reading) == READING:
                    self._place(*reading.popleft(), filled)
                slot = number % len(self._slots)
                if (event := self._copied[slot]) is not None:
                    event.synchronize()
                reading.append((piece, slot, pool.submit(self._read, self._file(piece.extent.path), piece, slot)))
            while reading:
                self._place(*reading.popleft(), filled)
            if self._cuda:
                torch.cuda.synchronize(self._device)
        finally:
            pool.shutdown(cancel_futures=True)
            for number in self._files.values():
                os.close(number)

    def _file(self, path: Path) -> int:
        if path not in self._files:
            try:
                self._files[path] = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
            except OSError as error:
                raise LoadError(f"{path}: cannot be read ({error.strerror or 'I/O error'})") from None
        return self._files[path]

    def _read(self, file: int, piece: Piece, slot: int) -> None:
        view, done = self._views[slot][: piece.size], 0
        while done < piece.size:
            try:
                count = os.preadv(file, [view[done:]], piece.offset + done)
            except OSError as error:
                raise LoadError(f"{piece.extent.path}: cannot be read ({error.strerror or 'I/O error'})") from None
            if count == 0:
                raise LoadError(f"{piece.extent.path}: ends within tensor {piece.source.name}")
            done += count

    def _place(self, piece: Piece, slot: int, read: Future[None], filled: Callable[[Piece], None]) -> None:
        read.result()
        place, part = piece.place(), piece.source.part
        rows = self._slots[slot][: piece.size].view(piece.extent.dtype).view(piece.rows, *piece.extent.shape[1:])
        if rows.dtype == place.dtype and (part is None or part.dim == 0):
            place.copy_(rows, non_blocking=True)
        else:  # columns, or another type: on the device
            whole = rows.to(self._device, non_blocking=True)
            place.copy_(whole if part is None or part.dim == 0 else part.of(whole))
        if self._cuda:
            event = self._copied[slot] = torch.cuda.Event()
            event.record()
        filled(piece)
