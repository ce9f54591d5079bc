"""Which algorithm of cuBLASLt or launch of `few_rows` a product takes, as measured by `pagecast bench kernels --tune` and kept in tables/
in this package.

Gate and up products with SiLU·mul have entries of their own: launches of `few_rows` that do both, where that is faster than the product's
own choice and a launch of silu_mul.

A table belongs to one kind of GPU and one version of the library; elsewhere torch's own choice stays. Between two measured numbers of
rows the larger one's algorithm is taken; below half of the smallest and above the largest, torch's choice stays too.
"""

import bisect
import dataclasses
import functools
import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from pagecast_kernels import few_rows
from pagecast_kernels.cublaslt import Algorithm, BlasError, Library, Problem, Product
from pagecast_kernels.few_rows import FewRows

FOLDER = Path(__file__).parent / "tables"
Choice = Algorithm | FewRows | None
"""An algorithm of the library's, a launch of our own, or torch's choice where that was as fast."""
Run = Callable[[Tensor, Tensor, Tensor], object]
"""A product: input, weight, output."""
Gated = Callable[[Tensor, Tensor, Tensor, float | None], object]
"""The same with SiLU·mul, and epsilon where rows are to be multiplied by RMSNorm's factor."""
_Measured = tuple[list[int], dict[int, Choice]]
Entries = Mapping[tuple[str, int, int], Mapping[int, Choice]]
"""For (dtype, columns, depth) what was found, by measured numbers of rows."""


def path(device_name: str) -> Path:
    """Of the table for a GPU that torch calls by this name."""
    return FOLDER / f"products_{'_'.join(device_name.lower().split())}.json"


