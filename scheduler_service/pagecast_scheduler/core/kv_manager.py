"""KV memory as the scheduler sees it: the one door to block pool, prefix cache and block table, which it keeps in step.

What a sequence leaves behind at its end is filed later, as its reader waits for its last token and for none of that: by whoever next
looks at pool or cache, so that nobody can tell, or by `settle` in a quiet moment.
"""

from collections import deque

import numpy as np
from numpy.typing import NDArray

from pagecast_scheduler.core.block_pool import EMPTY, BlockPool, Blocks
from pagecast_scheduler.core.block_table import BlockTable
from pagecast_scheduler.core.config import SchedulerConfig
from pagecast_scheduler.core.prefix_cache import STRIDE, Change, HashChain, PrefixCache

Tokens = NDArray[np.uint32]


class KvManager:
    """Invariant: a block has content in the pool exactly if the cache has an entry for it."""

    def __init__(self, config: SchedulerConfig) -> None:
        self.block_size = config.block_size
        self.caching = config.enable_prefix_caching
        self._pool = BlockPool(config.num_blocks)
        self._cache = PrefixCache()
        self._left: deque[tuple[Blocks, HashChain, Tokens, int]] = deque()
        max_blocks = min(-(-config.max_model_len // config.block_size), config.num_blocks)
        self.table = BlockTable(config.max_num_seqs, max_blocks)

    @property
    def pool(self) -> BlockPool:
        self.settle()
        return self._pool

    @property
    def cache(self) -> PrefixCache:
        self.settle()
        return self._cache

    @property
    def is_settled(self) -> bool:
        """Whether all that ended sequences left behind is filed."""
        return not self._left

    def settle(self, most: int | None = None) -> None:
        """File what ended sequences left behind, of at most so many of them."""
        while self._left and most != 0:
            blocks, chain, tokens, full = self._left.popleft()
            self._publish(blocks, chain, tokens, 0, full, 0)
            self._pool.give_back(blocks)
            most = None if most is None else most - 1

    def leave(self, blocks: Blocks, chain: HashChain, tokens: Tokens, full: int) -> None:
        """A sequence needs `blocks` no more. The first `full` of them, which hold `tokens`, can be found again."""
        self._left.append((blocks, chain, tokens, full))

    def blocks_for(self, num_tokens: int) -> int:
        return -(-num_tokens // self.block_size)

    def lookup(self, chain: HashChain, tokens: Tokens, num_tokens: int) -> Blocks:
        """Cached blocks of a prefix that leaves at least one of `num_tokens` tokens to compute."""
        hits = self.cache.lookup(chain, tokens, (num_tokens - 1) // self.block_size) if self.caching else []
        return np.array(hits, np.int64) if hits else EMPTY

    def expect_lookup(self, chain: HashChain, tokens: Tokens, num_tokens: int) -> None:
        """The first part of what `lookup` will do, while there is time."""
        if self.caching:
            chain.extend(tokens, min(STRIDE, (num_tokens - 1) // self.block_size))

    def num_revived(self, hits: Blocks) -> int:
        """How many of `hits` would leave the free list when touched."""
        return int(np.count_nonzero(self.pool.ref_count[hits] == 0)) if len(hits) else 0

    def open_row(self, row: int, hits: Blocks) -> None:
        """Start a row with shared blocks."""
        self.pool.touch(hits)
        self.table.append(row, hits)

    def grow(self, row: int, count: int) -> Blocks:
        """`count` new blocks for one row; the caller checked that they are free."""
        blocks = self._take(count)
        self.table.append(row, blocks)
        return blocks

    def grow_each(self, rows: NDArray[np.int64]) -> Blocks:
        """One new block for each of `rows`; the caller checked that they are free."""
        blocks = self._take(len(rows))
        self.table.append_each(rows, blocks)
        return blocks

    def close_row(self, row: int) -> Blocks:
        """Empty the row; its blocks keep their holder, who must give them back."""
        return self.table.clear(row)

    def publish(self, blocks: Blocks, chain: HashChain, tokens: Tokens, first: int, last: int, step: int) -> None:
        """Blocks first..last-1 of a sequence are full of `tokens`; step: 0, or the step in flight that computes them."""
        self.settle()
        self._publish(blocks, chain, tokens, first, last, step)

    def _publish(self, blocks: Blocks, chain: HashChain, tokens: Tokens, first: int, last: int, step: int) -> None:
        if not self.caching or last <= first:
            return
        chain.extend(tokens, last)
        unknown = (~self._pool.has_content[blocks[first:last]]).nonzero()[0]
        if not len(unknown):
            return
        unknown += first
        registered = self._cache.register(chain, unknown.tolist(), blocks[unknown].tolist(), step)
        if registered:
            self._pool.set_content(np.array(registered, np.int64))

    def forget(self, blocks: Blocks) -> None:
        """Their content is bad: nobody may find them again."""
        for block in blocks[self.pool.has_content[blocks]].tolist():
            self.cache.forget(block)
            self.pool.drop_content(block)

    def forget_provisional(self, blocks: Blocks) -> None:
        """Their holder leaves before their step is applied."""
        self.forget(np.array([block for block in blocks.tolist() if self.cache.is_provisional(block)], np.int64))

    def forget_all(self) -> int:
        """Drop every entry whose content is certain. Returns how many."""
        certain = [block for block in self.cache.entries() if not self.cache.is_provisional(block)]
        self.forget(np.array(certain, np.int64))
        return len(certain)

    def take_changes(self) -> list[Change]:
        """What the cache has noted since the last call, in order; nothing while nobody watches."""
        cache = self._cache
        if cache.changes is None:
            return []
        self.settle()
        taken, cache.changes = cache.changes, []
        return taken

    def applied(self, step: int) -> None:
        """The result of `step` is in."""
        self._cache.confirm(step)  # which what was left has no part in
        if self._pool.has_holds:
            self.pool.end_holds(step)

    def _take(self, count: int) -> Blocks:
        blocks, evicted = self.pool.take(count)
        for block in evicted.tolist():
            self.cache.forget(block)
        return blocks
