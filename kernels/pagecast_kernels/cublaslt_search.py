"""What cuBLASLt's algorithms can be set to for a product, where its heuristic proposes some dozens: tiles, clusters, splits, options.

The attributes' numbers and sizes are those of cublasLt.h (CUDA 12 and 13).
"""

import ctypes
import itertools
from collections.abc import Iterable, Iterator
from ctypes import byref, c_int32, c_size_t, c_uint16, c_uint32
from typing import Any, NamedTuple

from pagecast_kernels import cublaslt_tiles
from pagecast_kernels.cublaslt import WORKSPACE_BYTES, Algo, Algorithm, BlasError, Library, Problem
from pagecast_kernels.cublaslt_tiles import Pair


class Setting(NamedTuple):
    """One of cublasLtMatmulAlgoConfigAttributes_t, and its C type."""

    attribute: int
    kind: Any


NUMBER, TILE, STAGES = Setting(0, c_int32), Setting(1, c_uint32), Setting(6, c_uint32)
SPLITS, REDUCTION = Setting(2, c_int32), Setting(3, c_uint32)
SWIZZLE, OPTION, CLUSTER = Setting(4, c_uint32), Setting(5, c_uint32), Setting(8, c_uint16)
_CAN_SPLIT, _REDUCTIONS, _CAN_SWIZZLE, _TILES, _LAST_OPTION, _STAGES = 0, 1, 2, 6, 7, 13
_IN_FLOAT32 = 2  # CUBLASLT_REDUCTION_SCHEME_COMPUTE_TYPE: parts of a sum stay in float32, as the sum itself does
CLUSTERS = (2, 3, 4, 5, 6, 7, 8, 9, 11, 12, 17, 28, 32, 33)
"""cublasLtClusterShape_t of up to eight programs: 1x1, 2x1, 4x1, 1x2, 2x2, 4x2, 1x4, 2x4, 8x1, 1x8, 3x1, 3x2, 1x3, 2x3."""
SMALL_CLUSTERS = CLUSTERS[:6]
"""Those that all but a few of the fastest have."""
SPLIT_INTO = (2, 3, 4, 6, 8)
MOST_OPTIONS = 64


def value_of(lib: Library, algorithm: Algorithm, setting: Setting) -> int:
    """What an algorithm has a setting at."""
    algo, value, written = Algo.of(algorithm), setting.kind(), c_size_t()
    size = c_size_t(ctypes.sizeof(value))
    lib.call("cublasLtMatmulAlgoConfigGetAttribute", byref(algo), setting.attribute, byref(value), size, byref(written))
    return int(value.value)


def neighbours(lib: Library, problem: Problem, proposed: Iterable[Algorithm]) -> Iterator[Algorithm]:
    """All that can run the problem with the algorithm numbers of those proposed, whatever their other settings; each once.

    Stages, clusters and custom options, which the library does not explain, are tried with all tiles where they run with one proposed.
    """
    tiles: dict[int, list[int]] = {}
    for algorithm in proposed:
        tiles.setdefault(value_of(lib, algorithm, NUMBER), []).append(value_of(lib, algorithm, TILE))
    for number, known in tiles.items():
        yield from Family(lib, problem, number).members(dict.fromkeys(known))


class Family:
    """One algorithm number: what it can be set to, and an algorithm whose settings are changed in place."""

    def __init__(self, lib: Library, problem: Problem, number: int) -> None:
        """Raises BlasError where the library has no such algorithm for the problem's types."""
        self._lib, self._problem, self._algo = lib, problem, Algo()
        self._held: dict[Setting, int] = {}
        lib.call("cublasLtMatmulAlgoInit", lib.handle, *problem.types, number, byref(self._algo))
        self._stages = self._listed(_STAGES)
        self._options = range(min(self._capability(_LAST_OPTION) + 1, MOST_OPTIONS))
        self._splits = SPLIT_INTO if self._capability(_CAN_SPLIT) and self._capability(_REDUCTIONS) & _IN_FLOAT32 else ()
        self._swizzles = (0, 1) if self._capability(_CAN_SWIZZLE) else (0,)

    def ranked(self, processors: int) -> list[Pair]:
        """Its tiles, whole and with the depth cut where that fits into the scratch memory, in the order of what to expect of them."""
        rows, columns, _ = shape = self._problem.shape
        cuts = (1, *(splits for splits in self._splits if splits * rows * columns * 4 <= WORKSPACE_BYTES))
        pairs = [Pair(tile, splits) for tile in self._listed(_TILES) if tile in cublaslt_tiles.TILES for splits in cuts]
        return sorted(pairs, key=lambda pair: cublaslt_tiles.expected(*cublaslt_tiles.TILES[pair.tile], pair.splits, *shape, processors))

    def with_pair(self, pair: Pair, stages: Iterable[int], clusters: Iterable[int], swizzles: Iterable[int] = (0,)) -> Iterator[Algorithm]:
        """What runs with this tile, of all custom options; option by option. clusters: as many as are wanted, in this order."""
        swizzles = [swizzle for swizzle in swizzles if swizzle in self._swizzles]
        for settings in itertools.product(self._options, stages, clusters, swizzles):
            if self._runs(pair.tile, *settings, pair.splits):
                yield self._algo.words()

    def members(self, known_tiles: Iterable[int]) -> Iterator[Algorithm]:
        """All that runs, of what runs with one of the known tiles; each once."""
        every = itertools.product(self._options, self._stages, CLUSTERS)
        plain = [settings for settings in every if any(self._runs(tile, *settings) for tile in known_tiles)]
        for tile, settings in itertools.product(self._listed(_TILES), plain):
            if not self._runs(tile, *settings):
                continue
            for swizzle, splits in itertools.product(self._swizzles, (1, *self._splits)):
                if (swizzle, splits) == (0, 1) or self._runs(tile, *settings, swizzle, splits):
                    yield self._algo.words()

    def _runs(self, tile: int, option: int, stages: int, cluster: int, swizzle: int = 0, splits: int = 1) -> bool:
        wanted = {
            TILE: tile, OPTION: option, STAGES: stages, CLUSTER: cluster, SWIZZLE: swizzle, SPLITS: splits,
            REDUCTION: _IN_FLOAT32 if splits > 1 else 0,
        }  # fmt: skip
        try:
            for setting, value in wanted.items():
                self._set(setting, value)
        except BlasError:
            return False
        return self._problem.runs(self._algo)

    def _set(self, setting: Setting, value: int) -> None:
        if self._held.get(setting) == value:
            return
        held = setting.kind(value)
        size = c_size_t(ctypes.sizeof(held))
        self._lib.call("cublasLtMatmulAlgoConfigSetAttribute", byref(self._algo), setting.attribute, byref(held), size)
        self._held[setting] = value

    def _capability(self, attribute: int) -> int:
        value, written = c_int32(), c_size_t()
        self._lib.call(
            "cublasLtMatmulAlgoCapGetAttribute", byref(self._algo), attribute, byref(value), c_size_t(4), byref(written)
        )  # fmt: skip
        return value.value

    def _listed(self, attribute: int) -> list[int]:
        """The identifiers of a list; the one of 'undefined' where the algorithm has none."""
        size = c_size_t()
        self._lib.call("cublasLtMatmulAlgoCapGetAttribute", byref(self._algo), attribute, None, c_size_t(0), byref(size))
        values = (c_uint32 * (size.value // 4))()
        if len(values):
            self._lib.call(
                "cublasLtMatmulAlgoCapGetAttribute", byref(self._algo), attribute, byref(values), size, byref(size)
            )  # fmt: skip
        return list(values) or [0]
