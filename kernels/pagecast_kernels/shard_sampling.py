"""The best token of one rank's part of the vocabulary, as a key that orders over ranks. See reference_shards."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from pagecast_kernels import configs
from pagecast_kernels.noise import NO_LEADER, PER_ROW, best_of, key_of, ordered, scale_of


@triton.jit(do_not_specialize=["first"], do_not_specialize_on_alignment=PER_ROW)
def _best_of_shard(
    logits_ptr, temperature_ptr, top_k_ptr, seeds_ptr, sequence_ptr, positions_ptr, keys_ptr, leaders_ptr, size, stride, slice_size, first,
    SLICES: tl.constexpr, SHARED: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    row, part = tl.program_id(0), tl.program_id(1)
    logits = logits_ptr + row.to(tl.int64) * stride
    random, inverse = scale_of(temperature_ptr, top_k_ptr, row)
    key = key_of(seeds_ptr, sequence_ptr, positions_ptr, row)
    cutoff = tl.full((), float("-inf"), tl.float32)
    begin = part * slice_size
    end = tl.minimum(begin + slice_size, size)
    best, token = best_of(logits, begin, end, first, cutoff, random, inverse, key, leaders_ptr + row, False, SHARED, TILE)
    tl.store(keys_ptr + row * SLICES + part, (ordered(best + 0.0).to(tl.int64) << 32) | (0x7FFFFFFF - token).to(tl.int64))


def best_of_shard(
    logits: Tensor, temperature: Tensor, top_k: Tensor, seeds: Tensor, sequence: Tensor, positions: Tensor, start: int
) -> Tensor:
    """See reference_shards.best_of_shard. Rows of logits may be strided."""
    batch, size = logits.shape
    how = configs.draws(max(batch, 1), size, logits.device)
    keys = torch.empty((batch, how.slices), dtype=torch.int64, device=logits.device)
    leaders = torch.full((batch,), NO_LEADER.value, dtype=torch.int32, device=logits.device)
    if batch:
        _best_of_shard[(batch, how.slices)](
            logits, temperature, top_k, seeds, sequence, positions, keys, leaders, size, logits.stride(0), how.slice_size(size), start,
            how.slices, how.shared, how.tile, num_warps=how.warps,
        )  # fmt: skip
    return keys.amax(1)
