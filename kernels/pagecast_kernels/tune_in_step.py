"""`pagecast bench kernels --tune … --in-step`: which products are the fastest together, in decode steps on a hot chip.

A chip that is held to its power takes the clock that this leaves it: on an H200 one kernel needed 83.8 us cool and 95.4 us hot, and a table
with 7 % less for each product alone took 1 % off all products of a step. What needs less energy may win in a step where it loses alone. So
sequences of a step's products with attention between them are timed, each for so long that it runs at the clock that it leaves itself.
"""

from collections.abc import Callable, Iterable, Mapping, MutableMapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from pagecast_kernels import bench_cases, cublaslt, product_table, tune_products
from pagecast_kernels.few_rows import FewRows
from pagecast_kernels.tune_products import Found, Shape

LAYERS = 4
CONTEXT = 500
"""Tokens that each row has in its cache."""
WARM_UP_S = 1.0
RESUME_S, SETTLE_S = 0.2, 0.05
"""Before a contest, as making graphs leaves the chip idle; and of each sequence before it is timed."""
SCREEN_S, CONTEST_S = 0.1, 0.3
"""Each time, of two, that a sequence is timed."""
GAIN = 0.997
"""Another product is taken where a step needs less than this share of the time it needs with the one in its place."""

Choice = tuple[product_table.Choice, ...]
"""For each product of a layer."""
Stopwatch = Callable[[Sequence[Choice], float], Mapping[Choice, float]]
"""Microseconds of a layer with each choice, timed twice for so many seconds."""


class Together(NamedTuple):
    """The outcome for a number of rows; microseconds of a layer with attention."""

    choice: Choice
    us: float
    before_us: float
    """Of what the table says so far."""


class Step:
    """Some layers of a decode step: products over weights that no cache holds, and attention after each layer's first."""

    def __init__(self, lib: cublaslt.Library, weights: Sequence[list[Tensor]], rows: int, attention: list[bench_cases.Launch]) -> None:
        """weights: for each product of a layer as many as are used in turn. attention: the same."""
        self._lib, self._attention = lib, attention
        self._cases = [tune_products.Case(rows, each) for each in weights]
        self._problems = [cublaslt.Problem(lib, rows, *each[0].shape, each[0].dtype) for each in weights]

    def launches(self, choice: Choice) -> list[bench_cases.Launch]:
        """In the order of a step."""
        products = [self._product(place, one) for place, one in enumerate(choice)]
        found: list[bench_cases.Launch] = []
        for layer in range(LAYERS):
            first, *others = (each[layer % len(each)] for each in products)
            found += [first, self._attention[layer % len(self._attention)], *others]
        return found

    def _product(self, place: int, choice: product_table.Choice) -> list[bench_cases.Launch]:
        case = self._cases[place]
        if choice is None:
            return case.torch()
        if isinstance(choice, FewRows):
            return case.own(product_table.few_rows_run(choice))
        return case.own(cublaslt.Product(self._lib, self._problems[place], cublaslt.Algo.of(choice)))


class HotClock:
    """The stopwatch of a step. Between two choices it leaves the chip no pause."""

    def __init__(self, step: Step) -> None:
        self._step = step
        self._graphs: dict[Choice, tuple[torch.cuda.CUDAGraph, float]] = {}

    def warm_up(self, choice: Choice) -> None:
        self._replay(choice, WARM_UP_S)

    def __call__(self, choices: Sequence[Choice], seconds: float) -> dict[Choice, float]:
        """There and back, A-B-C-C-B-A."""
        for choice in choices:
            self._graph(choice)
        self._replay(choices[0], RESUME_S)
        marks: dict[Choice, list[tuple[torch.cuda.Event, torch.cuda.Event, int]]] = {choice: [] for choice in choices}
        for choice in (*marks, *reversed(marks)):
            self._replay(choice, SETTLE_S)
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            begin.record()
            count = self._replay(choice, seconds)
            end.record()
            marks[choice].append((begin, end, count))
        torch.cuda.synchronize()
        return {
            choice: sum(begin.elapsed_time(end) for begin, end, _ in timed) * 1e3 / sum(count for *_, count in timed) / LAYERS
            for choice, timed in marks.items()
        }

    def _replay(self, choice: Choice, seconds: float) -> int:
        """How often it took place."""
        graph, us = self._graph(choice)
        count = max(round(seconds * 1e6 / us), 1)
        for _ in range(count):
            graph.replay()
        return count

    def _graph(self, choice: Choice) -> tuple[torch.cuda.CUDAGraph, float]:
        """And about how many microseconds it takes."""
        if choice not in self._graphs:
            launches = self._step.launches(choice)
            graph, _ = bench_cases.captured(launches, 0.0)
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            graph.replay()
            begin.record()
            graph.replay()
            end.record()
            end.synchronize()
            self._graphs[choice] = graph, max(begin.elapsed_time(end) * 1e3, 1.0)
        return self._graphs[choice]


