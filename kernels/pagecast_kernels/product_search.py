"""Which of all that cuBLASLt can be set to is worth a closer look for a product, in a second instead of the minute that timing all takes.

First one setting of each of the tiles that promise most, by a model, and what is known already; then all settings of the best tiles.
"""

import itertools
import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import NamedTuple

from pagecast_kernels import cublaslt_search as settings
from pagecast_kernels import cublaslt_tiles
from pagecast_kernels.cublaslt import Algorithm, Library, Problem
from pagecast_kernels.cublaslt_search import CLUSTERS, SMALL_CLUSTERS, Family
from pagecast_kernels.cublaslt_tiles import Pair

Stopwatch = Callable[[Iterable[Algorithm]], dict[Algorithm, float]]
"""Times what it is given, and leaves out what does not run after all."""


class Plan(NamedTuple):
    """How much is timed."""

    proposals: int
    tiles: int
    clusters: tuple[int, ...]
    """Of each tile's first option."""
    closer: int
    """Tiles of which all options are tried after that, with closer_clusters, at most closer_most settings in all."""
    closer_clusters: tuple[int, ...]
    swizzles: tuple[int, ...]
    closer_most: int


_ONE, _TWO_COLUMNS, _TWO_ROWS = CLUSTERS[0], CLUSTERS[1], CLUSTERS[3]
FEW_ROWS = Plan(64, 48, (_ONE, _TWO_COLUMNS, _TWO_ROWS), 5, SMALL_CLUSTERS, (0,), 160)
"""Of four products of 256 rows, the four best tiles with any setting were the four best with these, too."""
MANY_ROWS = Plan(16, 12, (_TWO_COLUMNS, _TWO_ROWS), 2, (_TWO_COLUMNS, _TWO_ROWS), (0, 1), 16)
"""Each takes milliseconds, and tiles matter less, the more of them there are."""
MOST_FEW_ROWS = 1024
NEAR = 1.08
"""What takes at most so many times as long as the fastest is near it."""


def plan_for(rows: int) -> Plan:
    return FEW_ROWS if rows <= MOST_FEW_ROWS else MANY_ROWS


def shortlist(
    lib: Library, problem: Problem, carried: Iterable[Algorithm], stopwatch: Stopwatch, processors: int, plan: Plan | None = None
) -> list[Algorithm]:
    """What is worth measuring well, the fastest by the stopwatch first. carried: the best for other numbers of rows."""
    plan = plan or plan_for(problem.shape[0])
    proposed = problem.candidates(plan.proposals)
    searches = [_Search(lib, problem, number, members) for number, members in _by_number(lib, proposed).items()]
    first = itertools.chain(carried, proposed, *(search.first(plan, processors) for search in searches))
    taken = stopwatch(dict.fromkeys(first))
    for search in searches:
        taken |= stopwatch([each for each in search.closer(plan, sorted(taken, key=taken.__getitem__)) if each not in taken])
    return sorted(taken, key=taken.__getitem__)


def varied(lib: Library, us: Mapping[Algorithm, float], most: int) -> list[Algorithm]:
    """Of what is near the fastest by these times: it, the next with a larger tile, and then in turn the fastest of another shape of cluster
    and of another tile. They differ in the energy that they need, which their times alone do not tell."""
    near = [each for each in sorted(us, key=us.__getitem__) if us[each] <= NEAR * min(us.values())]
    tile_of = {each: settings.value_of(lib, each, settings.TILE) for each in near}
    cluster_of = {each: settings.value_of(lib, each, settings.CLUSTER) for each in near}
    area_of = {each: math.prod(cublaslt_tiles.TILES.get(tile_of[each], (0, 0))) for each in near}
    larger = [each for each in near if area_of[each] > area_of[near[0]]][:1]
    firsts = ([next(each for each in near if of[each] == value) for value in dict.fromkeys(of.values())] for of in (cluster_of, tile_of))
    in_turn = (each for both in itertools.zip_longest(*firsts) for each in both if each is not None)
    return list(dict.fromkeys([*near[:1], *larger, *in_turn]))[:most]


def _by_number(lib: Library, proposed: Iterable[Algorithm]) -> dict[int, list[Algorithm]]:
    found: dict[int, list[Algorithm]] = {}
    for algorithm in proposed:
        found.setdefault(settings.value_of(lib, algorithm, settings.NUMBER), []).append(algorithm)
    return found


class _Search:
    """Among one algorithm number's settings; stages are those of the proposed."""

    def __init__(self, lib: Library, problem: Problem, number: int, proposed: list[Algorithm]) -> None:
        self._lib, self._number, self._family = lib, number, Family(lib, problem, number)
        self._stages = self._values(proposed, settings.STAGES)
        self._clusters = self._values(proposed, settings.CLUSTER)
        """Chips that know none of CLUSTERS are proposed another."""

    def _values(self, algorithms: Iterable[Algorithm], setting: settings.Setting) -> tuple[int, ...]:
        return tuple(dict.fromkeys(settings.value_of(self._lib, each, setting) for each in algorithms))

    def first(self, plan: Plan, processors: int) -> Iterator[Algorithm]:
        """Some settings of each of the tiles that promise most."""
        clusters = tuple(dict.fromkeys((*plan.clusters, *self._clusters)))
        tiles = 0
        for pair in self._family.ranked(processors):
            found = list(itertools.islice(self._family.with_pair(pair, self._stages, clusters), len(plan.clusters)))
            yield from found
            tiles += bool(found)
            if tiles == plan.tiles:
                break

    def closer(self, plan: Plan, ranked: Iterable[Algorithm]) -> Iterator[Algorithm]:
        """All settings of the best tiles."""
        clusters = tuple(dict.fromkeys((*plan.closer_clusters, *self._clusters)))
        pairs = itertools.islice(dict.fromkeys(self._pairs(ranked)), plan.closer)
        every = (self._family.with_pair(pair, self._stages, clusters, plan.swizzles) for pair in pairs)
        return itertools.islice(itertools.chain.from_iterable(every), plan.closer_most)

    def _pairs(self, ranked: Iterable[Algorithm]) -> Iterator[Pair]:
        for each in ranked:
            if settings.value_of(self._lib, each, settings.NUMBER) == self._number:
                splits = settings.value_of(self._lib, each, settings.SPLITS)
                yield Pair(settings.value_of(self._lib, each, settings.TILE), splits)
