"""cuBLASLt's tiles by their numbers, and how long a product should take with each: by which a search knows where to begin.

The library counts a product's columns first, and so do tiles: 224x128 are 224 columns by 128 rows.
"""

from typing import NamedTuple

_NAMED = (
    "8x8 8x16 16x8 8x32 16x16 32x8 8x64 16x32 32x16 64x8 32x32 32x64 64x32 32x128 64x64 128x32 64x128 128x64 64x256 128x128 256x64 64x512 "
    "128x256 256x128 512x64 64x96 96x64 96x128 128x160 160x128 192x128 128x192 128x96 32x256 256x32"
)
_LAST = (256, 512), (256, 1024), (512, 512), (512, 1024)
_MOST, _UNIT, _SUMS, _ADDING = 768, 64, 128 * 256, 3000


def _numbered() -> dict[int, tuple[int, int]]:
    """cublasLtMatmulTile_t: some tiles in no order, then all with one side of a multiple of 64, those with the second first."""
    tiles = dict.fromkeys(tuple(int(side) for side in name.split("x")) for name in _NAMED.split())
    fine, coarse = range(8, _MOST + 1, 8), range(_UNIT, _MOST + 1, _UNIT)
    tiles |= dict.fromkeys((m, n) for m in fine for n in coarse if m * n <= 48 << 10)
    tiles |= dict.fromkeys((m, n) for m in coarse for n in fine if m * n <= 64 << 10)
    tiles |= dict.fromkeys(_LAST)
    return {number: (m, n) for number, (m, n) in enumerate(tiles, 1)}


TILES = _numbered()
"""Columns and rows by number."""


class Pair(NamedTuple):
    """A tile by its number, and into how many parts the depth is cut."""

    tile: int
    splits: int


def expected(m: int, n: int, splits: int, rows: int, columns: int, depth: int, processors: int) -> float:
    """About how many cycles a product takes: those of a tile, as many times as a processor gets one.

    Of 16 of the depth tensor cores multiply 64 x b in b / 2 cycles, unless reading 64 and b from shared memory takes longer; more goes into
    filling that memory and writing the tile, and registers do not hold more than 128 x 256 sums. Parts of a sum are added up by another
    launch. Of 67 products of 64 to 16,384 rows, measured on an H200, this ranks the fastest of what the library proposes at place 10 on
    average and never beyond 47; of four of 256 rows it ranks the fastest of all that the library can be set to among the first six.
    """
    multiplied = min((-(-a // _UNIT) * max(b / 2, 16 + b / 4) for a, b in ((m, n), (n, m)) if a % _UNIT == 0), default=2.0 * (m + n))
    multiplied *= 1.25 if m * n > _SUMS else 1
    per_tile = depth / 16 / splits * (multiplied + 0.1 * (m + n)) + 1000 + 0.1 * m * n
    waves = -(-(-(-columns // m) * -(-rows // n) * splits) // processors)
    return waves * per_tile + (0 if splits == 1 else _ADDING + splits * rows * columns / 256)