def best_together(
    today: Choice, alone: Choice, entrants: Sequence[Iterable[product_table.Choice]], order: Iterable[int], stopwatch: Stopwatch
) -> Together:
    """Starts with today's choice, or the best alone if that is faster, and changes one product after the other.

    entrants: for each product what may be taken. order: of products, as places in a choice.
    """
    best = _winner(today, alone, stopwatch)
    for place in order:
        rivals = [rival for each in entrants[place] if (rival := (*best[:place], each, *best[place + 1 :])) != best]
        if not rivals:
            continue
        us = stopwatch([best, *rivals], SCREEN_S)
        fastest = min(rivals, key=us.__getitem__)
        if us[fastest] < us[best]:
            best = _winner(best, fastest, stopwatch)
    us = stopwatch([today, best], CONTEST_S)
    best = best if us[best] <= GAIN * us[today] else today
    return Together(best, us[best], us[today])


def _winner(held: Choice, rival: Choice, stopwatch: Stopwatch) -> Choice:
    if rival == held:
        return held
    us = stopwatch([held, rival], CONTEST_S)
    return rival if us[rival] <= GAIN * us[held] else held


def attention(rows: int, kv_bytes: int) -> list[bench_cases.Launch]:
    """Decode attention that reads CONTEXT tokens of a row, each of kv_bytes in a layer's cache."""
    own_bytes = 2 * bench_cases.KV_HEADS * bench_cases.DIM * torch.bfloat16.itemsize
    tokens = max(CONTEXT * kv_bytes // own_bytes, 1)
    blocks = rows * -(-tokens // bench_cases.BLOCK_SIZE)
    pool = bench_cases.Pool.make(max(blocks, bench_cases.ROTATE_BYTES // own_bytes // bench_cases.BLOCK_SIZE + 1))
    return bench_cases.attention(pool, [tokens] * rows).decode(pool)


def contest(lib: cublaslt.Library, weights: Sequence[list[Tensor]], rows: int, finds: Sequence[Found], kv_bytes: int) -> Together:
    """Of one number of rows; finds: of each product alone."""
    clock = HotClock(Step(lib, weights, rows, attention(rows, kv_bytes)))
    today = tuple(each.today for each in finds)
    clock.warm_up(today)
    entrants = [dict.fromkeys([each.today, None, each.choice, *each.varied]) for each in finds]
    order = sorted(range(len(weights)), key=lambda place: weights[place][0].numel(), reverse=True)
    return best_together(today, tuple(each.choice for each in finds), entrants, order, clock)


def tune(
    lib: cublaslt.Library, layer: Sequence[Shape], found: Mapping[Shape, MutableMapping[int, Found]], kv_bytes: int,
    report: Callable[[str], None] = print,
) -> dict[int, Together]:  # fmt: skip
    """Put into found what is best together, of all rows there that a decode step may have; and give the times.

    layer: products in the order of a layer. kv_bytes: of a token in a layer's cache. Raises cublaslt.BlasError.
    """
    weights = [tune_products.copies(*shape, torch.bfloat16, str(lib.workspace.device)) for shape in layer]
    outcomes: dict[int, Together] = {}
    for rows in found[layer[0]]:
        if rows > tune_products.DECODE_ROWS[-1]:
            continue
        outcome = outcomes[rows] = contest(lib, weights, rows, [found[shape][rows] for shape in layer], kv_bytes)
        for shape, choice in zip(layer, outcome.choice):
            found[shape][rows] = found[shape][rows]._replace(choice=choice)
        torch.cuda.empty_cache()
        report(f"a layer of {rows} rows with attention: {outcome.us:.1f} us, before {outcome.before_us:.1f} us")
    return outcomes
