"""Blocks of KV memory: who holds how many, which are free, and in which order cached ones are given up.

A block is in exactly one state: *referenced* (ref_count > 0), *cached* (ref_count 0, its content is still known to the prefix cache)
or *clean* (ref_count 0, no content). Block 0 is the null block and never leaves. The pool knows nothing of tokens or hashes.
"""

import numpy as np
from numpy.typing import NDArray

from pagecast_wire.plan import NULL_BLOCK

Blocks = NDArray[np.int64]
EMPTY: Blocks = np.zeros(0, np.int64)


class BlockPool:
    """Reference counts and two free lists: a stack of clean blocks and an LRU ring of cached ones.

    The ring is an array with tombstones (0): revival clears one cell, eviction takes cells from the head, and compaction runs only
    when the tail reaches the end, so every operation is O(blocks moved) amortised and vectorised.
    Invariant: ref_count[b] = holders of b; num_clean + num_cached + referenced = num_blocks - 1.
    """

    def __init__(self, num_blocks: int) -> None:
        self.num_blocks = num_blocks
        self.ref_count = np.zeros(num_blocks, np.int32)
        self.ref_count[NULL_BLOCK] = 1  # the null block's holder is the pool
        self.has_content = np.zeros(num_blocks, np.bool_)
        self.num_clean = num_blocks - 1
        self.num_cached = 0
        self._clean = np.arange(num_blocks - 1, -1, -1, dtype=np.int64)  # a stack; block 1 on top
        self._ring = np.zeros(2 * num_blocks, np.int64)
        self._where = np.full(num_blocks, -1, np.int64)  # position in the ring, -1 outside it
        self._head = 0
        self._tail = 0
        self._holds: list[tuple[int, Blocks]] = []

    @property
    def num_free(self) -> int:
        """Blocks that `take` can hand out, cached ones included."""
        return self.num_clean + self.num_cached

    @property
    def num_referenced(self) -> int:
        return self.num_blocks - 1 - self.num_clean - self.num_cached

    def take(self, count: int) -> tuple[Blocks, Blocks]:
        """(`count` blocks with ref_count 1, those of them that were cached and lose their content, which the prefix cache must forget).

        Clean blocks go first, then the least recently used cached ones. The caller checked num_free."""
        assert count <= self.num_free
        clean = min(count, self.num_clean)
        self.num_clean -= clean
        blocks = self._clean[self.num_clean : self.num_clean + clean].copy()
        evicted = EMPTY
        if clean < count:
            evicted = self._pop_ring(count - clean)
            self.has_content[evicted] = False
            blocks = np.concatenate([blocks, evicted])
        self.ref_count[blocks] = 1
        return blocks, evicted

    def touch(self, blocks: Blocks) -> None:
        """One more holder for each of `blocks` (no repeats); cached ones are revived."""
        if not len(blocks):
            return
        idle = blocks[self.ref_count[blocks] == 0]
        if len(idle):
            self._leave_ring(idle)
        self.ref_count[blocks] += 1

    def give_back(self, blocks: Blocks) -> None:
        """One holder less for each of `blocks` (no repeats, in chain order). The tail of a chain becomes evictable first."""
        self.ref_count[blocks] -= 1
        idle = blocks[self.ref_count[blocks] == 0][::-1]
        if not len(idle):
            return
        known = self.has_content[idle]
        self._push_ring(idle[known])
        self._push_clean(idle[~known])

    def hold(self, blocks: Blocks, until_step: int) -> None:
        """Keep `blocks` from reuse until step `until_step` is applied: for what is read or written outside the step stream."""
        self.touch(blocks)
        self._holds.append((until_step, blocks))

    @property
    def has_holds(self) -> bool:
        return bool(self._holds)

    def end_holds(self, step: int) -> None:
        """Step `step` was applied: holds up to it end."""
        ended = [blocks for until, blocks in self._holds if until <= step]
        self._holds = [hold for hold in self._holds if hold[0] > step]
        for blocks in ended:
            self.give_back(blocks)

    def set_content(self, blocks: Blocks) -> None:
        """The prefix cache knows what is in these referenced blocks."""
        assert (self.ref_count[blocks] > 0).all()
        self.has_content[blocks] = True

    def drop_content(self, block: int) -> None:
        """The prefix cache forgot the block; an unreferenced one becomes clean."""
        self.has_content[block] = False
        if self.ref_count[block] == 0:
            one = np.array([block], np.int64)
            self._leave_ring(one)
            self._push_clean(one)

    def held(self) -> list[Blocks]:
        """Blocks of every hold, for the auditor."""
        return [blocks for _, blocks in self._holds]

    def free_blocks(self) -> tuple[Blocks, Blocks]:
        """(clean, cached in eviction order), for the auditor."""
        ring = self._ring[self._head : self._tail]
        return self._clean[: self.num_clean].copy(), ring[ring != 0].copy()

    def _push_clean(self, blocks: Blocks) -> None:
        self._clean[self.num_clean : self.num_clean + len(blocks)] = blocks
        self.num_clean += len(blocks)

    def _push_ring(self, blocks: Blocks) -> None:
        count = len(blocks)
        if not count:
            return
        if self._tail + count > len(self._ring):
            live = self._ring[self._head : self._tail]
            live = live[live != 0]
            self._ring[: len(live)] = live
            self._where[live] = np.arange(len(live))
            self._head, self._tail = 0, len(live)
        self._ring[self._tail : self._tail + count] = blocks
        self._where[blocks] = np.arange(self._tail, self._tail + count)
        self._tail += count
        self.num_cached += count

    def _leave_ring(self, blocks: Blocks) -> None:
        self._ring[self._where[blocks]] = 0
        self._where[blocks] = -1
        self.num_cached -= len(blocks)

    def _pop_ring(self, count: int) -> Blocks:
        taken: list[Blocks] = []
        self.num_cached -= count
        while count:
            cells = self._ring[self._head : self._head + count]
            self._head += len(cells)
            live = cells[cells != 0]
            taken.append(live)
            count -= len(live)
        blocks = np.concatenate(taken)
        self._where[blocks] = -1
        return blocks
