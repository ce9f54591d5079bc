"""What tests of decode over a list of tiles share."""

import torch
from ops import paged_case

from pagecast_kernels import configs, decode, decode_flat, reference


def both(
    case: paged_case.PagedCase, config: configs.Decode, *, softcap: float = 0.0, calls: int = 1
) -> tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
    """decode_flat's result of the last of so many calls with one workspace, and float64's."""
    (batch, heads, dim), (kv_heads, size) = case.q.shape, case.k_cache.shape[1:3]
    work = decode.decode_workspace(batch, heads, kv_heads, dim, "cpu")
    tables = (case.block_table, case.rows, case.seq_lens)
    tiles = decode_flat.tile_list(batch, case.block_table.shape[1], size, config.tile, "cpu")
    decode_flat.list_tiles(tiles, *tables, size)
    for _ in range(calls):
        got = torch.full_like(case.q, float("nan"))
        decode_flat.launch(case.q, case.k_cache, case.v_cache, case.seq_lens, 0.1, softcap, tiles, work, got, config)
        assert not work.counters.any() and not work.teams.any()
    exact = case.to(torch.float64)
    return got, reference.paged_decode(exact.q, exact.k_cache, exact.v_cache, *tables, 0.1, softcap=softcap)
