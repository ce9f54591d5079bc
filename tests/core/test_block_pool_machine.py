"""BlockPool against a model of plain lists: states, holders, and the order in which cached blocks are given up."""

import numpy as np
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from pagecast_scheduler.core.block_pool import BlockPool


class PoolMachine(RuleBasedStateMachine):
    """chains: block lists, each with one holder on every block. cached: content known and no holder, least recently used first."""

    @initialize(num_blocks=st.integers(4, 24))
    def begin(self, num_blocks):
        self.pool = BlockPool(num_blocks)
        self.clean = set(range(1, num_blocks))
        self.cached = []
        self.content = set()
        self.chains = []
        self.holds = []

    def holders(self, block):
        return sum(block in chain for chain in self.chains) + sum(block in blocks for _, blocks in self.holds)

    def model_give_back(self, blocks):
        for block in reversed(blocks):
            if not self.holders(block):
                if block in self.content:
                    self.cached.append(block)
                else:
                    self.clean.add(block)

    @rule(data=st.data())
    def take(self, data):
        count = data.draw(st.integers(0, len(self.clean) + len(self.cached)))
        blocks, evicted = (array.tolist() for array in self.pool.take(count))
        from_cache = max(0, count - len(self.clean))
        assert evicted == self.cached[:from_cache], "evicted out of order"
        assert set(blocks) - set(evicted) <= self.clean and len(set(blocks)) == count
        self.clean -= set(blocks)
        self.cached = self.cached[from_cache:]
        self.content -= set(evicted)
        self.chains.append(blocks)

    @precondition(lambda self: self.chains)
    @rule(data=st.data())
    def give_back(self, data):
        chain = self.chains.pop(data.draw(st.integers(0, len(self.chains) - 1)))
        self.pool.give_back(np.array(chain, np.int64))
        self.model_give_back(chain)

    @precondition(lambda self: self.content)
    @rule(data=st.data())
    def share(self, data):
        known = sorted(self.content)
        chain = data.draw(st.lists(st.sampled_from(known), min_size=1, unique=True))
        self.pool.touch(np.array(chain, np.int64))
        self.cached = [block for block in self.cached if block not in chain]
        self.chains.append(chain)

    @precondition(lambda self: any(self.chains))
    @rule(data=st.data(), until=st.integers(1, 5))
    def hold(self, data, until):
        chain = data.draw(st.sampled_from([chain for chain in self.chains if chain]))
        self.pool.hold(np.array(chain, np.int64), until)
        self.holds.append((until, chain))

    @rule(step=st.integers(1, 5))
    def end_holds(self, step):
        ended = [hold for hold in self.holds if hold[0] <= step]
        for hold in ended:
            self.holds.remove(hold)
            self.model_give_back(hold[1])
        self.pool.end_holds(step)

    @precondition(lambda self: any(self.chains))
    @rule(data=st.data())
    def learn(self, data):
        block = data.draw(st.sampled_from(sorted({block for chain in self.chains for block in chain})))
        self.pool.set_content(np.array([block]))
        self.content.add(block)

    @precondition(lambda self: self.content)
    @rule(data=st.data())
    def unlearn(self, data):
        block = data.draw(st.sampled_from(sorted(self.content)))
        self.pool.drop_content(block)
        self.content.remove(block)
        if block in self.cached:
            self.cached.remove(block)
            self.clean.add(block)

    @invariant()
    def equal(self):
        if not hasattr(self, "pool"):
            return
        clean, cached = self.pool.free_blocks()
        assert set(clean.tolist()) == self.clean and len(clean) == len(self.clean) == self.pool.num_clean
        assert cached.tolist() == self.cached and self.pool.num_cached == len(self.cached)
        assert all(self.pool.ref_count[block] == self.holders(block) for block in range(1, self.pool.num_blocks))
        assert self.pool.ref_count[0] == 1, "the null block was given out"
        assert self.pool.num_free + self.pool.num_referenced == self.pool.num_blocks - 1


TestBlockPool = PoolMachine.TestCase
TestBlockPool.settings = settings(max_examples=60, stateful_step_count=50, deadline=None)


def test_a_chain_is_given_up_from_its_tail():
    pool = BlockPool(5)
    chain, _ = pool.take(4)
    for block in chain.tolist():
        pool.set_content(np.array([block]))
    pool.give_back(chain)
    assert [int(pool.take(1)[1][0]) for _ in range(4)] == chain.tolist()[::-1]


def test_a_held_block_is_not_reused_before_its_step():
    pool = BlockPool(3)
    blocks, _ = pool.take(2)
    pool.hold(blocks[:1], until_step=7)
    pool.give_back(blocks)
    assert pool.num_free == 1
    pool.end_holds(6)
    assert pool.num_free == 1
    pool.end_holds(7)
    assert pool.num_free == 2
