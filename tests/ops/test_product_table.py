"""Algorithms of cuBLASLt by table: arguments in the library's order, the right one for a number of rows, torch where there is none."""

import ctypes
import json
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from pagecast_kernels import configs, cublaslt, few_rows, product_table, products, reference
from pagecast_kernels.few_rows import FewRows

VERSION = 130100
DEVICE = torch.device("cpu")
FAST, SLOW, BROKEN, ALONE = (tuple([number] * 8) for number in (7, 8, 9, 10))


class Blas:
    """Stands in for the library: it understands descriptions as the real one does, computes on the CPU, and notes each algorithm it ran."""

    def __init__(self) -> None:
        self.ran: list[int] = []
        self._kept: list[Any] = []
        for name in dir(type(self)):
            if name.startswith("_made_"):
                setattr(self, name.removeprefix("_made_"), partial(getattr(self, name)))

    def _keep(self, pointer: Any, value: Any) -> int:
        self._kept.append(value)
        pointer._obj.value = len(self._kept)
        return 0

    def _at(self, pointer: Any) -> Any:
        return self._kept[pointer.value - 1]

    def _made_cublasLtGetVersion(self) -> int:
        return VERSION

    def _made_cublasLtCreate(self, handle: Any) -> int:
        return self._keep(handle, "handle")

    def _made_cublasLtMatmulDescCreate(self, made: Any, compute: int, scale: int) -> int:
        assert (compute, scale) == (68, 0)  # CUBLAS_COMPUTE_32F, CUDA_R_32F
        return self._keep(made, {})

    def _made_cublasLtMatmulDescSetAttribute(self, operation: Any, attribute: int, value: Any, size: Any) -> int:
        assert size.value == ctypes.sizeof(value._obj)
        self._at(operation)[attribute] = value._obj.value
        return 0

    def _made_cublasLtMatrixLayoutCreate(self, made: Any, kind: int, rows: Any, columns: Any, leading: Any) -> int:
        return self._keep(made, (kind, rows.value, columns.value, leading.value))

    def _made_cublasLtMatmulPreferenceCreate(self, made: Any) -> int:
        return self._keep(made, {})

    _made_cublasLtMatmulPreferenceSetAttribute = _made_cublasLtMatmulDescSetAttribute

    def _made_cublasLtMatmulPreferenceDestroy(self, preference: Any) -> int:
        return 0

    def _made_cublasLtMatmulAlgoGetHeuristic(
        self, handle: Any, operation: Any, a: Any, b: Any, c: Any, d: Any, preference: Any, most: int, found: Any, count: Any
    ) -> int:
        for place, (algorithm, state) in enumerate(((SLOW, 0), (BROKEN, 15), (FAST, 0))[:most]):
            found[place].algo.data[:] = algorithm
            found[place].state = state
        count._obj.value = min(3, most)
        return 0

    def _made_cublasLtMatmulAlgoCheck(self, handle: Any, operation: Any, a: Any, b: Any, c: Any, d: Any, algo: Any, result: Any) -> int:
        result._obj.workspace = 1024
        return 15 if algo._obj.data[0] == BROKEN[0] else 0

    def _made_cublasLtMatmul(
        self, handle: Any, operation: Any, alpha: Any, a_ptr: Any, a: Any, b_ptr: Any, b: Any, beta: Any, c_ptr: Any, c: Any, d_ptr: Any,
        d: Any, algo: Any, workspace: Any, size: Any, stream: Any,
    ) -> int:  # fmt: skip
        assert (alpha._obj.value, size.value) == (1.0, cublaslt.WORKSPACE_BYTES)
        assert c_ptr.value == d_ptr.value and c.value == d.value
        if algo._obj.data[0] == ALONE[0] and beta._obj.value:
            return 15
        left, right = self._matrix(a_ptr, a), self._matrix(b_ptr, b)
        left = left.t() if self._at(operation).get(3) == 1 else left
        out = self._matrix(d_ptr, d)
        out.copy_((left.float() @ right.float() + (beta._obj.value * self._matrix(c_ptr, c).float() if beta._obj.value else 0)).bfloat16())
        self.ran.append(algo._obj.data[0])
        return 0

    def _matrix(self, pointer: Any, layout: Any) -> torch.Tensor:
        """Columns first, as the library reads memory."""
        kind, rows, columns, leading = self._at(layout)
        assert kind == 14 and leading == rows  # CUDA_R_16BF
        memory = (ctypes.c_char * (2 * rows * columns)).from_address(pointer.value)
        return torch.frombuffer(memory, dtype=torch.bfloat16).view(columns, rows).t()


