"""Random paged caches for tests of the operators: scattered blocks, and NaN wherever a kernel must not look."""

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class PagedCase:
    """k_cache, v_cache [blocks, Hkv, size, D]; block_table int32; rows int32[N]; seq_lens int32[N]; q [T, Hq, D]; starts int32[N + 1]."""

    q: Tensor
    k_cache: Tensor
    v_cache: Tensor
    block_table: Tensor
    rows: Tensor
    seq_lens: Tensor
    starts: Tensor

    def to(self, dtype: torch.dtype) -> "PagedCase":
        return PagedCase(
            self.q.to(dtype), self.k_cache.to(dtype), self.v_cache.to(dtype), self.block_table, self.rows, self.seq_lens, self.starts
        )


def make(
    seed: int, lens: list[int], query_lens: list[int], heads: int, kv_heads: int, dim: int, size: int,
    dtype: torch.dtype = torch.float32, device: str = "cpu",
) -> PagedCase:  # fmt: skip
    """A case with sequences of `lens` tokens, the last query_lens of each being queries. Unused blocks and slots hold NaN."""
    g = torch.Generator().manual_seed(seed)
    count = len(lens)
    needed = [-(-n // size) for n in lens]
    width = -(-(max(needed) + 1) // 16) * 16
    blocks = sum(needed) + 3
    order = torch.randperm(blocks, generator=g)
    caches = torch.randn((2, blocks, kv_heads, size, dim), generator=g).to(dtype)
    poison = torch.ones((blocks, size), dtype=torch.bool)
    table_rows = count + 2
    rows = torch.randperm(table_rows, generator=g)[:count].to(torch.int32)
    # Entries past a sequence's end name no block: reading through them would leave the cache.
    table = torch.full((table_rows, width), 1 << 24, dtype=torch.int32)
    used = 0
    for row, n, blocks_of in zip(rows.tolist(), lens, needed):
        own = order[used : used + blocks_of]
        table[row, :blocks_of] = own.to(torch.int32)
        filled = torch.arange(blocks_of * size).view(blocks_of, size) >= n
        poison[own] = filled
        used += blocks_of
    caches.masked_fill_(poison[None, :, None, :, None], float("nan"))
    starts = torch.tensor([0, *torch.tensor(query_lens).cumsum(0).tolist()], dtype=torch.int32)
    q = torch.randn((int(starts[-1]), heads, dim), generator=g).to(dtype)
    tensors = (q, caches[0].contiguous(), caches[1].contiguous(), table, rows, torch.tensor(lens, dtype=torch.int32), starts)
    return PagedCase(*(x.to(device) for x in tensors))


def relative_error(got: Tensor, want: Tensor) -> float:
    """‖got - want‖ / ‖want‖ in float64; infinite where got holds NaN."""
    got, want = got.double().cpu(), want.double().cpu()
    if not bool(got.isfinite().all()):
        return float("inf")
    return float((got - want).norm() / want.norm().clamp(min=1e-30))
