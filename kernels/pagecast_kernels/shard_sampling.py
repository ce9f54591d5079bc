"""The best token of one rank's part of the vocabulary, as a key that orders over ranks. See reference_shards."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from pagecast_kernels import configs
from pagecast_kernels.noise import PER_ROW, bits_from, key_of, noisy, scale_of

_TILE = 2048


@triton.jit(do_not_specialize=["first"], do_not_specialize_on_alignment=PER_ROW)
def _best_of_shard(
    logits_ptr, temperature_ptr, top_k_ptr, seeds_ptr, sequence_ptr, positions_ptr, keys_ptr, size, stride, slice_size, first,
    SLICES: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    row, part = tl.program_id(0), tl.program_id(1)
    logits = logits_ptr + row.to(tl.int64) * stride
    random, inverse = scale_of(temperature_ptr, top_k_ptr, row)
    seed, sequence, position = key_of(seeds_ptr, sequence_ptr, positions_ptr, row)
    column = tl.arange(0, TILE)
    best = tl.full((TILE,), float("-inf"), tl.float32)
    best_id = tl.zeros((TILE,), tl.int32)
    broken = tl.zeros((TILE,), tl.int32)
    end = tl.minimum((part + 1) * slice_size, size)
    for start in range(part * slice_size, end, TILE):
        x = tl.load(logits + start + column, start + column < end, float("-inf")).to(tl.float32)
        broken |= ((x != x) | (x == float("inf"))).to(tl.int32)
        if random:
            x = noisy(x * inverse, bits_from(seed, sequence, position, first + start, TILE // 4))
        best_id = tl.where(x > best, first + start + column, best_id)
        best = tl.maximum(best, x)
    best = tl.where(tl.max(broken, 0) > 0, float("inf"), best + 0.0)
    bits = best.to(tl.int32, bitcast=True)
    ordered = bits ^ (bits >> 31 & 0x7FFFFFFF)
    key = (ordered.to(tl.int64) << 32) | (0x7FFFFFFF - best_id).to(tl.int64)
    tl.store(keys_ptr + row * SLICES + part, tl.max(key, 0))


def best_of_shard(
    logits: Tensor, temperature: Tensor, top_k: Tensor, seeds: Tensor, sequence: Tensor, positions: Tensor, start: int
) -> Tensor:
    """See reference_shards.best_of_shard. Rows of logits may be strided."""
    batch, size = logits.shape
    slices = configs.sample_slices(max(batch, 1), size, logits.device)
    keys = torch.empty((batch, slices), dtype=torch.int64, device=logits.device)
    if batch:
        slice_size = triton.cdiv(triton.cdiv(size, _TILE), slices) * _TILE
        _best_of_shard[(batch, slices)](
            logits, temperature, top_k, seeds, sequence, positions, keys, size, logits.stride(0), slice_size, start, slices, _TILE,
            num_warps=8,
        )  # fmt: skip
    return keys.amax(1)