class ProductTable:
    """Choices by shape and rows, and the products made of them so far."""

    def __init__(self, lib: Library | None, entries: Entries, gated: Entries | None = None, device: torch.device | None = None) -> None:
        """lib: None where its algorithms are not to be run. gated: entries of gate and up products with SiLU·mul, which need a device."""
        self._lib = lib
        self._entries, self._gated = _in_order(entries), _in_order(gated or {})
        self._scratch = few_rows.scratch(device) if device is not None else None
        self._made: dict[tuple[bool, int, int, int, torch.dtype], Run | None] = {}
        self._made_gated: dict[tuple[bool, int, int, int, torch.dtype], Gated | None] = {}

    def measured(self, columns: int, depth: int, dtype: torch.dtype) -> Mapping[int, Choice]:
        """What was found for weights of this shape, by rows."""
        return self._entries.get((str(dtype), columns, depth), ([], {}))[1]

    def choice(self, rows: int, columns: int, depth: int, dtype: torch.dtype) -> Choice:
        """The one to take, if it can be run; None where torch's choice stays."""
        return _chosen(self._entries.get((str(dtype), columns, depth)), rows)

    def gated(self, rows: int, columns: int, depth: int, dtype: torch.dtype) -> FewRows | None:
        """The launch that takes a gate and up product with SiLU·mul, of a weight with so many columns; None where that takes two."""
        choice = _chosen(self._gated.get((str(dtype), columns, depth)), rows)
        return choice if isinstance(choice, FewRows) else None

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

    def linear_silu_mul(self, x: Tensor, weight: Tensor, eps: float | None = None) -> Tensor | None:
        """silu_mul(x[T, K] · weight[2 I, K]ᵀ), all contiguous, in one launch; None where that is not the fastest. eps: see Gated."""
        key = (eps is not None, x.shape[0], *weight.shape, x.dtype)
        if key not in self._made_gated:
            self._made_gated[key] = self._make_gated(*key[1:], weight)
        product = self._made_gated[key]
        if product is None or not x.is_contiguous():
            return None
        out = x.new_empty((x.shape[0], weight.shape[0] // 2))
        product(x, weight, out, eps)
        return out

    def _make_gated(self, rows: int, columns: int, depth: int, dtype: torch.dtype, weight: Tensor) -> Gated | None:
        choice = self.gated(rows, columns, depth, dtype)
        if choice is None or self._scratch is None or not few_rows.fits(rows) or not few_rows.suits(weight):
            return None
        return gated_run(choice, self._scratch)

    def launch_ours(self) -> None:
        """Every launch of our own for the weights that there were products with so far, by however many rows, on tensors without memory."""
        for scaled, columns, depth, dtype in dict.fromkeys((key[0], *key[2:]) for key in self._made_gated):
            x, weight = (torch.empty((n, depth), dtype=dtype, device="meta") for n in (few_rows.MOST_ROWS, columns))
            for rows in {*self._gated.get((str(dtype), columns, depth), ([], {}))[0], few_rows.ROWS, few_rows.MOST_ROWS}:
                self.linear_silu_mul(x[:rows], weight, 1.0 if scaled else None)
        for add, columns, depth, dtype in dict.fromkeys((key[0], *key[2:]) for key in self._made):
            x, weight, out = (
                torch.empty(shape, dtype=dtype, device="meta")
                for shape in ((few_rows.MOST_ROWS, depth), (columns, depth), (few_rows.MOST_ROWS, columns))
            )
            for rows in {*self.measured(columns, depth, dtype), few_rows.ROWS}:
                if isinstance(self.choice(rows, columns, depth, dtype), FewRows):
                    (self.linear_add if add else self.linear)(x[:rows], weight, out[:rows])

    def _product(self, add: bool, x: Tensor, weight: Tensor) -> Run | None:
        key = (add, x.shape[0], *weight.shape, x.dtype)
        if key not in self._made:
            self._made[key] = self._make(*key, weight)
        return self._made[key] if x.is_contiguous() else None

    def _make(self, add: bool, rows: int, columns: int, depth: int, dtype: torch.dtype, weight: Tensor) -> Run | None:
        choice = self.choice(rows, columns, depth, dtype)
        if isinstance(choice, FewRows):
            return few_rows_run(choice, add) if few_rows.fits(rows) and few_rows.suits(weight) else None
        if choice is None or self._lib is None:
            return None
        problem = Problem(self._lib, rows, columns, depth, dtype)
        algo = problem.algo(choice)
        return None if algo is None else Product(self._lib, problem, algo, add=add)


def few_rows_run(config: FewRows, add: bool = False) -> Run:
    """A product by a launch of our own."""
    from pagecast_kernels import few_rows_hopper  # Gluon, which only Hopper needs

    return functools.partial(few_rows_hopper.launch, config=config, add=add)


def gated_run(config: FewRows, scratch: few_rows.Scratch) -> Gated:
    """A gate and up product with SiLU·mul by a launch of our own."""
    from pagecast_kernels import few_rows_hopper

    return functools.partial(few_rows_hopper.launch_gated, config=config, scratch=scratch)


def _in_order(entries: Entries) -> dict[tuple[str, int, int], _Measured]:
    return {key: (sorted(by_rows), dict(by_rows)) for key, by_rows in entries.items()}


def _chosen(entry: _Measured | None, rows: int) -> Choice:
    """Of the next larger measured number of rows; None past the largest and below half of the smallest."""
    measured, by_rows = entry or ([], {})
    place = bisect.bisect_left(measured, rows)
    return by_rows[measured[place]] if place < len(measured) and rows >= measured[0] // 2 else None


def load(device: torch.device, library: Library | None = None) -> ProductTable | None:
    """The table of this device and library; None where there is none, or no cuBLASLt to ask."""
    file = path(torch.cuda.get_device_name(device))
    if not file.exists():
        return None
    kept = json.loads(file.read_text())
    try:
        lib = library or Library(device)
    except (OSError, BlasError):
        return None
    if lib.version != kept["library"]:
        return None
    return ProductTable(lib, parsed(kept["products"]), parsed(kept.get("gated", {})), device)


def few_rows_only(device_name: str) -> ProductTable | None:
    """What of the table for a GPU of this name needs no library, to see its launches where the GPU is not; None where there is no table."""
    file = path(device_name)
    if not file.exists():
        return None
    kept = json.loads(file.read_text())
    return ProductTable(None, parsed(kept["products"]), parsed(kept.get("gated", {})), torch.device("meta"))


def parsed(products: Mapping[str, Mapping[str, Any]]) -> dict[tuple[str, int, int], dict[int, Choice]]:
    """The entries of a table's JSON: {"bfloat16 N K": {rows: eight hexadecimal words, {"few_rows": a launch}, or null}}. Raises ValueError
    where a launch is none."""
    entries: dict[tuple[str, int, int], dict[int, Choice]] = {}
    for name, by_rows in products.items():
        dtype, columns, depth = name.split()
        entries[f"torch.{dtype}", int(columns), int(depth)] = {int(rows): _parsed(name, rows, kept) for rows, kept in by_rows.items()}
    return entries


def _parsed(name: str, rows: str, kept: Any) -> Choice:
    if not isinstance(kept, dict):
        return tuple(int(word, 16) for word in kept) if kept else None
    try:
        return FewRows(**kept["few_rows"])
    except (KeyError, TypeError, ValueError) as error:
        raise ValueError(f"table of products, {name}, {rows} rows: {kept} is no launch: {error}") from None


def stored(choice: Choice) -> Any:
    """A choice as a table's JSON holds it."""
    if isinstance(choice, FewRows):
        return {"few_rows": dataclasses.asdict(choice)}
    return [f"{word:x}" for word in choice] if choice else None


def write(
    file: Path, device_name: str, version: int, products: Mapping[str, Any], note: Mapping[str, Any], gated: Mapping[str, Any] | None = None
) -> None:
    """Put measured products into a table, over those of the same shape and rows there; a table of another library version is replaced.

    note: who measured what and when, as benchmarks/results files say it.
    """
    kept = json.loads(file.read_text()) if file.exists() else {}
    old = kept if kept.get("library") == version else {}
    file.parent.mkdir(exist_ok=True)
    merged = {"products": _merged(old.get("products", {}), products), "gated": _merged(old.get("gated", {}), gated or {})}
    table = {"device": device_name, "library": version, "measured": dict(note), **merged}
    file.write_text(json.dumps(table, indent=1) + "\n")


def _merged(old: Mapping[str, Any], new: Mapping[str, Any]) -> dict[str, Any]:
    return {**old, **{shape: dict(sorted({**old.get(shape, {}), **by_rows}.items(), key=_rows)) for shape, by_rows in new.items()}}


def _rows(entry: tuple[str, Any]) -> int:
    return int(entry[0])
