"""The search through all that cuBLASLt can be set to: what it tries, in the library's own numbers and sizes, and what it gives back."""

import ctypes
import itertools
from functools import partial
from typing import Any

import pytest
import torch

from pagecast_kernels import cublaslt, cublaslt_search, cublaslt_tiles, product_search, tune_products
from pagecast_kernels.cublaslt_search import CLUSTER, NUMBER, OPTION, REDUCTION, SPLITS, STAGES, SWIZZLE, TILE

SIZES = {0: 4, 1: 4, 2: 4, 3: 4, 4: 4, 5: 4, 6: 4, 7: 2, 8: 2}
SETTINGS = (NUMBER, TILE, STAGES, OPTION, CLUSTER, SWIZZLE, SPLITS, REDUCTION)
LISTS = {6: (20, 23, 165), 13: (35, 36)}
NUMBERS = {7: 3, 0: 1, 1: 7, 2: 1}  # three custom options, split K by any way of adding, swizzling


class Blas:
    """Two algorithm numbers with their settings in the words of an algorithm, one word each in the order of SETTINGS."""

    def __init__(self) -> None:
        self.cublasLtGetVersion = partial(int, 130100)  # to which, unlike a method, a type can be given
        self.checked: list[tuple[int, int]] = []

    def _made(self, pointer: Any, *rest: Any) -> int:
        pointer._obj.value = 1
        return 0

    cublasLtCreate = cublasLtMatmulDescCreate = cublasLtMatrixLayoutCreate = cublasLtMatmulPreferenceCreate = _made

    def _done(self, *rest: Any) -> int:
        return 0

    cublasLtMatmulDescSetAttribute = cublasLtMatmulPreferenceSetAttribute = cublasLtMatmulPreferenceDestroy = _done

    def cublasLtMatmulAlgoGetHeuristic(self, *arguments: Any) -> int:
        _, found, count = arguments[-3:]
        found[0].algo.data[:] = (66, 20, 35, 1, 3, 0, 1, 0)
        found[0].state, count._obj.value = 0, 1
        return 0

    def cublasLtMatmulAlgoInit(self, handle: Any, *arguments: Any) -> int:
        *types, number, algo = arguments
        assert types == [68, 0, 14, 14, 14, 14]  # CUBLAS_COMPUTE_32F, CUDA_R_32F, CUDA_R_16BF
        algo._obj.data[:] = (number, 0, 0, 0, 0, 0, 1, 0)
        return 0

    def cublasLtMatmulAlgoCapGetAttribute(self, algo: Any, attribute: int, value: Any, size: Any, written: Any) -> int:
        if attribute in NUMBERS:
            value._obj.value, written._obj.value = NUMBERS[attribute], 4
            return 0
        ids = LISTS[attribute]
        if value is None:
            assert size.value == 0
        else:
            assert size.value == 4 * len(ids)
            value._obj[:] = ids
        written._obj.value = 4 * len(ids)
        return 0

    def cublasLtMatmulAlgoConfigSetAttribute(self, algo: Any, attribute: int, value: Any, size: Any) -> int:
        assert size.value == ctypes.sizeof(value._obj) == SIZES[attribute]
        algo._obj.data[[each.attribute for each in SETTINGS].index(attribute)] = value._obj.value
        return 15 if attribute == CLUSTER.attribute and value._obj.value == 32 else 0

    def cublasLtMatmulAlgoConfigGetAttribute(self, algo: Any, attribute: int, value: Any, size: Any, written: Any) -> int:
        assert size.value == SIZES[attribute]
        value._obj.value = algo._obj.data[[each.attribute for each in SETTINGS].index(attribute)]
        return 0

    def cublasLtMatmulAlgoCheck(self, *arguments: Any) -> int:
        algo, result = arguments[-2:]
        number, tile, stages, option, cluster, _, splits, reduction = algo._obj.data
        result._obj.workspace = 1 << 30 if splits == 8 else 1024
        assert reduction == (2 if splits > 1 else 0) and number == 66
        self.checked.append((tile, option))
        return 0 if stages == 35 and cluster in (3, 5) and option in (1, 2) and (splits == 1 or cluster == 3) else 15


