"""The paged KV pool of one rank: one allocation, seen per layer."""

from typing import Any

import torch
from torch import Tensor

KvShape = tuple[int, int, int]
"""Heads, and elements of a token's K and V in each (ModelConfig.kv_shape): the same number but for latent attention."""


class KVCache:
    """layers[i] is (K, V) of a layer: [num_blocks, Hkv, block_size, D], contiguous. All layers' are one allocation each."""

    def __init__(self, num_blocks: int, num_layers: int, shape: KvShape, block_size: int, device: torch.device, dtype: torch.dtype) -> None:
        self.num_blocks = num_blocks
        heads, *dims = shape
        self.storage = [torch.zeros((num_layers, num_blocks, heads, block_size, dim), device=device, dtype=dtype) for dim in dims]
        self.layers: list[tuple[Tensor, Tensor]] = list(zip(*self.storage, strict=True))

    def copy(self, ops: Any, source: Tensor, target: Tensor) -> None:
        """Copy whole blocks in every layer; int32 block ids."""
        for k_cache, v_cache in self.layers:
            ops.copy_blocks(k_cache, v_cache, source, target)

    def clear(self, blocks: Tensor) -> None:
        """Zero the blocks int[n] in every layer: a slot not written yet may hold the NaN of a row that went bad."""
        for part in self.storage:
            plain = part.view(torch.uint8) if part.dtype.itemsize == 1 else part
            plain.index_fill_(1, blocks.long(), 0)
