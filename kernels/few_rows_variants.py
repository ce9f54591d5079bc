"""Launches of products of few rows that compile_check compiles."""

from collections.abc import Callable, Iterator

import torch

from pagecast_kernels import few_rows, few_rows_hopper

SHAPES = ((28672, 4096), (6144, 4096), (4096, 4096))
"""Gate and up, query, key and value, and output of the 8B shape: tiles that are whole, and cut into two and four."""


def few_rows_variants() -> Iterator[tuple[str, Callable[[], object]]]:
    """Every launch that one of these products may take on an H200, for one warpgroup and two; output is added to a residual, too."""
    work, seen = few_rows.Workspace(torch.zeros(16, dtype=torch.int32), torch.zeros(16)), set[str]()
    for columns, depth in SHAPES:
        for rows in (64, 128):
            x, weight, out = (
                torch.empty(shape, dtype=torch.bfloat16, device="meta") for shape in ((rows, depth), (columns, depth), (rows, columns))
            )
            for config in few_rows.candidates(rows, columns, depth, 132):
                for add in (False, True) if columns == depth else (False,):
                    name = f"few_rows {config.columns} x{config.pieces}{' add' * add} m{rows}"
                    if name not in seen:
                        seen.add(name)
                        yield name, lambda x=x, w=weight, out=out, c=config, add=add: few_rows_hopper.launch(x, w, out, work, c, add)
