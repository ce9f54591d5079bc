"""`pagecast bench kernels --tune`: which algorithm of cuBLASLt, or launch of our own, is best for each product of a model, measured and
kept as a table."""

import itertools
from collections.abc import Callable, Iterable, Mapping
from functools import cached_property, partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from pagecast_kernels import bench_cases, configs, cublaslt, cublaslt_search, few_rows, product_search, product_table, products, reference
from pagecast_kernels.cublaslt import Algorithm
from pagecast_kernels.few_rows import FewRows
from pagecast_kernels.product_table import Choice, Run

DECODE_ROWS = (2, 4, *range(8, 257, 8))
"""The batch sizes that serving has graphs for, most of them."""
MIXED_ROWS = (*range(320, 1024, 64), *range(1024, 2048, 256), *range(2048, 4096, 512), 4096, 8192, 16384)
"""The padded sizes of steps with chunks, and what larger steps are rounded to."""
LONGER_TIMED, FINALISTS, CARRIED, VARIED = 20, 6, 6, 4
HOT_ROWS, HOT_US, HOT_VARIED = 2048, 100_000.0, 8
"""Products of so many rows follow one another in serving until the chip is held to its power, where what needs less energy is faster: they
are judged by runs of so long without a pause, with so many that are about as fast when it is cool, by other means."""
Shape = tuple[int, int]
"""Columns and depth of a product's weights."""
GAIN = 0.99
"""Something is taken where it needs less than this share of the time of what was in its place: the table's, or torch's own choice."""


class Case:
    """One product over enough weights that none is found in the L2 cache."""

    def __init__(self, rows: int, weights: list[Tensor]) -> None:
        self.weights = weights
        self.x = torch.empty((rows, weights[0].shape[1]), dtype=weights[0].dtype, device=weights[0].device).normal_()
        self.out = self.x.new_empty((rows, weights[0].shape[0]))

    def own(self, product: Run) -> list[bench_cases.Launch]:
        return [partial(product, self.x, weight, self.out) for weight in self.weights]

    def torch(self) -> list[bench_cases.Launch]:
        """As serving does it where the table names no algorithm."""

        def launch(weight: Tensor) -> Tensor:
            products.prefer(configs.blas_library(self.x.shape[0]))
            return reference.linear(self.x, weight)

        return [partial(launch, weight) for weight in self.weights]

    @cached_property
    def _want(self) -> Tensor:
        return self.x.float() @ self.weights[0].float().t()

    def is_right(self, product: Run) -> bool:
        """Whether it gives what float32 gives, everywhere, but for rounding."""
        self.out.fill_(torch.nan)
        product(self.x, self.weights[0], self.out)
        return agrees(self.out, self._want)


def agrees(got: Tensor, want: Tensor, largest: Tensor | None = None) -> bool:
    """Whether a 16-bit result is the float32 one but for rounding, everywhere. largest: what the largest error is held against; absent:
    the root of the mean square."""
    off, size = (got.float() - want).abs_(), want.square().mean().sqrt()
    return bool((off.square().mean().sqrt() <= 4e-3 * size) & (off.max() <= 4e-2 * (size if largest is None else largest)))