@pytest.fixture
def problem() -> tuple[cublaslt.Library, cublaslt.Problem]:
    lib = cublaslt.Library(torch.device("cpu"), Blas())
    return lib, cublaslt.Problem(lib, 40, 24, 64, torch.bfloat16)


def test_all_that_runs_is_found_once(problem: tuple[cublaslt.Library, cublaslt.Problem]) -> None:
    lib, product = problem
    got = list(cublaslt_search.neighbours(lib, product, product.candidates(8)))
    plain = itertools.product(LISTS[6], (1, 2), (3, 5), (0, 1))
    want = {(66, tile, 35, option, cluster, swizzle, 1, 0) for tile, option, cluster, swizzle in plain}
    halved = itertools.product(LISTS[6], (1, 2), (0, 1), (2, 3, 4, 6))  # in eight it needs more scratch memory than there is
    want |= {(66, tile, 35, option, 3, swizzle, splits, 2) for tile, option, swizzle, splits in halved}
    assert len(got) == len(set(got)) and set(got) == want
    assert {tile for tile, option in lib._lib.checked if option == 0} == {20}, "what runs with no tile of the proposed is left out"


def test_settings_are_read_back(problem: tuple[cublaslt.Library, cublaslt.Problem]) -> None:
    lib, _ = problem
    words = (66, 165, 35, 2, 5, 1, 4, 2)
    assert tuple(cublaslt_search.value_of(lib, words, each) for each in SETTINGS) == words


def speed(algorithm: Any) -> float:
    """Of a setting as these tests have it: one tile is the best, by its second option in a cluster of 2x1 columns."""
    _, tile, _, option, cluster, swizzle, splits, _ = algorithm
    return {20: 2.0, 23: 3.0, 165: 1.0}[tile] + 0.1 * (option != 2) + 0.05 * (cluster != 5) + 0.5 * swizzle + 0.3 * splits


def test_a_search_finds_the_best_of_the_tiles_that_promise_most(problem: tuple[cublaslt.Library, cublaslt.Problem]) -> None:
    lib, product = problem
    asked: list[Any] = []

    def stopwatch(algorithms: Any) -> dict[Any, float]:
        asked.extend(new := list(algorithms))
        return {each: speed(each) for each in new}

    plan = product_search.Plan(8, 2, (3,), 1, (3, 5), (0, 1), 100)
    got = product_search.shortlist(lib, product, [(66, 20, 35, 2, 5, 0, 1, 0)], stopwatch, 132, plan)
    assert got[0] == (66, 165, 35, 2, 5, 0, 1, 0) == min(cublaslt_search.neighbours(lib, product, product.candidates(8)), key=speed)
    assert asked[:2] == [(66, 20, 35, 2, 5, 0, 1, 0), (66, 20, 35, 1, 3, 0, 1, 0)], "what others took, then what is proposed"
    assert len(asked) == len(set(asked)) == len(got) <= 2 + 2 + 8
    assert got == sorted(asked, key=speed)
    few = product_search.shortlist(lib, product, [], stopwatch, 132, plan._replace(closer_most=3))
    assert len(few) <= 1 + 2 + 3


def test_what_is_near_the_fastest_by_other_means_is_kept(problem: tuple[cublaslt.Library, cublaslt.Problem]) -> None:
    lib, _ = problem
    names = ["fastest", "another_option", "cluster_of_2", "larger", "other_tile", "cluster_of_4", "slow"]
    tiles_and_clusters = ((20, 3), (20, 3), (20, 5), (23, 3), (11, 5), (20, 6), (165, 9))
    every = {name: (66, tile, 35, place, cluster, 0, 1, 0) for place, (name, (tile, cluster)) in enumerate(zip(names, tiles_and_clusters))}
    us = {each: 10.0 + 0.1 * place for place, each in enumerate(every.values())} | {every["slow"]: 10.9}
    assert cublaslt_tiles.TILES[11] < cublaslt_tiles.TILES[20] < cublaslt_tiles.TILES[23]
    want = [every[name] for name in ("fastest", "larger", "cluster_of_2", "cluster_of_4", "other_tile")]
    assert product_search.varied(lib, us, 9) == want and product_search.varied(lib, us, 3) == want[:3]
    assert product_search.varied(lib, {}, 3) == []


