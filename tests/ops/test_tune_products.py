"""Tuning a product: what is wrong anywhere never wins, today's choice stays unless something gains on it. Times are given, not taken."""

from typing import Any

import pytest
import torch

from pagecast_kernels import bench_cases, configs, cublaslt, few_rows, product_search, product_table, tune_products
from pagecast_kernels.few_rows import FewRows
from tests.ops.test_product_table import BROKEN, DEVICE, FAST, SLOW, Blas

LEAVES_A_ROW, ROUNDS_TOO_MUCH, ONE_OFF = (tuple([number] * 8) for number in (20, 21, 22))
TORCH_US = 10.0


class Careless(Blas):
    """Some of its algorithms are wrong."""

    def _made_cublasLtMatmul(self, *arguments: Any) -> int:
        number, out = arguments[12]._obj.data[0], self._matrix(arguments[10], arguments[11])
        kept = out.clone()
        super()._made_cublasLtMatmul(*arguments)
        if number == LEAVES_A_ROW[0]:
            out[:, -1] = kept[:, -1]
        elif number == ROUNDS_TOO_MUCH[0]:
            out.copy_((out.float() * 1.01).bfloat16())
        elif number == ONE_OFF[0]:
            out[3, 5] += 1.0
        return 0


@pytest.fixture
def blas(monkeypatch: pytest.MonkeyPatch) -> Careless:
    monkeypatch.setattr(torch.cuda, "current_stream", lambda: type("Stream", (), {"cuda_stream": 0}))
    return Careless()


def tuner(
    blas: Blas, monkeypatch: pytest.MonkeyPatch, us: dict[Any, float], columns: int = 24, ours: dict[FewRows, float] | None = None,
    **table: Any,
) -> tuple[tune_products.Tuner, list[list[Any]]]:  # fmt: skip
    """Over so many columns of 64, for which the search comes back with what `us` has times for (`ours`: of launches of our own); and what
    each search was given to begin with."""
    lib = cublaslt.Library(DEVICE, blas)
    carried: list[list[Any]] = []

    def shortlist(lib: Any, problem: Any, known: Any, *rest: Any) -> list[Any]:
        carried.append(list(known))
        return sorted(us, key=us.__getitem__)

    monkeypatch.setattr(product_search, "shortlist", shortlist)

    def in_turn(cases: dict[Any, Any], rounds: int, least_us: float) -> dict[Any, float]:
        return {name: (us | (ours or {})).get(name, TORCH_US) for name in cases}

    monkeypatch.setattr(bench_cases, "in_turn", in_turn)
    entries = {("torch.bfloat16", columns, 64): {int(rows.removeprefix("m")): algorithm for rows, algorithm in table.items()}}
    found = tune_products.Tuner(lib, [torch.randn(columns, 64).bfloat16()], product_table.ProductTable(lib, entries))
    return found, carried


def test_what_is_wrong_never_wins(blas: Careless, monkeypatch: pytest.MonkeyPatch) -> None:
    us = {LEAVES_A_ROW: 1.0, ROUNDS_TOO_MUCH: 2.0, ONE_OFF: 3.0, BROKEN: 4.0, FAST: 6.0, SLOW: 8.0}
    found = tuner(blas, monkeypatch, us)[0].find(40)
    assert (found.choice, found.us, found.today_us, found.torch_us, found.wrong) == (FAST, 6.0, TORCH_US, TORCH_US, 3)
    assert set(found.finalists) == {FAST, SLOW}


def test_nothing_right_leaves_the_product_to_torch(blas: Careless, monkeypatch: pytest.MonkeyPatch) -> None:
    found = tuner(blas, monkeypatch, {LEAVES_A_ROW: 1.0, BROKEN: 2.0})[0].find(40)
    assert found.choice is None and found.us == found.today_us == TORCH_US


