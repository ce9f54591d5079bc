"""How a product of up to 128 rows is shared out among programs: what `few_rows_hopper` launches, without the kernel itself.

Which launch a product takes, if any, is measured (`tune_products`) and kept in the table (`product_table`).
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from pagecast_kernels import configs

ROWS = 64
"""Input rows of a warpgroup."""
STEP = 64
"""Columns of a stage: the widest swizzled box."""
MOST_ROWS = 2 * ROWS
MOST_PIECES = 8
COLUMNS = (128, 256, 512)
BOX = 256
"""Most weight rows of one box and one warpgroup."""
_OTHER_BYTES = 4096 + 64
"""Shared memory of a warpgroup in which results change their layout, and its share of the barriers."""


@dataclass(frozen=True, slots=True)
class FewRows:
    """A launch. columns: weight rows of a tile. pieces: in how many a tile's depth is cut. even: of a cut tile every program adds up a
    share, for which it waits for the others; else the last to arrive adds all. early: programs may begin, and fetch weights, while the
    launch before ends."""

    columns: int
    pieces: int = 1
    even: bool = False
    early: bool = False

    def __post_init__(self) -> None:
        """Raises ValueError."""
        if self.columns not in COLUMNS:
            raise ValueError(f"columns must be one of {COLUMNS}, got {self.columns}")
        if not 1 <= self.pieces <= MOST_PIECES:
            raise ValueError(f"pieces must be 1 to {MOST_PIECES}, got {self.pieces}")
        if self.even and self.pieces == 1:
            raise ValueError("even says how pieces are added, but there is one piece only")

    @property
    def box(self) -> int:
        """Weight rows of one box."""
        return min(self.columns, BOX)

    def tiles(self, columns: int) -> int:
        """Of a weight with so many rows."""
        return -(-columns // self.columns)

    def stages(self, rows: int) -> int:
        """As many as fit."""
        parts = -(-rows // ROWS)
        left = configs.shared_memory_of(90) - parts * (self.columns // self.box) * _OTHER_BYTES
        return left // ((parts * ROWS + self.columns) * STEP * 2)


@dataclass(frozen=True, slots=True)
class Workspace:
    """counters int32: one for each warpgroup of a cut tile, all zero between launches. parts float32. For one stream at a time."""

    counters: Tensor
    parts: Tensor


def workspace(device: torch.device | str) -> Workspace:
    """For any launch that `fits`: 128 KiB for each processor."""
    most = 2 * configs.processors(device)
    counters = torch.zeros(most, dtype=torch.int32, device=device)
    return Workspace(counters, torch.empty(most * ROWS * BOX, dtype=torch.float32, device=device))


def steps(depth: int) -> int:
    """Of a tile."""
    return -(-depth // STEP)


def suits(weight: Tensor) -> bool:
    """Whether there may be a launch for products with this weight: 16-bit, on Hopper, in rows that its copy engine can address."""
    columns, depth = weight.shape
    return weight.element_size() == 2 and columns % 16 == 0 and depth % 8 == 0 and configs.is_hopper(weight.device)


def fits(config: FewRows, rows: int, columns: int, depth: int, processors: int) -> bool:
    """Whether a launch can take a product. All pieces run at once, as programs that wait for one another need."""
    pieces_run = config.pieces == 1 or config.tiles(columns) * config.pieces <= processors
    return 1 < rows <= (ROWS if config.columns > BOX else MOST_ROWS) and config.pieces <= steps(depth) and pieces_run


def candidates(rows: int, columns: int, depth: int, processors: int) -> list[FewRows]:
    """Launches that may be the fastest: whole tiles where there is one for every processor, else as many pieces as there are processors
    for, or as many of them as a tile's columns can be shared out evenly to."""
    found: list[FewRows] = []
    for width in COLUMNS:
        most = min(processors // -(-columns // width), steps(depth), MOST_PIECES)
        cuts = dict.fromkeys([most, 1 << (most.bit_length() - 1)]) if most > 1 else ()
        found += [FewRows(width, pieces, even) for pieces in cuts for even in (False, True)] or [FewRows(width)]
    return [each for each in found if fits(each, rows, columns, depth, processors)]
