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


@pytest.mark.parametrize("decodes", [[], [1, 5], [0, 2, 6, ROWS], [ROWS, ROWS]])
def test_gather_padded(decodes):
    """Places of decoding rows are filled in, those of padding and of chunks stay as they were sent."""
    scalars, seeds, table, _ = state(3)
    decode_rows = torch.tensor(decodes, dtype=torch.int32)
    sample_rows, sample_index = (torch.tensor(values, dtype=torch.int32) for values in ([0, 1, 4, ROWS, ROWS], [2, 0, 5, 0, 0]))
    sent = [torch.arange(begin, begin + 6, dtype=torch.int32) for begin in (100, 200, 300)]
    plain, ours = [part.clone() for part in sent], [part.clone() for part in sent]
    tail = (sample_rows, sample_index, scalars, seeds, table, BLOCK_SIZE, ROWS)
    expected = reference.gather_padded(decode_rows, *plain, *tail)
    for mine, theirs in zip([*steps.gather_padded(decode_rows, *ours, *tail), *ours], [*expected, *plain], strict=True):
        assert mine.dtype == theirs.dtype and torch.equal(mine, theirs)
    assert expected[0].tolist() == [-1 if row == ROWS else int(scalars[0, row]) for row in decodes] and torch.equal(plain[2], sent[2])
    _, _, positions, slots = reference.gather_rows(decode_rows, scalars, seeds, table, BLOCK_SIZE)
    for place in range(6):
        known = place < len(decodes) and decodes[place] != ROWS
        assert int(plain[0][place]) == (int(scalars[1, decodes[place]]) if known else 100 + place)
        assert int(plain[1][place]) == (int(positions[place]) if known else 200 + place)
        assert int(expected[1][place]) == (int(slots[place]) if known else 300 + place)
    assert torch.equal(expected[2], scalars[:, sample_rows.long()]) and torch.equal(expected[3], seeds[sample_rows.long()])
    assert expected[4].tolist() == sample_index.tolist()


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
