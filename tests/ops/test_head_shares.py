"""How decode's work is shared out by KV head, in the interpreter."""

from itertools import pairwise

import pytest
import torch
import triton
import triton.language as tl

from pagecast_kernels.shares import head_owner, head_share_of


@triton.jit
def _shares(shares_ptr, owners_ptr, tiles, NUM_KV_HEADS: tl.constexpr, BY_HEAD: tl.constexpr):
    """shares [programs, 3]: place, begin, end; owners [heads * tiles]: written by the program that the share of each tile is."""
    programs = tl.num_programs(0)
    place, begin, end, share, extra = head_share_of(tl.program_id(0), programs, tiles, NUM_KV_HEADS, BY_HEAD)
    tl.store(shares_ptr + 3 * tl.program_id(0), place)
    tl.store(shares_ptr + 3 * tl.program_id(0) + 1, begin)
    tl.store(shares_ptr + 3 * tl.program_id(0) + 2, end)
    for at in range(begin, end):
        tl.store(owners_ptr + at, head_owner(at // tiles, at % tiles, tiles, programs, share, extra, NUM_KV_HEADS, BY_HEAD))


@pytest.mark.parametrize("by_head", [False, True])
@pytest.mark.parametrize(("heads", "programs", "tiles"), [(8, 24, 10), (8, 24, 2), (8, 16, 7), (3, 9, 9), (1, 5, 13), (4, 8, 0)])
def test_every_tile_falls_to_the_program_that_is_said_to_own_it(heads: int, programs: int, tiles: int, by_head: bool) -> None:
    shares, owners = torch.full((programs, 3), -1, dtype=torch.int32), torch.full((heads * tiles,), -1, dtype=torch.int32)
    _shares[(programs,)](shares, owners, tiles, heads, by_head)
    in_order = sorted(shares.tolist())
    assert [place for place, _, _ in in_order] == list(range(programs))
    assert in_order[0][1] == 0 and in_order[-1][2] == heads * tiles
    assert all(one[2] == other[1] for one, other in pairwise(in_order))
    assert owners.tolist() == [place for place, begin, end in in_order for _ in range(begin, end)]


@pytest.mark.parametrize(("heads", "tiles"), [(8, 10), (3, 7)])
def test_by_head_all_heads_are_cut_alike_and_read_together(heads: int, tiles: int) -> None:
    each = 4
    shares = torch.empty((heads * each, 3), dtype=torch.int32)
    _shares[(heads * each,)](shares, torch.empty(heads * tiles, dtype=torch.int32), tiles, heads, True)
    for together in shares.view(each, heads, 3).tolist():  # programs that start together
        assert len({(begin - head * tiles, end - head * tiles) for head, (_, begin, end) in enumerate(together)}) == 1
