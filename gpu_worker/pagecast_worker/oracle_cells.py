"""The oracle's paged memory: one u64 cell per token, addressed by slots, summed up per block."""

import numpy as np
from numpy.typing import NDArray

from pagecast_worker.oracle_model import U64, ratio_powers

Slots = NDArray[np.int64]


class Cells:
    """cells: u64 [num_blocks * block_size]. shares: u64 [num_blocks], always sum of cell * RATIO^offset over the block.

    A block's share is computed again from its cells whenever one is written, so that reading a long context costs one read per
    full block and stays a function of what the cells hold.
    """

    def __init__(self, num_blocks: int, block_size: int, max_model_len: int) -> None:
        self.num_blocks, self.block_size = num_blocks, block_size
        self.cells = np.zeros(num_blocks * block_size, dtype=np.uint64)
        self.shares = np.zeros(num_blocks, dtype=np.uint64)
        self._offset_powers = ratio_powers(block_size)
        self._block_powers = ratio_powers(self.blocks_for(max_model_len) + 1, stride=block_size)
        self._offsets = np.arange(block_size)

    def blocks_for(self, num_tokens: int) -> int:
        """Blocks that hold so many tokens."""
        return -(-num_tokens // self.block_size)

    def read(self, slots: Slots) -> U64:
        return self.cells[slots]

    def write(self, slots: Slots, values: U64) -> None:
        self.cells[slots] = values
        blocks = np.unique(slots // self.block_size)
        self.shares[blocks] = np.sum(self.cells.reshape(-1, self.block_size)[blocks] * self._offset_powers, axis=1, dtype=np.uint64)

    def copy(self, source: Slots, target: Slots) -> None:
        """Whole blocks, all read before any is written."""
        by_block = self.cells.reshape(-1, self.block_size)
        by_block[target] = by_block[source]
        self.shares[target] = self.shares[source]

    def contexts(self, tables: NDArray[np.int64], lengths: NDArray[np.int64]) -> U64:
        """Sum of cell * RATIO^position over each row's first `lengths` cells. tables: [rows, blocks]."""
        full, rest = lengths // self.block_size, lengths % self.block_size
        widest = int(full.max(initial=0))
        powers = self._block_powers
        counted = np.arange(widest) < full[:, None]
        total = np.sum(np.where(counted, self.shares[tables[:, :widest]] * powers[:widest], np.uint64(0)), axis=1, dtype=np.uint64)
        partial = np.flatnonzero(rest)
        blocks = tables[partial, full[partial]]
        tails = self.cells.reshape(-1, self.block_size)[blocks] * self._offset_powers
        tails = np.where(self._offsets < rest[partial, None], tails, np.uint64(0))
        total[partial] += np.sum(tails, axis=1, dtype=np.uint64) * powers[full[partial]]
        return total
