"""CUDA graphs of steps with prefill chunks, by padded size: a step costs the CPU one upload and one launch.

A padded step has places for `tokens` tokens, decoding rows in front and the chunks right behind them, so that only their sum is
rounded up. How much of it is real, and where the chunks begin, is read on the device. A step that fits no captured size runs
without a graph.
"""

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import structlog
import torch
from numpy.typing import NDArray
from torch import Tensor

from pagecast_worker.row_book import Int, RowBook, Schedule
from pagecast_worker.step_outputs import Decoded

CAPTURE_SECONDS = 6.0
"""What capturing may take at start; sizes beyond that stay without a graph."""
MAX_CHUNKS = 64
TOKEN_SIZES = (*range(64, 832, 64), 896, 960, *range(1024, 2048, 256), *range(2048, 4097, 512))
"""Without 832: products of so many rows take longer than of 896 (H200, 8B parameters, a layer's four: 583 us and 541)."""
_SLOW_GUESS = 448
"""By the library's own guess of an algorithm, products of so many rows take longer than of 512 (there, a step: 14.2 ms and 12.0)."""
FULL_SIZES = (256, 320, 384, 512, 640, 768, 896, *range(1024, 4097, 256))
"""Of them, those at which a place costs least: products work in tiles of 128 rows (there, us of a layer for each place: 0.67 of 320,
0.65 of 384, 0.64 of 512, 0.60 of 896; 0.67 of 448, 0.69 of 704). Up to about 256 reading the weights takes longer than the products."""
FEWEST_PARAMETERS = 1e9
"""Below, a step takes as long as its launches, and what is padded costs next to nothing."""
HOST_BOUND_WORK = 8e12
"""Parameters of a GPU times tokens up to which a step may be limited by launching it: about 30 ms of a large GPU's products."""

_log = structlog.get_logger(__name__)


@dataclass(frozen=True, slots=True)
class Size:
    """Places of a padded step. tokens: in all; decodes: of them, at most, of decoding rows; samples: rows that can draw a token."""

    tokens: int
    decodes: int
    chunks: int
    samples: int

    def parts(self) -> list[int]:
        """Lengths of the arrays that describe a step, in the order of PaddedStep."""
        return [self.decodes, self.tokens, self.tokens, self.tokens, self.chunks, self.chunks, self.chunks + 4, self.samples, self.samples]

    def words(self) -> int:
        return sum(self.parts())

    def holds(self, schedule: Schedule) -> bool:
        return (
            len(schedule.decode_rows) <= self.decodes
            and len(schedule.chunk_rows) <= self.chunks
            and len(schedule.sample_rows) <= self.samples
            and len(schedule.decode_rows) + int(schedule.chunk_lengths.sum()) <= self.tokens
        )


@dataclass(slots=True)
class PaddedStep:
    """int32 views of one buffer. decode_rows[D]; token_ids, positions, slots [T], of the decoding rows in front known on the device
    alone; rows, seq_lens [N] and starts[N + 4], of which N + 1 count, of the chunks; sample_index, sample_rows [M].

    Padding: the padding row, slot -1, empty chunks at the end, index 0.
    """

    size: Size
    decode_rows: Tensor
    token_ids: Tensor
    positions: Tensor
    slots: Tensor
    rows: Tensor
    seq_lens: Tensor
    starts: Tensor
    sample_index: Tensor
    sample_rows: Tensor


def view_step(size: Size, buffer: Tensor) -> PaddedStep:
    """buffer: int32 [at least size.words()]."""
    return PaddedStep(size, *buffer[: size.words()].split_with_sizes(size.parts()))


def pad_step(size: Size, schedule: Schedule, book: RowBook, padding: int) -> NDArray[np.int32]:
    """The step as the words of a PaddedStep."""
    rows, positions, starts = schedule.chunk_tokens()
    decodes = len(schedule.decode_rows)
    blank = np.zeros(decodes, dtype=np.int64)  # filled in on the device
    values: list[tuple[Int, int]] = [
        (schedule.decode_rows, padding),
        (np.concatenate((blank, book.known[rows, positions])), 0),
        (np.concatenate((blank, positions)), 0),
        (np.concatenate((blank, book.slots(rows, positions))), -1),
        (schedule.chunk_rows, padding),
        (schedule.chunk_starts + schedule.chunk_lengths, 0),
        (starts + decodes, int(starts[-1]) + decodes),
        (schedule.sample_index, 0),
        (schedule.sample_rows, padding),
    ]
    flat = np.empty(size.words(), dtype=np.int32)
    begin = 0
    for (part, fill), places in zip(values, size.parts(), strict=True):
        flat[begin : begin + len(part)] = part
        flat[begin + len(part) : begin + places] = fill
        begin += places
    return flat


