"""KvManager with rows that write what they were told: whatever a lookup finds holds exactly the tokens asked for. A twin is told the same
and files at once what rows leave: every block that is handed out is the same one."""

import numpy as np
from core.cluster import make_config
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from pagecast_scheduler.core.kv_manager import KvManager
from pagecast_scheduler.core.prefix_cache import HashChain

ROWS = 3


class KvMachine(RuleBasedStateMachine):
    """memory: block -> the (namespace, prefix) whose last tokens it holds. rows: row -> (namespace, tokens, chain)."""

    @initialize(num_blocks=st.integers(4, 24), size=st.sampled_from([1, 2, 4]))
    def begin(self, num_blocks, size):
        self.size = size
        self.kv, self.twin = (KvManager(make_config(block_size=size, num_blocks=num_blocks, max_num_seqs=ROWS)) for _ in range(2))
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
        assert np.array_equal(hits, self.twin.lookup(chain, array, len(tokens)))
        assert len(hits) * self.size <= len(tokens) - 1, "a hit must leave a token to compute"
        for index, block in enumerate(hits.tolist()):
            assert self.memory[block] == (namespace, tokens[: (index + 1) * self.size])
        missing = self.kv.blocks_for(len(tokens)) - len(hits)
        if missing + self.twin.num_revived(hits) > self.twin.pool.num_free:
            return
        for kv in (self.kv, self.twin):
            kv.open_row(row, hits)
        assert np.array_equal(self.kv.grow(row, missing), self.twin.grow(row, missing))
        self.step += 1
        blocks, full = self.kv.table.row(row), len(tokens) // self.size
        for index in range(len(hits), full):
            self.memory[int(blocks[index])] = (namespace, tokens[: (index + 1) * self.size])
        for kv in (self.kv, self.twin):
            kv.publish(blocks, chain, array, len(hits), full, self.step)
        self.rows[row] = namespace, tokens, chain

    @precondition(lambda self: self.rows)
    @rule(data=st.data())
    def grow_each(self, data):
        rows = np.array(sorted(data.draw(st.sets(st.sampled_from(sorted(self.rows)), min_size=1))), np.int64)
        room = self.kv.table.num_blocks[rows].max() < self.kv.table.blocks.shape[1]
        if len(rows) <= self.twin.pool.num_free and room:
            grown = self.kv.grow_each(rows)
            assert np.array_equal(grown, self.twin.grow_each(rows))
            for row, block in zip(rows.tolist(), grown.tolist(), strict=True):
                assert self.kv.table.row(row)[-1] == block
                self.memory.pop(block, None)

    @precondition(lambda self: self.rows)
    @rule(data=st.data())
    def close_bad(self, data):
        row = data.draw(st.sampled_from(sorted(self.rows)))
        del self.rows[row]
        for kv in (self.kv, self.twin):
            blocks = kv.close_row(row)
            kv.forget(blocks)
            assert not kv.pool.has_content[blocks].any()
            kv.pool.give_back(blocks)

    @precondition(lambda self: self.rows)
    @rule(data=st.data(), more=st.lists(st.integers(0, 1), max_size=6))
    def end(self, data, more):
        """With what it has put out, as far as its blocks reach."""
        row = data.draw(st.sampled_from(sorted(self.rows)))
        namespace, tokens, chain = self.rows.pop(row)
        blocks = self.kv.table.row(row).copy()
        tokens = (tokens + more)[: len(blocks) * self.size]
        full = len(tokens) // self.size
        for index in range(full):
            if not self.twin.pool.has_content[blocks[index]]:
                self.memory[int(blocks[index])] = (namespace, tokens[: (index + 1) * self.size])
        array = np.array(tokens, np.uint32)
        for kv in (self.kv, self.twin):
            kv.leave(kv.close_row(row), chain, array, full)
        self.twin.settle()

    @precondition(lambda self: not self.kv.is_settled)
    @rule(most=st.integers(1, 2))
    def settle(self, most):
        self.kv.settle(most)

    @rule(held=st.booleans())
    def apply(self, held):
        """held: of somebody who holds a row's blocks for a step longer."""
        for kv in (self.kv, self.twin):
            if held and self.rows:
                kv.pool.hold(kv.table.row(min(self.rows)).copy(), self.step + 1)
            kv.applied(self.step)

    @rule()
    def end_holds(self):
        self.step += 1
        for kv in (self.kv, self.twin):
            kv.applied(self.step)

    @invariant()
    def laws(self):
        """Of the one who files at once: to look at the other would make it do so too."""
        if not hasattr(self, "kv"):
            return
        pool = self.twin.pool
        assert set(self.twin.cache.entries()) == set(np.flatnonzero(pool.has_content).tolist())
        rows = [self.twin.table.row(row) for row in range(ROWS)]
        held = np.bincount(np.concatenate([*rows, *pool.held()]), minlength=pool.num_blocks)
        assert np.array_equal(held[1:], pool.ref_count[1:])


TestKvManager = KvMachine.TestCase
TestKvManager.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)
