"""`pagecast bench kernels --tune`: which gate and up products one launch of our own does faster, with SiLU·mul and RMSNorm's factor, than
a product by the table's choice and a launch of silu_mul."""

from collections.abc import Callable, Iterable, Mapping
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from pagecast_kernels import bench_cases, configs, elementwise, few_rows, product_table, products, reference, tune_products
from pagecast_kernels.few_rows import FewRows
from pagecast_kernels.tune_products import GAIN, Shape

EPS = 1e-5
ROUNDS, LEAST_US = 12, 1000.0


class FoundGated(NamedTuple):
    """The outcome for a shape and number of rows; microseconds of product and SiLU·mul."""

    choice: FewRows | None
    """None where two launches are as good."""
    us: float
    two_us: float
    wrong: int


def find(rows: int, weights: list[Tensor], scratch: few_rows.Scratch) -> FoundGated:
    """weights: [2 I, K] each, more than the L2 cache holds."""
    x = torch.randn((rows, weights[0].shape[1]), dtype=weights[0].dtype, device=weights[0].device)
    out = x.new_empty((rows, weights[0].shape[0] // 2))
    want = reference.linear_silu_mul(x.float(), weights[0].float(), EPS)
    entered: dict[FewRows | None, list[bench_cases.Launch]] = {None: [partial(_in_two, x, weight) for weight in weights]}
    wrong = 0
    for launch in few_rows.candidates(rows, len(weights[0]), configs.processors(x.device)):
        run = product_table.gated_run(launch, scratch)
        out.fill_(torch.nan)
        run(x, weights[0], out, EPS)
        if tune_products.agrees(out, want, want.abs().max()):  # products of two numbers reach further beyond their mean
            entered[launch] = [partial(run, x, weight, out, EPS) for weight in weights]
        else:
            wrong += 1
    us = bench_cases.in_turn(entered, rounds=ROUNDS, least_us=LEAST_US) if len(entered) > 1 else {None: 0.0}
    best = min(us, key=us.__getitem__)
    return FoundGated(*((best, us[best]) if us[best] <= GAIN * us[None] else (None, us[None])), us[None], wrong)


def _in_two(x: Tensor, weight: Tensor) -> Tensor:
    return elementwise.silu_mul(products.linear(x, weight), residual=x, eps=EPS)


def tune(
    shapes: Iterable[Shape], rows: Iterable[int], report: Callable[[str], None] = print
) -> dict[Shape, dict[int, FoundGated]]:  # fmt: skip
    """What is best for bf16 gate and up weights of these shapes by those of these rows that a launch of our own can take."""
    device = torch.device("cuda", torch.cuda.current_device())
    products.prepare(device)
    scratch, found = few_rows.scratch(device), dict[Shape, dict[int, FoundGated]]()
    for columns, depth in shapes:
        weights = [weight * depth**-0.5 for weight in tune_products.copies(columns, depth, torch.bfloat16, str(device))]
        by_rows = found[columns, depth] = {}
        for count in filter(few_rows.fits, rows) if few_rows.suits(weights[0]) else ():
            best = by_rows[count] = find(count, weights, scratch)
            report(f"{columns} x {depth} gated, {count} rows: {best.us:.1f} us, in two launches {best.two_us:.1f} us, {best.wrong} wrong")
    return found


def metrics(found: Mapping[Shape, Mapping[int, FoundGated]]) -> dict[str, float]:
    """How much longer two launches take."""
    return {
        f"kernels.tune.gated.{columns}x{depth}.M{rows}.ratio": best.two_us / best.us
        for (columns, depth), by_rows in found.items() for rows, best in by_rows.items() if best.us
    }  # fmt: skip


def gated_json(found: Mapping[Shape, Mapping[int, FoundGated]]) -> dict[str, dict[str, Any]]:
    """As product_table.write takes them."""
    return {
        f"bfloat16 {columns} {depth}": {str(rows): product_table.stored(best.choice) for rows, best in by_rows.items()}
        for (columns, depth), by_rows in found.items() if by_rows
    }  # fmt: skip