def empty_step(size: Size, padding: int) -> NDArray[np.int32]:
    """Words of a step in which everything is padding."""
    fills = (padding, 0, 0, -1, padding, 0, 0, 0, padding)
    return np.concatenate([np.full(places, fill, dtype=np.int32) for fill, places in zip(fills, size.parts(), strict=True)])


def sizes_for(max_num_seqs: int, max_num_batched_tokens: int, num_parameters: int, measured: bool = False) -> list[Size]:
    """The sizes to capture: as many tokens as launching can be the limit for, in steps as fine as products can tell apart.

    num_parameters: that a token meets on one GPU. measured: products go by a measured table, not by the library's guesses.
    """
    most = HOST_BOUND_WORK / max(num_parameters, 1)
    largest = next((size for size in TOKEN_SIZES if size >= max_num_batched_tokens), TOKEN_SIZES[-1])
    return [
        Size(tokens, min(tokens, max_num_seqs), min(max(tokens // 16, 8), MAX_CHUNKS, max_num_seqs), min(tokens, max_num_seqs))
        for tokens in TOKEN_SIZES
        if tokens <= largest and (tokens <= most or tokens == TOKEN_SIZES[0]) and (measured or tokens != _SLOW_GUESS)
    ]


def worth_filling(ready: list[Size], num_parameters: int) -> tuple[int, ...]:
    """Tokens, ascending, of the captured sizes that a step had better fill than be padded to a larger one."""
    captured = {size.tokens for size in ready} if num_parameters >= FEWEST_PARAMETERS else set()
    return tuple(tokens for tokens in FULL_SIZES if tokens in captured)


class MixedGraphs:
    """Captured padded steps over one static input buffer.

    compute: one padded step; it must not wait for the device nor look at values on the CPU.
    """

    def __init__(self, compute: Callable[[PaddedStep], Decoded], sizes: list[Size], padding: int, device: torch.device) -> None:
        self._compute = compute
        self._padding = padding
        self._device = device
        self.wanted = sizes
        self._buffer = torch.zeros(max(size.words() for size in sizes), dtype=torch.int32, device=device)
        self._graphs: dict[Size, tuple[torch.cuda.CUDAGraph, Decoded]] = {}
        self.ready: list[Size] = []

    def capture(self, pool: Any, all_agree: Callable[[bool], bool], progress: Callable[[int, int], None]) -> None:
        """Capture as many sizes as the time allows: the largest, so that the others fit into its memory, then smaller steps first. What
        fails is left to run without a graph.

        all_agree: whether every rank says so; ranks must run a step the same way, padded or not.
        """
        began = time.monotonic()
        for done, size in enumerate(self.wanted[-1:] + self.wanted[:-1], 1):
            if not all_agree(time.monotonic() - began < CAPTURE_SECONDS):
                _log.info("out of time for graphs of mixed steps", captured=len(self.ready), wanted=len(self.wanted))
                break
            if all_agree(self._try_capture(size, pool)):
                self.ready.append(size)
            elif done > 1:  # where there is no room for the largest, there may be for others
                break
            progress(done, len(self.wanted))
        progress(len(self.wanted), len(self.wanted))

    def _try_capture(self, size: Size, pool: Any) -> bool:
        try:
            self._capture(size, pool)
        except RuntimeError as error:
            _log.warning("a mixed step could not be captured", size=str(size), error=str(error).splitlines()[0])
            return False
        return True

    def _capture(self, size: Size, pool: Any) -> None:
        step = view_step(size, self._buffer)
        self._buffer[: size.words()].copy_(torch.from_numpy(empty_step(size, self._padding)))
        self._compute(step)
        torch.cuda.synchronize(self._device)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=pool, capture_error_mode="thread_local"):  # NCCL has a thread that looks after it
            decoded = self._compute(step)
        self._graphs[size] = (graph, decoded)

    def fitting(self, schedule: Schedule) -> Size | None:
        """The smallest captured size that holds the step."""
        return min((size for size in self.ready if size.holds(schedule)), key=lambda size: size.tokens, default=None)

    def pack(self, size: Size, schedule: Schedule, book: RowBook) -> NDArray[np.int32]:
        """What `replay` takes, on the CPU."""
        return pad_step(size, schedule, book, self._padding)

    def replay(self, size: Size, sent: Tensor) -> Decoded:
        """One step. sent: what `pack` gave, on the device. Valid until the next replay."""
        self._buffer[: size.words()].copy_(sent)
        return self._run(size)

    def _run(self, size: Size) -> Decoded:
        graph, decoded = self._graphs[size]
        graph.replay()
        return decoded
