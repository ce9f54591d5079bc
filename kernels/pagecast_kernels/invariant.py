"""Operators whose result for a row does not depend on what other rows there are: the same bits alone and in any company.

The products of a library change with the number of rows, by tile and by how K is split; here one tile serves all, and K is added up in
one order. Decoding goes through the prefill kernel, whose arithmetic for a query is the same whether it comes alone, in a chunk, or in
a batch, so tokens that are computed again after a preemption give the same KV too.
"""

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from pagecast_kernels import configs
from pagecast_kernels.prefill import paged_prefill

_ROWS, _COLUMNS, _DEPTH, _STAGES, _WARPS = 128, 64, 64, 4, 4
_GROUP = 8  # tiles of rows that go over the same columns before the next ones
CUT_SLICES = 4
"""Programs per row of `sample`, whose sums of probabilities depend on it."""


@triton.jit
def _invariant_linear(
    x_ptr, weight_ptr, bias_ptr, out_ptr, M, N, K,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, DEPTH: tl.constexpr, STAGES: tl.constexpr, GROUP: tl.constexpr, BIAS: tl.constexpr,
):  # fmt: skip
    row_tiles, column_tiles = tl.cdiv(M, ROWS), tl.cdiv(N, COLUMNS)
    # Neighbouring programs share weights and inputs in L2.
    first = tl.program_id(0) // (GROUP * column_tiles) * GROUP
    height = tl.minimum(row_tiles - first, GROUP)
    inside = tl.program_id(0) % (GROUP * column_tiles)
    row = (first + inside % height) * ROWS + tl.arange(0, ROWS)
    column = inside // height * COLUMNS + tl.arange(0, COLUMNS)
    depth = tl.arange(0, DEPTH)
    x = x_ptr + tl.minimum(row, M - 1).to(tl.int64)[:, None] * K + depth[None, :]
    weight = weight_ptr + tl.minimum(column, N - 1).to(tl.int64)[None, :] * K + depth[:, None]
    acc = tl.zeros((ROWS, COLUMNS), tl.float32)
    for k in tl.range(0, K, DEPTH, num_stages=STAGES):
        left = k + depth < K
        acc = tl.dot(tl.load(x, left[None, :], 0.0), tl.load(weight, left[:, None], 0.0), acc, input_precision="ieee")
        x += DEPTH
        weight += DEPTH
    if BIAS:
        acc += tl.load(bias_ptr + column, column < N, 0.0).to(tl.float32)[None, :]
    target = out_ptr + row.to(tl.int64)[:, None] * N + column[None, :]
    tl.store(target, acc.to(out_ptr.dtype.element_ty), (row < M)[:, None] & (column < N)[None, :])


def invariant_linear(x: Tensor, weight: Tensor, bias: Tensor | None = None, out: Tensor | None = None) -> Tensor:
    """See reference.linear; x[M, K], weight[N, K] and out are contiguous."""
    (rows, depth), columns = x.shape, weight.shape[0]
    out = torch.empty((rows, columns), dtype=x.dtype, device=x.device) if out is None else out
    if rows:
        grid = (triton.cdiv(rows, _ROWS) * triton.cdiv(columns, _COLUMNS),)
        _invariant_linear[grid](
            x, weight, bias, out, rows, columns, depth, _ROWS, _COLUMNS, configs.depth_of(_DEPTH, x.element_size()), _STAGES, _GROUP,
            bias is not None, num_warps=_WARPS,
        )  # fmt: skip
    return out


class InvariantDecode:
    """Decode attention through paged_prefill: each sequence with a length is a chunk of one token.

    Rows of padding come last. Where each chunk starts is found once a step, which is known by its `seq_lens` tensor.
    """

    def __init__(self) -> None:
        self._seq_lens: Tensor | None = None
        self._starts: Tensor | None = None

    def __call__(
        self, q: Tensor, k_cache: Tensor, v_cache: Tensor, block_table: Tensor, rows: Tensor, seq_lens: Tensor, scale: float,
        *, out: Tensor | None = None, **looks: Any,
    ) -> Tensor:  # fmt: skip
        """See reference.paged_decode; but in an `out` that is given, places without tokens stay as they are."""
        if self._starts is None or seq_lens is not self._seq_lens:
            self._starts = torch.nn.functional.pad((seq_lens > 0).cumsum(0, dtype=torch.int32), (1, 0))
            self._seq_lens = seq_lens
        out = torch.zeros_like(q) if out is None else out
        return paged_prefill(
            q, k_cache, v_cache, block_table, rows, self._starts, seq_lens, scale, max_query_len=1, out=out, **looks
        )  # fmt: skip
