"""Launches of products of few rows that compile_check compiles."""

from collections.abc import Callable, Iterator

import torch

from pagecast_kernels import few_rows, few_rows_hopper


def few_rows_variants() -> Iterator[tuple[str, Callable[[], object]]]:
    """For one warpgroup and two: plain, added to a residual, gated, and gated of rows that are not normed."""
    scratch = few_rows.scratch(torch.device("meta"))
    for rows in (few_rows.ROWS, few_rows.MOST_ROWS):
        x, weight, out = (torch.empty(shape, dtype=torch.bfloat16, device="meta") for shape in ((rows, 4096), (28672, 4096), (rows, 28672)))
        for add in (False, True):
            name = f"few_rows{' add' * add} m{rows}"
            yield name, lambda x=x, w=weight, out=out, add=add: few_rows_hopper.launch(x, w, out, few_rows.FewRows(), add)
        gated = torch.empty((rows, 14336), dtype=torch.bfloat16, device="meta")
        for eps in (None, 1e-5):
            name = f"few_rows gated{' scaled' * (eps is not None)} m{rows}"
            yield name, lambda x=x, w=weight, out=gated, eps=eps: few_rows_hopper.launch_gated(x, w, out, eps, few_rows.FewRows(), scratch)
