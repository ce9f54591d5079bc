"""The search through all that cuBLASLt can be set to: what it tries, in the library's own numbers and sizes, and what it gives back."""

import ctypes
import itertools
from functools import partial
from typing import Any

import pytest
import torch

from pagecast_kernels import cublaslt, cublaslt_search, tune_products
from pagecast_kernels.cublaslt_search import CLUSTER, NUMBER, OPTION, REDUCTION, SPLITS, STAGES, SWIZZLE, TILE

SIZES = {0: 4, 1: 4, 2: 4, 3: 4, 4: 4, 5: 4, 6: 4, 7: 2, 8: 2}
SETTINGS = (NUMBER, TILE, STAGES, OPTION, CLUSTER, SWIZZLE, SPLITS, REDUCTION)
LISTS = {6: (20, 23, 165), 13: (35, 36)}
NUMBERS = {7: 3, 0: 1, 1: 7, 2: 1}  # three custom options, split K by any way of adding, swizzling


class Blas:
    """Two algorithm numbers with their settings in the words of an algorithm, one word each in the order of SETTINGS."""

    def __init__(self) -> None:
        self.cublasLtGetVersion = partial(int, 130100)  # to which, unlike a method, a type can be given

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
        assert tile == 20 or option != 3  # left out: it ran with no tile of the proposed
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


def test_settings_are_read_back(problem: tuple[cublaslt.Library, cublaslt.Problem]) -> None:
    lib, _ = problem
    words = (66, 165, 35, 2, 5, 1, 4, 2)
    assert tuple(cublaslt_search.value_of(lib, words, each) for each in SETTINGS) == words


def test_tuning_looks_at_everything_only_when_asked_and_for_few_rows(problem: tuple[cublaslt.Library, cublaslt.Problem]) -> None:
    lib, product = problem
    proposed = product.candidates(8)
    assert tune_products.candidates_of(lib, product, 256, exhaustive=False) == proposed
    assert tune_products.candidates_of(lib, product, 2048, exhaustive=True) == proposed
    everything = tune_products.candidates_of(lib, product, 256, exhaustive=True)
    assert everything[:1] == proposed and len(everything) == len(set(everything)) == 72


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
