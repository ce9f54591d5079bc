"""Multi-head latent attention (DeepSeek-V2, 2024) over a paged cache of latents.

A token leaves one vector of `rank` elements, from which every head's key and value could be computed, and one rotated key. Neither is
ever computed: a query is brought into the latent space instead (`up`, keys' part), attention gives a mean of latents, and that is
brought into the values' space (`up`, values' part).
"""

from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from pagecast_worker.layers.linear import ColumnParallel, RowParallel
from pagecast_worker.layers.side_by_side import side_by_side
from pagecast_worker.layers.step_inputs import StepInputs
from pagecast_worker.models.config import LatentConfig

EPS = 1e-6
"""Of the two norms inside, whatever the model's own is."""


@dataclass(slots=True)
class LatentAttention:
    """One layer's attention on one rank; num_heads are this rank's.

    down's weight [Q + L + R, H]: the query (or its compression), then the latent and the rotated key, which every rank computes whole.
    query's weight [Hq (N + R), Q] follows where the query is compressed. up[Hq, N + V, L]: per head its keys' part, then its values'.
    """

    down: ColumnParallel
    query_norm: Tensor | None
    query: ColumnParallel | None
    latent_norm: Tensor
    up: Tensor
    output: RowParallel
    num_heads: int
    shape: LatentConfig
    scale: float
    cos_sin: Tensor

    def forward(
        self, ops: Any, x: Tensor, step: StepInputs, k_cache: Tensor, v_cache: Tensor, only: Tensor | None = None
    ) -> Tensor:
        """x[T, H] normed -> [T, H], this rank's summand; of the tokens `only` int64[M], if given: [M, H]."""
        shape, tokens = self.shape, x.shape[0]
        query, kv = self.down.forward(ops, x).tensor_split((-shape.rank - shape.rope_dim,), 1)
        if self.query is not None:
            query = self.query.forward(ops, ops.rms_norm(query, self.query_norm, EPS))
        plain, rope = query.unflatten(1, (self.num_heads, -1)).split((shape.nope_dim, shape.rope_dim), 2)
        rope = ops.latent_rope_and_write(
            rope, kv, self.latent_norm, EPS, self.cos_sin, step.positions, step.slot_mapping, k_cache, v_cache
        )
        latent = plain.new_empty((tokens, self.num_heads, shape.rank))
        torch.bmm(plain.transpose(0, 1), self.up[:, : shape.nope_dim], out=latent.transpose(0, 1))
        attended = self._attend(ops, latent, rope, step, k_cache, v_cache)
        if only is not None:
            attended, tokens = attended.index_select(0, only), only.shape[0]
        values = plain.new_empty((tokens, self.num_heads, shape.value_dim))
        torch.bmm(attended.transpose(0, 1), self.up[:, shape.nope_dim :].transpose(1, 2), out=values.transpose(0, 1))
        return self.output.forward(ops, values.view(tokens, -1))

    def _attend(self, ops: Any, latent: Tensor, rope: Tensor, step: StepInputs, k_cache: Tensor, v_cache: Tensor) -> Tensor:
        """latent[T, Hq, L] and rope[T, Hq, R] -> [T, Hq, L]"""
        decodes = step.num_decodes
        where = (k_cache, v_cache, step.block_table)
        if not step.num_prefills:
            return ops.latent_decode(latent, rope, *where, step.decode_rows, step.decode_seq_lens, self.scale)  # type: ignore[no-any-return]
        out = torch.empty_like(latent)
        prefill = partial(
            ops.latent_prefill, latent, rope, *where, step.prefill_rows, step.query_start_loc, step.prefill_seq_lens, self.scale,
            max_query_len=step.max_query_len, out=out,
        )  # fmt: skip
        if not decodes:
            prefill()
            return out
        decode = partial(
            ops.latent_decode, latent[:decodes], rope[:decodes], *where, step.decode_rows, step.decode_seq_lens, self.scale,
            out=out[:decodes],
        )  # fmt: skip
        side_by_side(latent.device, prefill, decode)
        return out
