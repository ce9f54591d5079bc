"""PrefixCache against a model that keys whole token prefixes, with a vocabulary of two."""

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from pagecast_scheduler.core.prefix_cache import HashChain, PrefixCache

SIZE = 2
NAMESPACES = [bytes(32), b"x" * 32]
TOKENS = st.lists(st.integers(0, 1), max_size=10)


def chain_of(namespace):
    return HashChain(namespace, SIZE)


class CacheMachine(RuleBasedStateMachine):
    """known: (namespace, all tokens up to the end of a block) -> block. waiting: block -> step that computes it."""

    def __init__(self):
        super().__init__()
        self.cache = PrefixCache()
        self.known = {}
        self.waiting = {}
        self.next_block = 1

    @rule(namespace=st.sampled_from(NAMESPACES), tokens=TOKENS, step=st.integers(0, 3))
    def register(self, namespace, tokens, step):
        chain = chain_of(namespace)
        full = len(tokens) // SIZE
        chain.extend(np.array(tokens, np.uint32), full)
        blocks = list(range(self.next_block, self.next_block + full))
        self.next_block += full
        prefixes = [(namespace, tuple(tokens[: (index + 1) * SIZE])) for index in range(full)]
        new = self.cache.register(chain, list(range(full)), blocks, step)
        assert new == [block for block, prefix in zip(blocks, prefixes) if prefix not in self.known], "one content, one entry"
        for block, prefix in zip(blocks, prefixes):
            if block in new:
                self.known[prefix] = block
                if step:
                    self.waiting[block] = step

    @rule(namespace=st.sampled_from(NAMESPACES), tokens=TOKENS, limit=st.integers(0, 5))
    def lookup(self, namespace, tokens, limit):
        expected = []
        for index in range(min(limit, len(tokens) // SIZE)):
            block = self.known.get((namespace, tuple(tokens[: (index + 1) * SIZE])))
            if block is None:
                break
            expected.append(block)
        found = self.cache.lookup(chain_of(namespace), np.array(tokens, np.uint32), min(limit, len(tokens) // SIZE))
        assert found == expected

    @precondition(lambda self: self.known)
    @rule(data=st.data())
    def forget(self, data):
        prefix = data.draw(st.sampled_from(sorted(self.known)))
        block = self.known.pop(prefix)
        self.waiting.pop(block, None)
        self.cache.forget(block)

    @rule(step=st.integers(1, 3))
    def confirm(self, step):
        assert sorted(self.cache.planned_in(step)) == sorted(block for block, at in self.waiting.items() if at == step)
        self.cache.confirm(step)
        self.waiting = {block: at for block, at in self.waiting.items() if at != step}

    @invariant()
    def equal(self):
        assert set(self.cache.entries()) == set(self.known.values()) and len(self.cache) == len(self.known)
        assert all(self.cache.is_provisional(block) == (block in self.waiting) for block in self.known.values())


TestPrefixCache = CacheMachine.TestCase
TestPrefixCache.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)


@pytest.mark.parametrize("pieces", [[3, 8], [1, 2, 3, 8], [8]])
def test_a_chain_does_not_depend_on_how_it_was_extended(pieces):
    tokens = np.arange(16, dtype=np.uint32)
    whole, stepwise = chain_of(NAMESPACES[0]), chain_of(NAMESPACES[0])
    whole.extend(tokens, 8)
    for upto in pieces:
        stepwise.extend(tokens, upto)
    assert stepwise.digests == whole.digests and stepwise.pieces == whole.pieces


def test_a_digest_covers_tokens_parents_and_namespace():
    digests = set()
    for namespace in NAMESPACES:
        for tokens in ([0, 0, 1, 1], [0, 1, 1, 1]):
            chain = chain_of(namespace)
            chain.extend(np.array(tokens, np.uint32), 2)
            digests.add(chain.digests[1])
    assert len(digests) == 4


def test_equal_digests_with_other_tokens_are_no_hit():
    cache, tokens = PrefixCache(), np.array([0, 1], np.uint32)
    chain = chain_of(NAMESPACES[0])
    chain.extend(tokens, 1)
    other = chain_of(NAMESPACES[0])
    other.digests, other.pieces = chain.digests, [b"other tokens"]
    cache.register(other, [0], [1], 0)
    assert cache.lookup(chain, tokens, 1) == []