def test_what_rows_between_take_today_is_what_a_winner_has_to_gain_on(blas: Careless, monkeypatch: pytest.MonkeyPatch) -> None:
    us = {FAST: 5.96, SLOW: 6.0}
    search, carried = tuner(blas, monkeypatch, us, m48=SLOW, m64=None)
    found = search.find(40)
    assert found.choice == SLOW and found.us == found.today_us == 6.0
    us[FAST] = 5.9
    assert search.find(56)[:3] == (FAST, 5.9, TORCH_US), "of 64 rows torch's choice was the best"
    assert search.find(44).choice == FAST
    assert carried == [[SLOW], [SLOW], [SLOW, FAST]]


def test_what_is_varied_is_right_and_the_taken_so_far_is_told(blas: Careless, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(product_search, "varied", lambda lib, us, most: [LEAVES_A_ROW, SLOW, ONE_OFF, FAST][:most])
    found = tuner(blas, monkeypatch, {FAST: 5.0, SLOW: 6.0}, m40=SLOW)[0].find(40)
    assert (found.varied, found.today, found.choice) == ([SLOW, FAST], SLOW, FAST)
    assert tuner(blas, monkeypatch, {FAST: 5.0}, m40=BROKEN)[0].find(40).today is None, "what does not run is not taken so far"


def test_launches_of_our_own_are_tried_beside_the_librarys(blas: Careless, monkeypatch: pytest.MonkeyPatch) -> None:
    """What is wrong does not win either; what the table holds is tried though nothing else proposes it."""
    right, wrong, held = FewRows(0), FewRows(1), FewRows(2)
    ran: list[FewRows] = []

    def launched(config: FewRows) -> product_table.Run:
        def run(x: torch.Tensor, weight: torch.Tensor, out: torch.Tensor) -> None:
            ran.append(config)
            out.copy_(x.float() @ weight.float().t())
            if config == wrong:
                out[1, 2] += 1.0

        return run

    monkeypatch.setattr(product_table, "few_rows_run", launched)
    monkeypatch.setattr(configs, "is_hopper", lambda device: True)
    monkeypatch.setattr(few_rows, "candidates", lambda rows, columns, processors: [wrong, right])
    us = {wrong: 1.0, FAST: 6.0, right: 5.0, held: 4.96}
    search, _ = tuner(blas, monkeypatch, {FAST: 6.0}, columns=32, ours=us, m40=held)
    found = search.find(40)
    assert (found.choice, found.today, found.us, found.wrong) == (held, held, 4.96, 1) and set(ran) == {right, wrong, held}
    assert found.finalists == {FAST: 6.0, right: 5.0, held: 4.96}
    us[right] = 4.9
    assert search.find(40).choice == right
    assert search.find(160).choice == FAST and search.find(160).today is None, "a launch of the table's that cannot take so many rows"


def test_many_rows_are_judged_on_a_hot_chip(blas: Careless, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[float] = []
    cool = {FAST: 5.0, SLOW: 6.0}
    search, _ = tuner(blas, monkeypatch, cool)

    def in_turn(cases: dict[Any, Any], rounds: int, least_us: float) -> dict[Any, float]:
        asked.append(least_us)
        hot = {FAST: 9.0, SLOW: 8.0} if least_us == tune_products.HOT_US else cool
        return {name: hot.get(name, TORCH_US) for name in cases}

    monkeypatch.setattr(bench_cases, "in_turn", in_turn)
    monkeypatch.setattr(tune_products, "FINALISTS", 1)
    monkeypatch.setattr(product_search, "varied", lambda lib, us, most: [SLOW])
    assert search.find(40).choice == FAST and tune_products.HOT_US not in asked
    monkeypatch.setattr(tune_products, "HOT_ROWS", 40)
    found = search.find(40)
    assert (found.choice, found.us, set(found.finalists)) == (SLOW, 8.0, {FAST, SLOW}) and asked[-1] == tune_products.HOT_US


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_the_real_library_is_searched_and_measured() -> None:
    lib = cublaslt.Library(torch.device("cuda"))
    search = tune_products.Tuner(lib, tune_products.copies(6144, 4096, torch.bfloat16, "cuda"))
    for rows in (256, 2048):
        found = search.find(rows)
        assert found.finalists and found.wrong == 0 and found.timed >= len(found.finalists)
        assert found.us <= found.today_us == found.torch_us