def test_what_does_not_run_is_not_carried_on(problem: tuple[cublaslt.Library, cublaslt.Problem]) -> None:
    lib, product = problem
    got = product_search.shortlist(lib, product, [], lambda asked: {each: speed(each) for each in asked if each[1] != 165}, 132)
    assert {each[1] for each in got} == {20, 23} and got[0][1] == 20


def test_tiles_have_the_numbers_of_the_header() -> None:
    named = {15: (64, 64), 24: (256, 128), 36: (8, 128), 116: (64, 192), 176: (128, 320), 221: (224, 128), 311: (768, 64), 312: (64, 16)}
    named |= {393: (128, 8), 447: (128, 512), 448: (192, 8), 513: (256, 256), 630: (768, 80), 631: (256, 512), 634: (512, 1024)}
    assert len(cublaslt_tiles.TILES) == 634 and {number: cublaslt_tiles.TILES[number] for number in named} == named


def test_tiles_are_ranked_by_waves_and_by_what_fits_the_tensor_cores() -> None:
    def first(rows: int, columns: int, depth: int) -> list[tuple[int, int]]:
        return sorted(
            (tile for tile in cublaslt_tiles.TILES.values() if tile[0] >= 64),
            key=lambda tile: cublaslt_tiles.expected(*tile, 1, rows, columns, depth, 132),
        )

    assert (64, 128) in first(256, 4096, 14336)[:6] and (96, 128) in first(256, 6144, 4096)[:6], "the fastest on an H200"
    assert (224, 128) in first(256, 28672, 4096)[:6] and (112, 256) in first(256, 28672, 4096)[:6]
    assert cublaslt_tiles.expected(128, 128, 2, 128, 4096, 4096, 132) < cublaslt_tiles.expected(128, 128, 1, 128, 4096, 4096, 132)
    assert cublaslt_tiles.expected(128, 128, 2, 512, 4096, 4096, 132) > cublaslt_tiles.expected(128, 128, 1, 512, 4096, 4096, 132)


def test_today_gives_way_to_one_percent_and_no_less() -> None:
    a, b = (tuple([number] * 8) for number in (1, 2))
    assert tune_products.choice({None: 10.0, a: 9.95, b: 9.0}, None) == (b, None)
    assert tune_products.choice({None: 10.0, a: 9.95}, None) == (None, None)
    assert tune_products.choice({None: 9.8, a: 9.95, b: 9.9}, a) == (None, a), "torch's own choice where it gains"
    assert tune_products.choice({None: 10.0, a: 9.0, b: 8.95}, a) == (a, a)
    assert tune_products.choice({None: 10.0, b: 9.95}, a) == (None, None), "what no longer runs is torch's choice"


def test_what_is_best_for_the_nearest_rows_is_carried_on() -> None:
    known = {rows: tuple([rows] * 8) if rows != 128 else None for rows in (16, 64, 96, 128, 192, 256, 512, 1024)}
    assert [each[0] for each in tune_products.nearest(known, 96)] == [96, 64, 192, 256, 512, 16]
    assert tune_products.nearest({8: None}, 8) == []


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_what_the_real_library_is_set_to_gives_the_product() -> None:
    lib = cublaslt.Library(torch.device("cuda"))
    product = cublaslt.Problem(lib, 256, 4096, 4096, torch.bfloat16)
    proposed = product.candidates(64)
    every = list(cublaslt_search.neighbours(lib, product, proposed))
    assert {each for each in proposed if cublaslt_search.value_of(lib, each, SPLITS) == 1} <= set(every)
    x, weight = (torch.randn(n, 4096, device="cuda").bfloat16() for n in (256, 4096))
    want = x.double() @ weight.double().t()
    for algorithm in every[:: max(len(every) // 16, 1)]:
        algo, out = product.algo(algorithm), torch.full((256, 4096), torch.nan, device="cuda", dtype=torch.bfloat16)
        assert algo is not None
        cublaslt.Product(lib, product, algo)(x, weight, out)
        assert torch.linalg.norm(out.double() - want) <= 8e-3 * torch.linalg.norm(want)
