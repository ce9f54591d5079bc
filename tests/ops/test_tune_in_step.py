"""Products tuned together: a step's order, how a hot chip is timed, what is taken. Time is simulated."""

import argparse
from collections.abc import Callable, Mapping, Sequence
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from pagecast.bench import model_shapes, results
from pagecast.cli import bench_kernels
from pagecast_kernels import bench_cases, cublaslt, product_table, products, tune_gated, tune_in_step, tune_products
from pagecast_kernels.few_rows import FewRows
from pagecast_kernels.tune_in_step import Choice
from pagecast_kernels.tune_products import Found
from tests.ops.test_product_table import DEVICE, FAST, SLOW, Blas

FRUGAL, GREEDY = (tuple([number] * 8) for number in (30, 31))


@pytest.fixture
def blas(monkeypatch: pytest.MonkeyPatch) -> Blas:
    monkeypatch.setattr(torch.cuda, "current_stream", lambda: type("Stream", (), {"cuda_stream": 0}))
    return Blas()


def test_a_step_goes_through_its_layers_with_attention_after_the_first_product(blas: Blas, monkeypatch: pytest.MonkeyPatch) -> None:
    weights = [[torch.full((24, 64), float(n)).bfloat16() for n in (1, 2, 3)], [torch.full((64, 24), float(n)).bfloat16() for n in (1, 2)]]
    monkeypatch.setattr(products, "prefer", lambda library: blas.ran.append(0))
    step = tune_in_step.Step(cublaslt.Library(DEVICE, blas), weights, 40, [lambda: blas.ran.append(-1), lambda: blas.ran.append(-2)])
    for launch in step.launches((FAST, SLOW)):
        launch()
    assert blas.ran == [7, -1, 8, 7, -2, 8, 7, -1, 8, 7, -2, 8]
    blas.ran.clear()
    got = [launch() for launch in step.launches((SLOW, None))]
    assert blas.ran == [8, -1, 0, 8, -2, 0, 8, -1, 0, 8, -2, 0]
    torch.testing.assert_close(got[5], got[2] * 2, rtol=2e-2, atol=1e-1)
    torch.testing.assert_close(got[8], got[2])