def copies(columns: int, depth: int, dtype: torch.dtype, device: str) -> list[Tensor]:
    """Random weights, more than bench_cases.ROTATE_BYTES of them in all."""
    count = max(-(-bench_cases.ROTATE_BYTES // (columns * depth * dtype.itemsize)), 2)
    return [torch.empty((columns, depth), dtype=dtype, device=device).normal_() for _ in range(count)]


class Found(NamedTuple):
    """The outcome for a shape and number of rows; microseconds."""

    choice: Choice
    """None where torch's own is as good."""
    us: float
    today_us: float
    """Of what the table says so far, or torch's choice where it says nothing."""
    torch_us: float
    timed: int
    wrong: int
    finalists: dict[Algorithm | FewRows, float]
    today: Choice
    varied: list[Algorithm]
    """About as fast, by other means; see product_search.varied."""


class Tuner:
    """Finds what is best for one shape, number of rows by number of rows; what is best for others is tried first."""

    def __init__(
        self, lib: cublaslt.Library, weights: list[Tensor], table: product_table.ProductTable | None = None, exhaustive: bool = False
    ) -> None:  # fmt: skip
        """table: what is taken so far. exhaustive: time all that the library can be set to."""
        self._lib, self._weights, self._table, self._exhaustive = lib, weights, table, exhaustive
        self._shape = (*weights[0].shape, weights[0].dtype)
        self._best = dict(table.measured(*self._shape)) if table is not None else {}
        self._processors = configs.processors(weights[0].device)

    def find(self, rows: int) -> Found:
        case, problem = Case(rows, self._weights), cublaslt.Problem(self._lib, rows, *self._shape)
        timed: dict[Algorithm, float] = {}

        def stopwatch(algorithms: Iterable[Algorithm]) -> dict[Algorithm, float]:
            taken = quick_us(case, problem, self._lib, algorithms)
            timed.update(taken)
            return taken

        today = self._table.choice(rows, *self._shape) if self._table is not None else None
        carried = list(dict.fromkeys([*([today] if isinstance(today, tuple) else []), *nearest(self._best, rows)]))
        if self._exhaustive and rows <= product_search.MOST_FEW_ROWS:
            proposed = problem.candidates(product_search.FEW_ROWS.proposals)
            every = itertools.chain(carried, proposed, cublaslt_search.neighbours(self._lib, problem, proposed))
            ranked = sorted(taken := stopwatch(dict.fromkeys(every)), key=taken.__getitem__)
        else:
            ranked = product_search.shortlist(self._lib, problem, carried, stopwatch, self._processors)
        most = HOT_VARIED if rows >= HOT_ROWS else VARIED
        varied = [each for each in product_search.varied(self._lib, timed, most) if case.is_right(self._product(problem, each))]
        found = self._contest(case, problem, ranked, today, varied)._replace(timed=len(timed), varied=varied[:VARIED])
        self._best[rows] = found.choice
        return found

    def _ours(self, case: Case, today: Choice) -> dict[FewRows, Run]:
        """Launches of our own."""
        rows, weight = len(case.x), case.weights[0]
        if not few_rows.suits(weight) or not few_rows.fits(rows):
            return {}
        every = [*([today] if isinstance(today, FewRows) else []), *few_rows.candidates(rows, len(weight), self._processors)]
        return {each: product_table.few_rows_run(each) for each in every}

    def _product(self, problem: cublaslt.Problem, algorithm: Algorithm) -> cublaslt.Product:
        return cublaslt.Product(self._lib, problem, cublaslt.Algo.of(algorithm))

    def _contest(self, case: Case, problem: cublaslt.Problem, ranked: list[Algorithm], today: Choice, varied: list[Algorithm]) -> Found:
        """The best of the ranked and of our own, beside today's and torch's choice; on a hot chip of the varied too."""
        rows, hot = problem.shape[0], problem.shape[0] >= HOT_ROWS
        held = [today] if isinstance(today, tuple) and today in ranked else []
        longer = dict.fromkeys([*held, *(varied if hot else []), *ranked[:LONGER_TIMED]])
        made: dict[Algorithm | FewRows, Run] = dict(self._ours(case, today))
        made |= {each: cublaslt.Product(self._lib, problem, algo) for each in longer if (algo := problem.algo(each)) is not None}
        right = {each: case.own(product) for each, product in made.items() if case.is_right(product)}
        shorter = bench_cases.in_turn(right, rounds=2, least_us=250.0)
        best = [each for each in sorted(right, key=shorter.__getitem__) if each != today]
        best = list(dict.fromkeys([*best[:FINALISTS], *(each for each in best if hot and each in varied)]))
        entered: dict[Choice, list[bench_cases.Launch]] = {None: case.torch()}
        entered |= {each: right[each] for each in (today, *best) if each in right}
        rounds = 2 if hot else 12 if rows <= product_search.MOST_FEW_ROWS else 5
        us = bench_cases.in_turn(entered, rounds=rounds, least_us=HOT_US if hot else 1000.0)
        winner, before = choice(us, today)
        finalists = {each: time for each, time in us.items() if each is not None}
        return Found(winner, us[winner], us[before], us[None], 0, len(made) - len(right), finalists, before, [])


def choice(us: Mapping[Choice, float], today: Choice) -> tuple[Choice, Choice]:
    """(what to take, what was taken so far) of measured times, None being torch's choice, which also stands in for what does not run."""
    held = today if today in us else None
    fastest = min(us, key=us.__getitem__)
    return (fastest if us[fastest] <= GAIN * us[held] else held), held


def nearest(known: Mapping[int, Choice], rows: int) -> list[Algorithm]:
    """Which of the library's algorithms are known to be best for rows and for the numbers closest to it."""
    algorithms = {n: best for n, best in known.items() if isinstance(best, tuple)}
    by_distance = sorted(algorithms, key=lambda n: max(n, rows) / min(n, rows))
    return list(dict.fromkeys(algorithms[n] for n in by_distance[:CARRIED]))


def quick_us(case: Case, problem: cublaslt.Problem, lib: cublaslt.Library, algorithms: Iterable[Algorithm]) -> dict[Algorithm, float]:
    """Microseconds by a few launches each; without what the library refuses to check or launch."""
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    taken: dict[Algorithm, float] = {}
    count = 4 if case.x.shape[0] <= product_search.MOST_FEW_ROWS else 2
    for algorithm in algorithms:
        if (algo := problem.algo(algorithm)) is None:
            continue
        launches = case.own(cublaslt.Product(lib, problem, algo))
        try:
            launches[-1]()  # which loads the kernel
            torch.cuda._sleep(100_000)  # some 55 us, in which the timed ones are queued
            begin.record()
            for launch in itertools.islice(itertools.cycle(launches), count):
                launch()
        except cublaslt.BlasError:
            continue
        end.record()
        end.synchronize()
        taken[algorithm] = begin.elapsed_time(end) * 1e3 / count
    return taken


def tune(
    shapes: Iterable[Shape], rows: Iterable[int], *, only_decode: Iterable[Shape] = (), exhaustive: bool = False,
    report: Callable[[str], None] = print,
) -> tuple[cublaslt.Library, dict[Shape, dict[int, Found]]]:
    """What is best for bf16 products with these weights by these rows, each alone.

    only_decode: shapes that are never asked for more rows than a decode step has. exhaustive: of up to 1,024 rows time all that the
    library's algorithms can be set to, and not only what promises most. Raises OSError, cublaslt.BlasError.
    """
    device = torch.device("cuda", torch.cuda.current_device())
    lib = cublaslt.Library(device)
    table = product_table.load(device, lib)
    few, found = set(only_decode), dict[Shape, dict[int, Found]]()
    for columns, depth in shapes:
        tuner = Tuner(lib, copies(columns, depth, torch.bfloat16, str(device)), table, exhaustive)
        by_rows = found[columns, depth] = {}
        for count in rows:
            if (columns, depth) in few and count > DECODE_ROWS[-1]:
                continue
            best = by_rows[count] = tuner.find(count)
            report(f"{columns} x {depth}, {count} rows: {best.us:.1f} us, before {best.today_us:.1f} us, torch {best.torch_us:.1f} us")
        del tuner
    return lib, found


def metrics(found: Mapping[Shape, Mapping[int, Found]]) -> dict[str, float]:
    """How much longer torch's choice takes."""
    return {
        f"kernels.tune.{columns}x{depth}.M{rows}.ratio": best.torch_us / best.us
        for (columns, depth), by_rows in found.items() for rows, best in by_rows.items()
    }  # fmt: skip


def products_json(found: Mapping[Shape, Mapping[int, Found]]) -> dict[str, dict[str, Any]]:
    """As product_table.write takes them."""
    return {
        f"bfloat16 {columns} {depth}": {str(rows): product_table.stored(best.choice) for rows, best in by_rows.items()}
        for (columns, depth), by_rows in found.items()
    }


def write_table(version: int, found: dict[str, Any], note: dict[str, Any], gated: dict[str, Any] | None = None) -> str:
    """Into the table of torch's current device; gives its path. gated: see tune_gated."""
    name = torch.cuda.get_device_name()
    file = product_table.path(name)
    product_table.write(file, name, version, found, note, gated)
    return str(file)
