"""Which algorithm of cuBLASLt a product takes, as measured by `pagecast bench kernels --tune` and kept in tables/ in this package.

A table belongs to one kind of GPU and one version of the library; elsewhere torch's own choice stays. Between two measured numbers of
rows the larger one's algorithm is taken; below half of the smallest and above the largest, torch's choice stays too.
"""

import bisect
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from pagecast_kernels.cublaslt import Algorithm, BlasError, Library, Problem, Product

FOLDER = Path(__file__).parent / "tables"


def path(device_name: str) -> Path:
    """Of the table for a GPU that torch calls by this name."""
    return FOLDER / f"products_{'_'.join(device_name.lower().split())}.json"


class ProductTable:
    """Algorithms by shape and rows, and the products made of them so far."""

    def __init__(self, lib: Library, entries: Mapping[tuple[str, int, int], Mapping[int, Algorithm | None]]) -> None:
        """entries: for (dtype, columns, depth) the measured numbers of rows; None where torch's choice was as fast."""
        self._lib = lib
        self._entries = {key: (sorted(by_rows), dict(by_rows)) for key, by_rows in entries.items()}
        self._made: dict[tuple[bool, int, int, int, torch.dtype], Product | None] = {}

    def measured(self, columns: int, depth: int, dtype: torch.dtype) -> Mapping[int, Algorithm | None]:
        """What was found for weights of this shape, by rows."""
        return self._entries.get((str(dtype), columns, depth), ([], {}))[1]

    def algorithm(self, rows: int, columns: int, depth: int, dtype: torch.dtype) -> Algorithm | None:
        """The one to take, if the library can run it; None where torch's choice stays."""
        measured, by_rows = self._entries.get((str(dtype), columns, depth), ([], {}))
        place = bisect.bisect_left(measured, rows)
        return by_rows[measured[place]] if place < len(measured) and rows >= measured[0] // 2 else None

    def linear(self, x: Tensor, weight: Tensor, out: Tensor | None = None) -> Tensor | None:
        """x[T, K] · weight[N, K]ᵀ, all contiguous; None where there is nothing better than torch's choice."""
        product = self._product(False, x, weight)
        if product is None:
            return None
        out = x.new_empty((x.shape[0], weight.shape[0])) if out is None else out
        product(x, weight, out)
        return out

    def linear_add(self, x: Tensor, weight: Tensor, residual: Tensor) -> Tensor | None:
        """residual += x[T, K] · weight[N, K]ᵀ, in place, all contiguous; None, and nothing done, where that is left to torch."""
        product = self._product(True, x, weight)
        if product is None:
            return None
        try:
            product(x, weight, residual)
        except BlasError:  # the library checks an algorithm for a product, not for a sum with one
            self._made[True, x.shape[0], *weight.shape, x.dtype] = None
            return None
        return residual

    def _product(self, add: bool, x: Tensor, weight: Tensor) -> Product | None:
        key = (add, x.shape[0], *weight.shape, x.dtype)
        if key not in self._made:
            self._made[key] = self._make(*key)
        return self._made[key] if x.is_contiguous() else None

    def _make(self, add: bool, rows: int, columns: int, depth: int, dtype: torch.dtype) -> Product | None:
        algorithm = self.algorithm(rows, columns, depth, dtype)
        if algorithm is None:
            return None
        problem = Problem(self._lib, rows, columns, depth, dtype)
        algo = problem.algo(algorithm)
        return None if algo is None else Product(self._lib, problem, algo, add=add)


def load(device: torch.device, library: Library | None = None) -> ProductTable | None:
    """The table of this device and library; None where there is none, or no cuBLASLt to ask."""
    file = path(torch.cuda.get_device_name(device))
    if not file.exists():
        return None
    stored = json.loads(file.read_text())
    try:
        lib = library or Library(device)
    except (OSError, BlasError):
        return None
    if lib.version != stored["library"]:
        return None
    return ProductTable(lib, parsed(stored["products"]))


def parsed(products: Mapping[str, Mapping[str, list[str] | None]]) -> dict[tuple[str, int, int], dict[int, Algorithm | None]]:
    """The entries of a table's JSON: {"bfloat16 N K": {rows: eight hexadecimal words, or null}}."""
    entries = {}
    for name, by_rows in products.items():
        dtype, columns, depth = name.split()
        entries[f"torch.{dtype}", int(columns), int(depth)] = {
            int(rows): tuple(int(word, 16) for word in words) if words else None for rows, words in by_rows.items()
        }
    return entries


def write(file: Path, device_name: str, version: int, products: Mapping[str, Any], note: Mapping[str, Any]) -> None:
    """Put measured products into a table, over those of the same shape and rows there; a table of another library version is replaced.

    note: who measured what and when, as benchmarks/results files say it.
    """
    kept = json.loads(file.read_text()) if file.exists() else {}
    old = kept["products"] if kept.get("library") == version else {}
    file.parent.mkdir(exist_ok=True)
    merged = {**old, **{shape: dict(sorted({**old.get(shape, {}), **by_rows}.items(), key=_rows)) for shape, by_rows in products.items()}}
    table = {"device": device_name, "library": version, "measured": dict(note), "products": merged}
    file.write_text(json.dumps(table, indent=1) + "\n")


def _rows(entry: tuple[str, Any]) -> int:
    return int(entry[0])