@pytest.fixture
def blas(monkeypatch: pytest.MonkeyPatch) -> Blas:
    monkeypatch.setattr(torch.cuda, "current_stream", lambda: SimpleNamespace(cuda_stream=0))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "NVIDIA Test")
    return Blas()


def table_of(blas: Blas, **by_rows: Any) -> product_table.ProductTable:
    entries = {("torch.bfloat16", 24, 64): {int(rows.removeprefix("m")): algorithm for rows, algorithm in by_rows.items()}}
    return product_table.ProductTable(cublaslt.Library(DEVICE, blas), entries)


def test_a_product_by_algorithm_is_the_product(blas: Blas) -> None:
    g = torch.Generator().manual_seed(2)
    x, weight = (torch.randn(*shape, generator=g).bfloat16() for shape in ((40, 64), (24, 64)))
    got = table_of(blas, m40=FAST).linear(x, weight)
    assert got is not None and blas.ran == [7]
    torch.testing.assert_close(got, reference.linear(x, weight), rtol=2e-2, atol=2e-2)


def test_a_product_is_added_in_place(blas: Blas, monkeypatch: pytest.MonkeyPatch) -> None:
    """By the table's algorithm; one that refuses to add is left to torch, and not asked again."""
    g = torch.Generator().manual_seed(3)
    for algorithm, ran in ((FAST, [7, 7]), (ALONE, []), (None, [])):
        table, blas.ran = table_of(blas, m40=algorithm), []
        monkeypatch.setattr(products, "_table", table)
        x, weight, residual = (torch.randn(*shape, generator=g).bfloat16() for shape in ((40, 64), (24, 64), (40, 24)))
        want = residual.double()
        for _ in range(2):
            want += x.double() @ weight.double().t()
            assert products.linear_add(x, weight, residual) is residual
            assert (residual.double() - want).norm() / want.norm() < 8e-3
        assert blas.ran == ran
        assert (table.linear_add(x, weight, residual) is None) == (algorithm is not FAST)
        assert products.linear(x, weight).shape == residual.shape and (len(blas.ran) > len(ran)) == (algorithm is not None)


def test_the_next_larger_measured_number_of_rows_decides(blas: Blas) -> None:
    table, weight = table_of(blas, m64=FAST, m128=None, m256=SLOW), torch.zeros(24, 64).bfloat16()

    def ran(rows: int) -> int | None:
        before = len(blas.ran)
        product = table.linear(torch.zeros(rows, 64).bfloat16(), weight)
        assert (product is None) == (len(blas.ran) == before)
        return None if product is None else blas.ran[-1]

    assert [ran(rows) for rows in (31, 33, 64, 65, 128, 200, 256, 257)] == [None, 7, 7, None, None, 8, 8, None]


def test_what_the_table_does_not_hold_or_the_library_cannot_run_is_left_to_torch(blas: Blas) -> None:
    table = table_of(blas, m64=BROKEN)
    assert table.linear(torch.zeros(64, 64).bfloat16(), torch.zeros(24, 64).bfloat16()) is None
    assert table.linear(torch.zeros(48, 64).bfloat16(), torch.zeros(24, 64).bfloat16()) is None
    assert table.linear(torch.zeros(64, 64).half(), torch.zeros(24, 64).half()) is None
    assert table.linear(torch.zeros(64, 64).bfloat16(), torch.zeros(32, 64).bfloat16()) is None
    assert table_of(blas, m64=FAST).linear(torch.zeros(64, 64).bfloat16().t(), torch.zeros(24, 64).bfloat16()) is None
    assert not blas.ran


def test_candidates_are_those_that_the_library_can_run_best_first(blas: Blas) -> None:
    problem = cublaslt.Problem(cublaslt.Library(DEVICE, blas), 40, 24, 64, torch.bfloat16)
    assert problem.candidates(8) == [SLOW, FAST]
    assert problem.candidates(1) == [SLOW]


