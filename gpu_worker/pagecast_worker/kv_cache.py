"""The paged KV pool of one rank: one allocation, seen per layer."""

from typing import Any

import torch
from torch import Tensor


def block_bytes(num_layers: int, num_kv_heads: int, block_size: int, head_dim: int, dtype: torch.dtype) -> int:
    """Bytes that one block takes over all layers, K and V together."""
    return num_layers * 2 * num_kv_heads * block_size * head_dim * dtype.itemsize


class KVCache:
    """storage[L, 2, num_blocks, Hkv, block_size, D]; layers[i] is (K, V), each [num_blocks, Hkv, block_size, D] and contiguous."""

    def __init__(
        self, num_blocks: int, num_layers: int, num_kv_heads: int, block_size: int, head_dim: int, device: torch.device, dtype: torch.dtype
    ) -> None:
        self.num_blocks = num_blocks
        self.storage = torch.zeros((num_layers, 2, num_blocks, num_kv_heads, block_size, head_dim), device=device, dtype=dtype)
        self.layers: list[tuple[Tensor, Tensor]] = [(layer[0], layer[1]) for layer in self.storage]

    def copy(self, ops: Any, source: Tensor, target: Tensor) -> None:
        """Copy whole blocks in every layer; int32 block ids."""
        for k_cache, v_cache in self.layers:
            ops.copy_blocks(k_cache, v_cache, source, target)

    def clear(self, blocks: Tensor) -> None:
        """Zero the blocks int[n] in every layer: a slot not written yet may hold the NaN of a row that went bad."""
        self.storage.index_fill_(2, blocks.long(), 0.0)
