"""How a product of up to 128 rows is shared out among programs: what `few_rows_hopper` launches, without the kernel itself.

Which launch a product takes, if any, is measured (`tune_products`) and kept in the table (`product_table`). Tiles are whole and 256 weight
rows wide: narrower ones, and ones cut in depth, lose to cuBLASLt (benchmarks/NOTES.md). Gated, half of a tile's rows are up rows.
"""

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from pagecast_kernels import configs

ROWS = 64
"""Input rows of a warpgroup."""
STEP = 64
"""Columns of a swizzled box: 128 B."""
MOST_ROWS = 2 * ROWS
COLUMNS = 256
"""Weight rows of a tile."""
GROUP = 2
"""Neighbouring boxes of a tile's rows that are fetched at a time: a step, 64 KiB."""
TURN = 11
MOST_TURN = 1023
_INPUT_STAGES = 3
_OTHER_BYTES = 4096 + 128
"""Shared memory of a warpgroup in which results change their layout, and its share of the barriers."""
_LEAST_SHARE = 0.7
"""Of the processors a launch keeps busy at least so many."""


@dataclass(frozen=True, slots=True)
class FewRows:
    """A launch. turn: each tile begins so many steps further on in its depth than the one before, so that programs do not ask for the same
    columns at a time."""

    turn: int = 0

    def __post_init__(self) -> None:
        """Raises ValueError."""
        if not 0 <= self.turn <= MOST_TURN:
            raise ValueError(f"turn must be 0 to {MOST_TURN}, got {self.turn}")


class Scratch(NamedTuple):
    """What programs tell each other of rows' factors. factors: float32[MOST_ROWS]; counters: int32[2], zeros between launches."""

    factors: Tensor
    counters: Tensor


def scratch(device: torch.device) -> Scratch:
    """For launches that follow one another."""
    return Scratch(torch.zeros(MOST_ROWS, device=device), torch.zeros(2, dtype=torch.int32, device=device))


def tiles(columns: int) -> int:
    """Of a weight with so many rows."""
    return -(-columns // COLUMNS)


def steps(depth: int) -> int:
    """Of a tile."""
    return -(-depth // (STEP * GROUP))


def stages(rows: int) -> tuple[int, int]:
    """(of 64 columns of input rows, of steps of weights): a few of the former, then as many of the latter as fit, then what is left."""
    parts = -(-rows // ROWS)
    left = configs.shared_memory_of(90) - parts * _OTHER_BYTES
    x, w = parts * ROWS * STEP * 2, COLUMNS * STEP * 2 * GROUP
    weights = (left - _INPUT_STAGES * x) // w
    return (left - weights * w) // x, weights


def suits(weight: Tensor) -> bool:
    """Whether there may be a launch for products with this weight: 16-bit, on Hopper, in whole boxes."""
    columns, depth = weight.shape
    return weight.element_size() == 2 and columns % 16 == 0 and depth % STEP == 0 and configs.is_hopper(weight.device)


def fits(rows: int) -> bool:
    """Whether a launch can take so many input rows."""
    return 1 < rows <= MOST_ROWS


def candidates(rows: int, columns: int, processors: int) -> list[FewRows]:
    """Launches that may be the fastest: none where tiles would leave many processors idle."""
    return [FewRows(), FewRows(TURN)] if fits(rows) and tiles(columns) >= _LEAST_SHARE * processors else []
