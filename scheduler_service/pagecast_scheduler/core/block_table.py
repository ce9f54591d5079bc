"""Block ids of every running row: one NumPy table, append-only per row."""

import numpy as np
from numpy.typing import NDArray


class BlockTable:
    """blocks[row, i] is block i of the row; num_blocks[row] of them are valid. int64 like the pool's ids, so that nothing converts."""

    def __init__(self, num_rows: int, max_blocks: int) -> None:
        self.blocks = np.zeros((num_rows, max_blocks), np.int64)
        self.num_blocks = np.zeros(num_rows, np.int64)
        self._flat = self.blocks.reshape(-1)  # the same memory

    def row(self, row: int) -> NDArray[np.int64]:
        """A copy of the row's block ids."""
        return self.blocks[row, : self.num_blocks[row]].copy()

    def append(self, row: int, blocks: NDArray[np.int64]) -> None:
        have = int(self.num_blocks[row])
        self.blocks[row, have : have + len(blocks)] = blocks
        self.num_blocks[row] = have + len(blocks)

    def append_each(self, rows: NDArray[np.int64], blocks: NDArray[np.int64]) -> None:
        """blocks[i] becomes the next block of rows[i]; rows has no repeats."""
        have = self.num_blocks[rows]
        self._flat[rows * self.blocks.shape[1] + have] = blocks
        self.num_blocks[rows] = have + 1

    def clear(self, row: int) -> NDArray[np.int64]:
        """Empty the row; returns what it held."""
        blocks = self.row(row)
        self.num_blocks[row] = 0
        return blocks
