"""KvManager with rows that write what they were told: whatever a lookup finds holds exactly the tokens asked for."""

import numpy as np
from core.cluster import make_config
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from pagecast_scheduler.core.kv_manager import KvManager
from pagecast_scheduler.core.prefix_cache import HashChain

ROWS = 3


class KvMachine(RuleBasedStateMachine):
    """memory: block -> the (namespace, prefix) whose last tokens it holds. rows: row -> (tokens, chain)."""

    @initialize(num_blocks=st.integers(4, 24), size=st.sampled_from([1, 2, 4]))
    def begin(self, num_blocks, size):
        self.size = size
        self.kv = KvManager(make_config(block_size=size, num_blocks=num_blocks, max_num_seqs=ROWS))
        self.memory = {}
        self.rows = {}
        self.step = 0

    @precondition(lambda self: len(self.rows) < ROWS)
    @rule(tokens=st.lists(st.integers(0, 1), min_size=1, max_size=12), namespace=st.sampled_from([bytes(32), b"x" * 32]))
    def open(self, tokens, namespace):
        row = min(set(range(ROWS)) - set(self.rows))
        array = np.array(tokens, np.uint32)
        chain = HashChain(namespace, self.size)
        hits = self.kv.lookup(chain, array, len(tokens))
        assert len(hits) * self.size <= len(tokens) - 1, "a hit must leave a token to compute"
        for index, block in enumerate(hits.tolist()):
            assert self.memory[block] == (namespace, tokens[: (index + 1) * self.size])
        missing = self.kv.blocks_for(len(tokens)) - len(hits)
        if missing + self.kv.num_revived(hits) > self.kv.pool.num_free:
            return
        self.kv.open_row(row, hits)
        self.kv.grow(row, missing)
        self.step += 1
        blocks, full = self.kv.table.row(row), len(tokens) // self.size
        for index in range(len(hits), full):
            self.memory[int(blocks[index])] = (namespace, tokens[: (index + 1) * self.size])
        self.kv.publish(blocks, chain, array, len(hits), full, self.step)
        self.rows[row] = namespace

    @precondition(lambda self: self.rows)
    @rule(data=st.data())
    def grow_each(self, data):
        rows = np.array(sorted(data.draw(st.sets(st.sampled_from(sorted(self.rows)), min_size=1))), np.int64)
        room = self.kv.table.num_blocks[rows].max() < self.kv.table.blocks.shape[1]
        if len(rows) <= self.kv.pool.num_free and room:
            for row, block in zip(rows.tolist(), self.kv.grow_each(rows).tolist(), strict=True):
                assert self.kv.table.row(row)[-1] == block
                self.memory.pop(block, None)

    @precondition(lambda self: self.rows)
    @rule(data=st.data(), bad=st.booleans())
    def close(self, data, bad):
        row = data.draw(st.sampled_from(sorted(self.rows)))
        del self.rows[row]
        blocks = self.kv.close_row(row)
        if bad:
            self.kv.forget(blocks)
            assert not self.kv.pool.has_content[blocks].any()
        self.kv.pool.give_back(blocks)

    @rule()
    def apply(self):
        self.kv.applied(self.step)

    @invariant()
    def laws(self):
        if not hasattr(self, "kv"):
            return
        pool = self.kv.pool
        assert set(self.kv.cache.entries()) == set(np.flatnonzero(pool.has_content).tolist())
        held = np.bincount(np.concatenate([self.kv.table.row(row) for row in range(ROWS)]), minlength=pool.num_blocks)
        assert np.array_equal(held[1:], pool.ref_count[1:])


TestKvManager = KvMachine.TestCase
TestKvManager.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)