def test_a_table_is_read_by_the_library_version_it_was_written_for(
    blas: Blas, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(product_table, "FOLDER", tmp_path / "tables")
    file, lib = product_table.path("NVIDIA Test"), cublaslt.Library(DEVICE, blas)
    assert product_table.load(DEVICE, lib) is None
    words = [f"{word:x}" for word in FAST]
    product_table.write(file, "NVIDIA Test", VERSION, {"bfloat16 24 64": {"40": words, "80": None}}, {"date": "2026-11-30"})
    product_table.write(file, "NVIDIA Test", VERSION, {"bfloat16 32 64": {"40": words}}, {"date": "2026-12-01"})
    stored = json.loads(file.read_text())
    assert list(stored["products"]) == ["bfloat16 24 64", "bfloat16 32 64"] and stored["measured"] == {"date": "2026-12-01"}
    product_table.write(file, "NVIDIA Test", VERSION, {"bfloat16 32 64": {"8": None, "40": None}}, {})
    assert json.loads(file.read_text())["products"]["bfloat16 32 64"] == {"8": None, "40": None}, "in the order of rows"
    product_table.write(file, "NVIDIA Test", VERSION, {"bfloat16 24 64": {"16": None}}, {})
    assert list(json.loads(file.read_text())["products"]["bfloat16 24 64"].items()) == [("16", None), ("40", words), ("80", None)]
    x, weight = torch.ones(40, 64).bfloat16(), torch.ones(24, 64).bfloat16()
    table = product_table.load(DEVICE, lib)
    assert table is not None
    monkeypatch.setattr(products, "_table", table)
    assert products.linear(x, weight).eq(64).all() and blas.ran == [7]
    product_table.write(file, "NVIDIA Test", VERSION + 1, {"bfloat16 32 64": {"40": words}}, {})
    assert list(json.loads(file.read_text())["products"]) == ["bfloat16 32 64"]
    assert product_table.load(DEVICE, lib) is None


def hopper(monkeypatch: pytest.MonkeyPatch) -> list[tuple[FewRows, bool]]:
    """From here on launches of our own run here; which did, and whether they added."""
    ran: list[tuple[FewRows, bool]] = []

    def launched(config: FewRows, add: bool = False) -> product_table.Run:
        def run(x: torch.Tensor, weight: torch.Tensor, out: torch.Tensor) -> None:
            ran.append((config, add))
            out.copy_(x.float() @ weight.float().t() + (out.float() if add else 0.0))

        return run

    monkeypatch.setattr(product_table, "few_rows_run", launched)
    monkeypatch.setattr(configs, "is_hopper", lambda device: True)
    return ran


def test_a_launch_of_our_own_is_taken_where_the_table_says_so(blas: Blas, monkeypatch: pytest.MonkeyPatch) -> None:
    ran = hopper(monkeypatch)
    entries: product_table.Entries = {("torch.bfloat16", 64, 128): {32: FewRows(), 64: FewRows(11), 160: FAST}}
    table = product_table.ProductTable(cublaslt.Library(DEVICE, blas), entries)
    weight = torch.randn(64, 128).bfloat16()
    for rows, config in ((17, FewRows()), (33, FewRows(11)), (64, FewRows(11)), (65, None)):
        x, residual = torch.randn(rows, 128).bfloat16(), torch.randn(rows, 64).bfloat16()
        want = residual.float() + x.float() @ weight.float().t()
        assert table.linear(x, weight, residual.clone()) is not None
        assert table.linear_add(x, weight, residual) is residual
        torch.testing.assert_close(residual.float(), want, rtol=2e-2, atol=1e-1)
        assert ran == ([] if config is None else [(config, False), (config, True)])
        ran.clear()
    assert blas.ran == [7, 7]


def test_a_launch_that_this_gpu_cannot_take_is_left_to_torch(blas: Blas, monkeypatch: pytest.MonkeyPatch) -> None:
    """More rows than two warpgroups have, weights that no box fits, no Hopper."""
    ran = hopper(monkeypatch)

    def taken(rows: int = 40, columns: int = 512, depth: int = 576) -> bool:
        entries: product_table.Entries = {("torch.bfloat16", columns, depth): {rows: FewRows()}}
        table = product_table.ProductTable(cublaslt.Library(DEVICE, blas), entries)
        return table.linear(torch.ones(rows, depth).bfloat16(), torch.ones(columns, depth).bfloat16()) is not None

    assert taken() and taken(rows=128) and len(ran) == 2
    assert not taken(rows=129) and not taken(columns=520) and not taken(depth=608)
    monkeypatch.setattr(configs, "is_hopper", lambda device: False)
    assert not taken() and len(ran) == 2


def test_launches_of_our_own_are_kept_in_the_table(blas: Blas, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(product_table, "FOLDER", tmp_path)
    ran, ours = hopper(monkeypatch), FewRows(11)
    file, lib = product_table.path("NVIDIA Test"), cublaslt.Library(DEVICE, blas)
    found = {"bfloat16 32 64": {str(rows): product_table.stored(choice) for rows, choice in ((8, FAST), (40, ours), (80, None))}}
    product_table.write(file, "NVIDIA Test", VERSION, found, {})
    assert json.loads(file.read_text())["products"]["bfloat16 32 64"]["40"] == {"few_rows": {"turn": 11}}
    table = product_table.load(DEVICE, lib)
    assert table is not None and table.measured(32, 64, torch.bfloat16) == {8: FAST, 40: ours, 80: None}
    alone = product_table.few_rows_only("NVIDIA Test")
    assert alone is not None and product_table.few_rows_only("NVIDIA Other") is None
    x, weight = torch.ones(40, 64).bfloat16(), torch.ones(32, 64).bfloat16()
    assert alone.linear(x, weight) is not None and alone.linear(x[:8], weight) is None, "no library to run that"
    assert ran == [(ours, False)] and not blas.ran


def test_gate_and_up_take_one_launch_where_the_table_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of rows with a factor and without; elsewhere the product is left to the table, and SiLU·mul to a launch of its own."""
    hopper(monkeypatch)
    ran: list[tuple[FewRows, int, float | None]] = []

    def launched(config: FewRows, scratch: few_rows.Scratch) -> product_table.Gated:
        assert scratch.factors.shape == (few_rows.MOST_ROWS,) and not scratch.counters.any()

        def run(x: torch.Tensor, weight: torch.Tensor, out: torch.Tensor, eps: float | None) -> None:
            ran.append((config, len(x), eps))
            out.copy_(reference.linear_silu_mul(x.float(), weight.float(), eps))

        return run

    monkeypatch.setattr(product_table, "gated_run", launched)
    entries: product_table.Entries = {("torch.bfloat16", 64, 128): {32: FewRows(), 64: None, 128: FewRows(11), 160: FewRows()}}
    table = product_table.ProductTable(None, {}, entries, DEVICE)
    weight = torch.randn(64, 128).bfloat16() / 8
    for rows, config in ((15, None), (17, FewRows()), (33, None), (65, FewRows(11)), (129, None), (161, None)):
        x = 3 * torch.randn(rows, 128).bfloat16()
        for eps in (None, 1e-5):
            got = table.linear_silu_mul(x, weight, eps)
            assert ran == ([] if config is None else [(config, rows, eps)])
            if got is not None:
                torch.testing.assert_close(got, reference.linear_silu_mul(x, weight, eps), rtol=2e-2, atol=2e-2)
            ran.clear()
    assert table.linear_silu_mul(torch.ones(128, 20).bfloat16().t().contiguous().t()[:20], weight[:, :20]) is None
    assert table.linear_silu_mul(torch.ones(128, 32).bfloat16().t(), weight) is None, "not contiguous"
    assert product_table.ProductTable(None, {}, entries).linear_silu_mul(torch.ones(32, 128).bfloat16(), weight) is None, "no scratch"
    monkeypatch.setattr(products, "_table", table)
    for rows in (2, 20, 40):
        x = 3 * torch.randn(rows, 128).bfloat16()
        for eps in (None, 1e-5):
            got = products.linear_silu_mul(x, weight, eps)
            torch.testing.assert_close(got, reference.linear_silu_mul(x, weight, eps), rtol=2e-2, atol=2e-2)
    assert [rows for _, rows, _ in ran] == [20, 20]


def test_gated_launches_are_kept_beside_products(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(product_table, "FOLDER", tmp_path)
    file, gated = product_table.path("NVIDIA Test"), {"bfloat16 64 128": {"32": product_table.stored(FewRows(11)), "64": None}}
    product_table.write(file, "NVIDIA Test", VERSION, {"bfloat16 32 64": {"8": product_table.stored(FAST)}}, {})
    product_table.write(file, "NVIDIA Test", VERSION, {}, {}, gated)
    product_table.write(file, "NVIDIA Test", VERSION, {}, {}, {"bfloat16 64 128": {"16": None}})
    kept = json.loads(file.read_text())
    assert kept["gated"] == {"bfloat16 64 128": {"16": None, "32": {"few_rows": {"turn": 11}}, "64": None}} and kept["products"]
    alone = product_table.few_rows_only("NVIDIA Test")
    assert alone is not None and alone.gated(30, 64, 128, torch.bfloat16) == FewRows(11)
    assert alone.gated(16, 64, 128, torch.bfloat16) is None and alone.gated(32, 64, 128, torch.float16) is None
    product_table.write(file, "NVIDIA Test", VERSION + 1, {}, {})
    assert not json.loads(file.read_text())["gated"], "of another version of the library"


@pytest.mark.parametrize("kept", [{"few_rows": {"turn": -1}}, {"few_rows": {"width": 2}}, {"few_rows": 11}, {"rows": {}}])
def test_a_table_with_a_launch_that_is_none_is_refused(kept: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="bfloat16 32 64, 40 rows"):
        product_table.parsed({"bfloat16 32 64": {"40": kept}})


def test_the_tables_here_are_read() -> None:
    """With launches of our own among them, which few rows alone may have."""
    ours = 0
    for file in product_table.FOLDER.glob("products_*.json"):
        for by_rows in product_table.parsed(json.loads(file.read_text())["products"]).values():
            rows_of_ours = [rows for rows, choice in by_rows.items() if isinstance(choice, FewRows)]
            assert all(few_rows.fits(rows) for rows in rows_of_ours), file
            ours += len(rows_of_ours)
    assert ours


def test_what_is_compiled_ahead_is_every_launch_of_the_weights_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    ran = hopper(monkeypatch)
    entries: product_table.Entries = {
        ("torch.bfloat16", 64, 128): {16: FewRows(), 128: FewRows(11), 256: FAST}, ("torch.bfloat16", 64, 256): {16: FewRows(5)},
    }  # fmt: skip
    monkeypatch.setattr(products, "_table", product_table.ProductTable(None, entries))
    products.linear_add(*(torch.zeros(shape).bfloat16() for shape in ((16, 128), (64, 128), (16, 64))))
    assert ran == [(FewRows(), True)]
    products.launch_ours()
    assert ran[1:] and set(ran) == {(FewRows(), True), (FewRows(11), True)}


def test_a_refusal_names_the_call(blas: Blas) -> None:
    with pytest.raises(cublaslt.BlasError, match="cublasLtMatmulAlgoCheck gave status 15"):
        lib = cublaslt.Library(DEVICE, blas)
        problem = cublaslt.Problem(lib, 40, 24, 64, torch.bfloat16)
        algo = cublaslt.Algo.of(BROKEN)
        checked = (problem.operation, *problem.layouts(), ctypes.byref(algo), ctypes.byref(cublaslt._Heuristic()))
        lib.call("cublasLtMatmulAlgoCheck", lib.handle, *checked)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_every_candidate_of_the_real_library_gives_the_product() -> None:
    lib = cublaslt.Library(torch.device("cuda"))
    for rows, columns, depth in ((40, 768, 576), (256, 6144, 4096)):
        x, weight = (torch.randn(n, depth, device="cuda").bfloat16() for n in (rows, columns))
        want = reference.linear(x.double(), weight.double())
        problem = cublaslt.Problem(lib, rows, columns, depth, torch.bfloat16)
        runnable = [algo for algorithm in problem.candidates(16) if (algo := problem.algo(algorithm)) is not None]
        assert runnable
        for algo in runnable:
            out = torch.full((rows, columns), torch.nan, device="cuda", dtype=torch.bfloat16)
            cublaslt.Product(lib, problem, algo)(x, weight, out)
            assert torch.linalg.norm(out.double() - want) <= 8e-3 * torch.linalg.norm(want)
