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
"""Columns of a swizzled box: 128 B."""
MOST_ROWS = 2 * ROWS
MOST_PIECES = 4
WIDTHS = {256: 2, 128: 4, 64: 4}
"""Weight rows of a tile, and how many neighbouring boxes of them are fetched at a time: 64, 64 and 32 KiB."""
TURN = 11
_INPUT_STAGES = 3
_OTHER_BYTES = 4096 + 128
"""Shared memory of a warpgroup in which results change their layout, and its share of the barriers."""
_LEAST_SHARE = 0.7
"""Of the processors a launch keeps busy at least so many."""


@dataclass(frozen=True, slots=True)
class FewRows:
    """A launch. columns: weight rows of a tile. pieces: in how many a tile's depth is cut; each is a program's, which then adds up a share
    of the tile's columns. turn: each tile begins so many steps further on in its depth than the one before. early: programs may begin,
    and fetch weights, while the launch before ends."""

    columns: int
    pieces: int = 1
    turn: int = 0
    early: bool = False

    def __post_init__(self) -> None:
        """Raises ValueError."""
        if self.columns not in WIDTHS:
            raise ValueError(f"columns must be one of {', '.join(map(str, WIDTHS))}, got {self.columns}")
        if not 1 <= self.pieces <= MOST_PIECES:
            raise ValueError(f"pieces must be 1 to {MOST_PIECES}, got {self.pieces}")
        if not 0 <= self.turn < 1 << 10:
            raise ValueError(f"turn must be 0 to 1023, got {self.turn}")

    def tiles(self, columns: int) -> int:
        """Of a weight with so many rows."""
        return -(-columns // self.columns)

    def steps(self, depth: int) -> int:
        """Of a tile."""
        return -(-depth // (STEP * WIDTHS[self.columns]))

    def stages(self, rows: int) -> tuple[int, int]:
        """(of input rows, of weights): a few of the former, then as many of the latter as fit, then what is left."""
        parts = -(-rows // ROWS)
        left = configs.shared_memory_of(90) - parts * _OTHER_BYTES
        x, w = parts * ROWS * STEP * 2, self.columns * STEP * 2 * WIDTHS[self.columns]
        weights = (left - _INPUT_STAGES * x) // w
        return (left - weights * w) // x, weights


@dataclass(frozen=True, slots=True)
class Workspace:
    """counters int32: one for each warpgroup of a cut tile, all zero between launches. parts float32. For one stream at a time."""

    counters: Tensor
    parts: Tensor


def workspace(device: torch.device | str) -> Workspace:
    """For any launch that `fits`: 128 KiB for each processor."""
    most = 2 * configs.processors(device)
    counters = torch.zeros(most, dtype=torch.int32, device=device)
    return Workspace(counters, torch.empty(most * ROWS * max(WIDTHS), dtype=torch.float32, device=device))


def suits(weight: Tensor) -> bool:
    """Whether there may be a launch for products with this weight: 16-bit, on Hopper, in whole boxes."""
    columns, depth = weight.shape
    return weight.element_size() == 2 and columns % 16 == 0 and depth % STEP == 0 and configs.is_hopper(weight.device)


def fits(config: FewRows, rows: int, columns: int, depth: int, processors: int) -> bool:
    """Whether a launch can take a product. All pieces run at once, as programs that wait for one another need."""
    pieces_run = config.pieces == 1 or config.tiles(columns) * config.pieces <= processors
    return 1 < rows <= MOST_ROWS and config.pieces <= config.steps(depth) and pieces_run


def candidates(rows: int, columns: int, depth: int, processors: int) -> list[FewRows]:
    """Launches that may be the fastest: the widest tiles that keep most processors busy without being cut, and narrower ones than 256 in as
    many pieces as there are processors for. None begins early: whether that gains shows only among a step's launches (`tune_in_step`)."""
    found: list[FewRows] = []
    for width in WIDTHS:
        whole = FewRows(width)
        most = 1 if width == max(WIDTHS) else MOST_PIECES
        pieces = max(min(processors // whole.tiles(columns), whole.steps(depth), most), 1)
        if whole.tiles(columns) * pieces >= _LEAST_SHARE * processors:
            found += [FewRows(width, pieces, turn) for turn in (0, TURN)]
            if pieces == 1:
                break
    return [each for each in found if fits(each, rows, columns, depth, processors)]