class Chip:
    """A clock that only graphs move, and what a stopwatch does to it. Its graphs are their launches' microseconds."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now_us, self.log = 0.0, list[str]()
        chip = self

        class Event:
            def __init__(self, enable_timing: bool) -> None:
                assert enable_timing

            def record(self) -> None:
                self.at = chip.now_us
                chip.log.append("mark")

            def synchronize(self) -> None: ...

            def elapsed_time(self, other: Any) -> float:
                return (other.at - self.at) / 1e3

        class Graph:
            def __init__(self, us: float) -> None:
                self.us = us

            def replay(self) -> None:
                chip.now_us += self.us
                chip.log.append(f"{self.us:.0f}")

        monkeypatch.setattr(torch.cuda, "Event", Event)
        monkeypatch.setattr(torch.cuda, "synchronize", lambda: self.log.append("wait"))
        monkeypatch.setattr(bench_cases, "captured", lambda launches, least_us: (Graph(launches[0]), 1))


class Given:
    """A step of which each choice takes a given time."""

    def __init__(self, us: Mapping[Choice, float]) -> None:
        self.us = us

    def launches(self, choice: Choice) -> list[Any]:
        return [self.us[choice]]


def test_sequences_alternate_by_parts_of_a_second_and_without_a_pause(monkeypatch: pytest.MonkeyPatch) -> None:
    chip = Chip(monkeypatch)
    clock = tune_in_step.HotClock(Given({(FAST,): 1000.0, (SLOW,): 2000.0}))  # type: ignore[arg-type]
    clock.warm_up((FAST,))
    assert chip.now_us >= tune_in_step.WARM_UP_S * 1e6
    clock([(FAST,), (SLOW,)], 0.1)  # makes the graphs
    chip.log.clear()
    assert clock([(FAST,), (SLOW,)], 0.1) == {(FAST,): 250.0, (SLOW,): 500.0}
    fast, slow = ["mark", *["1000"] * 100, "mark"], ["mark", *["2000"] * 50, "mark"]
    settled = [*["1000"] * 50, *fast, *["2000"] * 25, *slow, *["2000"] * 25, *slow, *["1000"] * 50, *fast]
    assert chip.log == [*["1000"] * 200, *settled, "wait"]


def stopwatch(us: Callable[[Choice], float], asked: list[tuple[int, float]] | None = None) -> tune_in_step.Stopwatch:
    def timed(choices: Sequence[Choice], seconds: float) -> dict[Choice, float]:
        if asked is not None:
            asked.append((len(choices), seconds))
        return {choice: us(choice) for choice in choices}

    return timed


def test_what_loses_alone_is_taken_where_all_together_gain() -> None:
    alone_us, watts = {FAST: 9.0, FRUGAL: 9.5, SLOW: 10.0, None: 11.0}, {FAST: 3.0, FRUGAL: 1.0, SLOW: 2.0, None: 2.0}

    def us(choice: Choice) -> float:
        return sum(alone_us[each] for each in choice) * max(sum(watts[each] for each in choice) / 4.0, 1.0)

    entrants = [[SLOW, None, FAST, FRUGAL]] * 2
    asked: list[tuple[int, float]] = []
    got = tune_in_step.best_together((SLOW, SLOW), (FAST, FAST), entrants, (1, 0), stopwatch(us, asked))
    assert got.choice in ((FAST, FRUGAL), (FRUGAL, FAST)) and (got.us, got.before_us) == (18.5, 20.0)
    assert asked[:2] == [(2, tune_in_step.CONTEST_S), (4, tune_in_step.SCREEN_S)] and asked[-1] == (2, tune_in_step.CONTEST_S)


def test_the_best_alone_are_where_it_begins_if_they_gain_together() -> None:
    us = {(SLOW, SLOW): 10.0, (FAST, FAST): 9.0, (SLOW, FAST): 9.5, (FAST, SLOW): 9.5}
    got = tune_in_step.best_together((SLOW, SLOW), (FAST, FAST), [[SLOW], [SLOW, FAST]], (0, 1), stopwatch(us.__getitem__))
    assert got == ((FAST, FAST), 9.0, 10.0)


def test_a_change_is_taken_only_for_what_it_gains_when_timed_for_long() -> None:
    short = {(SLOW,): 10.0, (FAST,): 9.8, (GREEDY,): 9.9}
    long = {(SLOW,): 10.0, (FAST,): 9.98, (GREEDY,): 10.1}

    def timed(choices: Sequence[Choice], seconds: float) -> dict[Choice, float]:
        return {each: (long if seconds == tune_in_step.CONTEST_S else short)[each] for each in choices}

    assert tune_in_step.best_together((SLOW,), (SLOW,), [[SLOW, FAST, GREEDY]], (0,), timed) == ((SLOW,), 10.0, 10.0)
    long[FAST,] = 9.96
    assert tune_in_step.best_together((SLOW,), (SLOW,), [[SLOW, FAST, GREEDY]], (0,), timed) == ((FAST,), 9.96, 10.0)


def test_what_did_not_last_is_given_back() -> None:
    times = iter((9.0, 10.2))  # a chip that another job slowed in between
    got = tune_in_step.best_together(
        (SLOW,), (FAST,), [[SLOW, FAST]], (), lambda choices, seconds: {(SLOW,): 10.0, (FAST,): next(times)}
    )  # fmt: skip
    assert got == ((SLOW,), 10.0, 10.0)


def found(algorithm: Any, today: Any, varied: list[Any]) -> Found:
    return Found(algorithm, 9.0, 10.0, 11.0, 3, 0, {}, today, varied)


def test_a_contest_enters_what_each_product_may_take_the_largest_first(blas: Blas, monkeypatch: pytest.MonkeyPatch) -> None:
    Chip(monkeypatch)
    seen: dict[str, Any] = {}

    def best(today: Choice, alone: Choice, entrants: Any, order: Any, clock: Any) -> Any:
        seen.update(today=today, alone=alone, entrants=[list(each) for each in entrants], order=list(order))

    monkeypatch.setattr(tune_in_step, "best_together", best)
    monkeypatch.setattr(tune_in_step, "attention", lambda rows, kv_bytes: [lambda: None])
    monkeypatch.setattr(bench_cases, "captured", lambda launches, least_us: (type("Graph", (), {"replay": lambda self: None})(), 1))
    weights = [[torch.zeros(24, 64).bfloat16()], [torch.zeros(64, 64).bfloat16()]]
    finds = [found(FAST, SLOW, [FAST, FRUGAL]), found(None, None, [GREEDY])]
    tune_in_step.contest(cublaslt.Library(DEVICE, blas), weights, 40, finds, 4096)
    assert seen == {"today": (SLOW, None), "alone": (FAST, None), "order": [1, 0], "entrants": [[SLOW, None, FAST, FRUGAL], [None, GREEDY]]}


def test_our_own_launches_take_part(blas: Blas, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(product_table, "few_rows_run", lambda config: lambda x, weight, out: blas.ran.append(config))
    weights = [[torch.zeros(shape).bfloat16()] for shape in ((64, 24), (24, 64))]
    step = tune_in_step.Step(cublaslt.Library(DEVICE, blas), weights, 40, [lambda: blas.ran.append(-1)])
    for launch in step.launches((FAST, FewRows(3)))[:3]:
        launch()
    assert blas.ran == [7, -1, FewRows(3)]


def test_attention_reads_as_much_as_a_model_has_of_each_token(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[Any] = []
    monkeypatch.setattr(bench_cases.Pool, "make", staticmethod(asked.append))
    monkeypatch.setattr(bench_cases, "attention", lambda pool, lens: type("Case", (), {"decode": lambda self, pool: asked.append(lens)})())
    tune_in_step.attention(256, 4096)
    tune_in_step.attention(2, 1024)
    assert asked == [256 * 32, [500] * 256, 4097, [125, 125]], "eight heads of 128 have 4 KiB; and no cache holds so many blocks of 64 KiB"


def test_rows_of_a_decode_step_are_tuned_together_and_others_left(blas: Blas, monkeypatch: pytest.MonkeyPatch) -> None:
    shapes, said = [(24, 64), (64, 24)], list[str]()
    alone = {shape: {rows: found(FAST, SLOW, []) for rows in (64, 256, 320)} for shape in shapes}
    monkeypatch.setattr(bench_cases, "ROTATE_BYTES", 1)
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: None)
    monkeypatch.setattr(
        tune_in_step, "contest", lambda lib, weights, rows, finds, kv: tune_in_step.Together((FRUGAL, None), rows * 1.0, rows * 2.0)
    )
    got = tune_in_step.tune(cublaslt.Library(DEVICE, blas), shapes, alone, 4096, said.append)
    assert got == {64: ((FRUGAL, None), 64.0, 128.0), 256: ((FRUGAL, None), 256.0, 512.0)}
    words, kept = [f"{word:x}" for word in FRUGAL], [f"{word:x}" for word in FAST]
    assert tune_products.products_json(alone) == {
        "bfloat16 24 64": {"64": words, "256": words, "320": kept}, "bfloat16 64 24": {"64": None, "256": None, "320": kept},
    }  # fmt: skip
    assert said[1] == "a layer of 256 rows with attention: 256.0 us, before 512.0 us"


def test_the_cache_of_a_model_by_token_and_layer() -> None:
    shape = model_shapes.SHAPES["llama8b"]
    assert [bench_kernels.kv_bytes_of(shape, ranks) for ranks in (1, 2, 8, 16)] == [4096, 2048, 512, 512]


def test_the_command_tunes_a_model_together_where_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[Any] = []
    alone = {(24, 64): {64: found(FAST, None, [])}}
    together = {64: tune_in_step.Together((None,), 9.0, 10.0)}
    monkeypatch.setattr(tune_products, "tune", lambda shapes, rows, **rest: (SimpleNamespace(version=3), alone))
    monkeypatch.setattr(tune_in_step, "tune", lambda lib, layer, found, kv_bytes: asked.append((layer, found, kv_bytes)) or together)
    monkeypatch.setattr(results, "write", lambda folder, name, metrics, rest: asked.append(metrics))
    monkeypatch.setattr(results, "provenance", lambda now: {})
    monkeypatch.setattr(tune_products, "write_table", lambda version, found, note, gated=None: asked.append((version, found, gated)))
    gated = {(14336, 4096): {64: tune_gated.FoundGated(FewRows(), 8.0, 10.0, 0)}}
    monkeypatch.setattr(tune_gated, "tune", lambda shapes, rows: asked.append((list(shapes), rows)) or gated)
    args = argparse.Namespace(
        tune=["llama8b"], tune_rows=[64], exhaustive=False, in_step=False, gated=False, tensor_parallel_size=2, results=""
    )  # fmt: skip
    ratios = {"kernels.tune.24x64.M64.ratio": 11.0 / 9.0, "kernels.tune.gated.14336x4096.M64.ratio": 1.25}
    written = [(3, tune_products.products_json(alone), None), ([(14336, 4096)], [64])]
    assert bench_kernels.tune(args) == 0 and asked == [*written, ratios, (3, {}, tune_gated.gated_json(gated))]
    asked.clear()
    args.in_step = True
    assert bench_kernels.tune(args) == 0
    assert asked[0] == ([(3072, 4096), (4096, 2048), (14336, 4096), (4096, 7168)], alone, 2048)
    assert asked[3] == ratios | {"kernels.tune.llama8b.M64.ratio": 10.0 / 9.0}
    asked.clear()
    args.gated = True
    monkeypatch.setattr(tune_products, "tune", lambda shapes, rows, **rest: (SimpleNamespace(version=3), {}) if not shapes else None)
    assert bench_kernels.tune(args) == 0 and asked[0] == (3, {}, None) and asked[2] == {"kernels.tune.gated.14336x4096.M64.ratio": 1.25}


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_a_real_step_is_tuned_together(monkeypatch: pytest.MonkeyPatch) -> None:
    lib = cublaslt.Library(torch.device("cuda"))
    shapes = [(1536, 1024), (1024, 1024)]
    alone = {shape: {64: tune_products.Tuner(lib, tune_products.copies(*shape, torch.bfloat16, "cuda")).find(64)} for shape in shapes}
    cache = torch.ones(64 << 20, dtype=torch.bfloat16, device="cuda")
    monkeypatch.setattr(tune_in_step, "attention", lambda rows, kv_bytes: [cache.sum])  # kernels are interpreted here, which no graph holds
    for name in ("WARM_UP_S", "RESUME_S", "SETTLE_S", "SCREEN_S", "CONTEST_S"):
        monkeypatch.setattr(tune_in_step, name, 0.01)
    got = tune_in_step.tune(lib, shapes, alone, 4096)[64]
    assert 0 < got.us <= got.before_us
    table = product_table.ProductTable(lib, {("torch.bfloat16", *shape): {64: alone[shape][64].choice} for shape in shapes})
    for shape, taken in zip(shapes, got.choice):
        assert table.choice(64, *shape, torch.bfloat16) == taken
