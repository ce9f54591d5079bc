"""`pagecast bench kernels --tune`: which algorithm of cuBLASLt is best for each product of a model, measured and kept as a table."""

from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

import torch
from torch import Tensor

from pagecast_kernels import bench_cases, cublaslt, cublaslt_search, product_table, products, reference

DECODE_ROWS = (2, 4, *range(8, 257, 8))
"""The batch sizes that serving has graphs for, most of them."""
MIXED_ROWS = (*range(320, 1024, 64), *range(1024, 2048, 256), *range(2048, 4096, 512), 4096, 8192, 16384)
"""The padded sizes of steps with chunks, and what larger steps are rounded to."""
FINEST_ROWS = 1024
"""Up to here it is worth looking at everything that the library can be set to: the larger a product, the less its tiles matter."""
LONGER_TIMED = 64
GAIN = 0.99
"""An algorithm is kept where it needs less than this share of the time of torch's own choice."""


class Case:
    """One product over enough weights that none is found in the L2 cache."""

    def __init__(self, rows: int, weights: list[Tensor]) -> None:
        self.weights = weights
        self.x = torch.empty((rows, weights[0].shape[1]), dtype=weights[0].dtype, device=weights[0].device).normal_()
        self.out = self.x.new_empty((rows, weights[0].shape[0]))

    def own(self, product: cublaslt.Product) -> list[bench_cases.Launch]:
        return [partial(product, self.x, weight, self.out) for weight in self.weights]

    def torch(self, name: str) -> list[bench_cases.Launch]:
        """Through one of torch's two libraries, "cublas" or "cublaslt"."""

        def launch(weight: Tensor) -> Tensor:
            products.prefer(name)
            return reference.linear(self.x, weight)

        return [partial(launch, weight) for weight in self.weights]

    def is_right(self, product: cublaslt.Product) -> bool:
        """Whether it gives what float32 sums give, but for rounding."""
        product(self.x, self.weights[0], self.out)
        want = reference.linear(self.x, self.weights[0]).float()
        return bool(torch.linalg.norm(self.out.float() - want) <= 1e-2 * torch.linalg.norm(want))


def copies(columns: int, depth: int, dtype: torch.dtype, device: str) -> list[Tensor]:
    """Random weights, more than bench_cases.ROTATE_BYTES of them in all."""
    count = max(-(-bench_cases.ROTATE_BYTES // (columns * depth * dtype.itemsize)), 2)
    return [torch.empty((columns, depth), dtype=dtype, device=device).normal_() for _ in range(count)]


def fastest(case: Case, runnable: dict[cublaslt.Algorithm, cublaslt.Product], most: int) -> list[cublaslt.Algorithm]:
    """The first `most` of them by a few launches each, best first; without those that the library refuses to launch after all."""
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    taken: dict[cublaslt.Algorithm, float] = {}
    for algorithm, product in runnable.items():
        launches = case.own(product)
        try:
            launches[0]()  # the first loads the kernel; the next keeps the device busy while the timed ones are queued
            launches[-1]()
            begin.record()
            for launch in (launches * 4)[:4]:
                launch()
        except cublaslt.BlasError:
            continue
        end.record()
        end.synchronize()
        taken[algorithm] = begin.elapsed_time(end)
    return sorted(taken, key=taken.__getitem__)[:most]


def best(
    case: Case, problem: cublaslt.Problem, lib: cublaslt.Library, candidates: Iterable[cublaslt.Algorithm]
) -> tuple[cublaslt.Algorithm | None, float, float]:
    """(algorithm, its microseconds, those of the better of torch's libraries); None with torch's own where nothing gains on it."""
    runnable = {each: cublaslt.Product(lib, problem, algo) for each in candidates if (algo := problem.algo(each)) is not None}
    if len(runnable) > LONGER_TIMED:
        runnable = {each: runnable[each] for each in fastest(case, runnable, LONGER_TIMED)}
    runnable = {each: product for each, product in runnable.items() if case.is_right(product)}
    quick = {each: bench_cases.graph_us(case.own(product), least_us=300.0, repeats=2) for each, product in runnable.items()}
    rivals: dict[Any, list[bench_cases.Launch]] = {name: case.torch(name) for name in ("cublas", "cublaslt")}
    finalists: dict[Any, list[bench_cases.Launch]] = {each: case.own(runnable[each]) for each in sorted(quick, key=quick.__getitem__)[:4]}
    timed = bench_cases.alternate({**rivals, **finalists}, rounds=3)
    library_us = min(timed[name] for name in rivals)
    winner = min(finalists, key=timed.__getitem__, default=None)
    if winner is None or timed[winner] > GAIN * library_us:
        return None, library_us, library_us
    return winner, timed[winner], library_us


def candidates_of(lib: cublaslt.Library, problem: cublaslt.Problem, rows: int, exhaustive: bool) -> list[cublaslt.Algorithm]:
    """What to time for a problem, the library's proposals first."""
    proposed = problem.candidates(64 if rows <= FINEST_ROWS else 24)
    others = cublaslt_search.neighbours(lib, problem, proposed) if exhaustive and rows <= FINEST_ROWS else ()
    return list(dict.fromkeys([*proposed, *others]))


def tune(
    shapes: Iterable[tuple[int, int]], rows: Iterable[int], *, only_decode: Iterable[tuple[int, int]] = (), exhaustive: bool = False,
    report: Callable[[str], None] = print,
) -> tuple[int, dict[str, dict[str, list[str] | None]], dict[str, float]]:
    """(library version, products for product_table.write, metrics) of bf16 products with weights of [columns, depth] by these rows.

    only_decode: shapes that are never asked for more rows than a decode step has. exhaustive: up to FINEST_ROWS look at all that the
    library's algorithms can be set to, and not only at what it proposes. Raises OSError, cublaslt.BlasError.
    """
    device = torch.device("cuda", torch.cuda.current_device())
    lib = cublaslt.Library(device)
    few, found, metrics = set(only_decode), {}, {}
    for columns, depth in shapes:
        weights = copies(columns, depth, torch.bfloat16, str(device))
        by_rows: dict[str, list[str] | None] = {}
        for count in rows:
            if (columns, depth) in few and count > DECODE_ROWS[-1]:
                continue
            problem = cublaslt.Problem(lib, count, columns, depth, torch.bfloat16)
            candidates = candidates_of(lib, problem, count, exhaustive)
            algorithm, own_us, library_us = best(Case(count, weights), problem, lib, candidates)
            by_rows[str(count)] = None if algorithm is None else [f"{word:x}" for word in algorithm]
            metrics[f"kernels.tune.{columns}x{depth}.M{count}.ratio"] = library_us / own_us
            report(f"{columns} x {depth}, {count} rows: {own_us:.1f} us, torch {library_us:.1f} us")
        found[f"bfloat16 {columns} {depth}"] = by_rows
        del weights
    return lib.version, found, metrics


def write_table(version: int, found: dict[str, Any], note: dict[str, Any]) -> str:
    """Into the table of torch's current device; gives its path."""
    name = torch.cuda.get_device_name()
    file = product_table.path(name)
    product_table.write(file, name, version, found, note)
    return str(file)
