"""The ends of a step, and the product of one row: Triton launchers in the interpreter equal their plain twins."""

import os

os.environ.setdefault("TRITON_INTERPRET", "1")

import pytest
import torch

from pagecast_kernels import reference, steps

ROWS, FIELDS, BLOCKS, STOPS, BLOCK_SIZE = 7, 8, 5, 11, 4


def state(seed: int):
    """Random scalars, seeds, table and stops, the last row without a token."""
    generator = torch.Generator().manual_seed(seed)
    scalars = torch.randint(0, 1 << 30, (FIELDS, ROWS + 1), generator=generator, dtype=torch.int32)
    scalars[0] = torch.randint(1, BLOCKS * BLOCK_SIZE + 1, (ROWS + 1,), generator=generator)
    scalars[0, ROWS] = 0
    seeds = torch.randint(-(1 << 62), 1 << 62, (ROWS + 1,), generator=generator)
    table = torch.randint(1, 1 << 20, (ROWS + 1, BLOCKS), generator=generator, dtype=torch.int32)
    stops = torch.randint(-1, 6, (ROWS + 1, STOPS), generator=generator, dtype=torch.int32)
    return scalars, seeds, table, stops


@pytest.mark.parametrize("rows", [[0], [2, 3, 6], [1, 5, ROWS, ROWS], []])
def test_gather_rows(rows):
    scalars, seeds, table, _ = state(1)
    index = torch.tensor(rows, dtype=torch.int32)
    expected = reference.gather_rows(index, scalars, seeds, table, BLOCK_SIZE)
    for ours, plain in zip(steps.gather_rows(index, scalars, seeds, table, BLOCK_SIZE), expected, strict=True):
        assert ours.dtype == plain.dtype and torch.equal(ours, plain)
    for place, row in enumerate(rows):
        position = int(scalars[0, row]) - 1
        slot = int(table[row, position // BLOCK_SIZE]) * BLOCK_SIZE + position % BLOCK_SIZE
        assert int(expected[3][place]) == (slot if position >= 0 else -1)


@pytest.mark.parametrize("drawn", [[3, -1, 5], [0, 2, 100]])
def test_finish_rows(drawn):
    scalars, _, _, stops = state(2)
    rows, tokens = torch.tensor([4, 1, ROWS], dtype=torch.int32), torch.tensor(drawn, dtype=torch.int32)
    lengths = scalars[0, rows.long()].contiguous()
    plain, ours = scalars.clone(), scalars.clone()
    expected = reference.finish_rows(tokens, rows, lengths, plain, stops, 1, 2)
    for _ in range(2):  # again changes nothing
        assert torch.equal(steps.finish_rows(tokens, rows, lengths, ours, stops, 1, 2), expected)
        assert torch.equal(ours, plain)
    assert plain[0, 4] == scalars[0, 4] + 1 and plain[0, ROWS] == 0
    assert expected[1].tolist() == [int(max(t, 0) in stops[r].tolist()) + 2 * (t < 0) for t, r in zip(drawn, rows.tolist(), strict=True)]
