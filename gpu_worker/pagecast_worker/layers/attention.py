"""Grouped-query attention over the paged cache: fused projection, rotation and cache write, then decode and prefill kernels."""

from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor

from pagecast_worker.layers.linear import ColumnParallel, RowParallel
from pagecast_worker.layers.side_by_side import side_by_side
from pagecast_worker.layers.step_inputs import StepInputs


@dataclass(slots=True)
class Attention:
    """One layer's attention on one rank; num_heads and num_kv_heads are this rank's.

    qkv's weight is [(Hq + 2 Hkv) D, H], split by heads; output's [H, Hq D], so its product is one summand over ranks.
    q_norm, k_norm [D]: norms of each head. cos_sin: this layer's angles. window: how many tokens it sees, 0: all.
    kv_scales: k_scale and v_scale float32[Hkv], where the cache has 8 bits.
    """

    qkv: ColumnParallel
    output: RowParallel
    num_heads: int
    num_kv_heads: int
    head_dim: int
    scale: float
    cos_sin: Tensor
    window: int = 0
    softcap: float = 0.0
    eps: float = 1e-6
    q_norm: Tensor | None = None
    k_norm: Tensor | None = None
    kv_scales: dict[str, Tensor] = field(default_factory=dict)

    def forward(
        self, ops: Any, x: Tensor, step: StepInputs, k_cache: Tensor, v_cache: Tensor, only: Tensor | None = None
    ) -> Tensor:
        """x[T, H] normed -> [T, H], this rank's summand; of the tokens `only` int64[M], if given: [M, H]."""
        attended = self.attend(ops, self.qkv.forward(ops, x), step, k_cache, v_cache)
        return self.output.forward(ops, attended if only is None else attended.index_select(0, only))

    def attend(
        self, ops: Any, qkv: Tensor, step: StepInputs, k_cache: Tensor, v_cache: Tensor, residual: Tensor | None = None
    ) -> Tensor:
        """qkv[T, (Hq + 2 Hkv) D] -> [T, Hq D]: rotation, cache write and attention.

        residual[T, H]: given where qkv was made from it and not from its norm, and without the bias.
        """
        late = {} if residual is None else {"residual": residual, "bias": self.qkv.bias}
        q = ops.rope_and_write_kv(
            qkv, self.cos_sin, step.positions, step.slot_mapping, k_cache, v_cache, self.num_heads, self.num_kv_heads, self.head_dim,
            self.q_norm, self.k_norm, self.eps, **self.kv_scales, **late,
        )
        return self.attend_rotated(ops, q, step, k_cache, v_cache)

    def attend_rotated(self, ops: Any, q: Tensor, step: StepInputs, k_cache: Tensor, v_cache: Tensor) -> Tensor:
        """q[T, Hq, D] rotated, k and v in the cache -> [T, Hq D]."""
        return self._attend(ops, q, step, k_cache, v_cache).view(q.shape[0], -1)

    def _attend(self, ops: Any, q: Tensor, step: StepInputs, k_cache: Tensor, v_cache: Tensor) -> Tensor:
        decodes, looks = step.num_decodes, {"window": self.window, "softcap": self.softcap, **self.kv_scales}
        if step.shared is not None:
            tables = (step.block_table, step.decode_rows, step.decode_seq_lens)
            return ops.paged_decode_shared(q, k_cache, v_cache, *tables, self.scale, step.shared, softcap=self.softcap)
        if not step.num_prefills:
            return ops.paged_decode(q, k_cache, v_cache, step.block_table, step.decode_rows, step.decode_seq_lens, self.scale, **looks)
        out = torch.empty_like(q)
        prefill = partial(
            ops.paged_prefill, q, k_cache, v_cache, step.block_table, step.prefill_rows, step.query_start_loc, step.prefill_seq_lens,
            self.scale, max_query_len=step.max_query_len, out=out, **looks,
        )  # fmt: skip
        if not decodes:
            prefill()
            return out
        decode = partial(
            ops.paged_decode, q[:decodes], k_cache, v_cache, step.block_table, step.decode_rows, step.decode_seq_lens, self.scale,
            out=out[:decodes], **looks,
        )  # fmt: skip
        side_by_side(q.device, prefill, decode)
        return out
