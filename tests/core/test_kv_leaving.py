"""What ended sequences leave behind is filed later, and nobody can tell."""

import numpy as np
from core.cluster import make_config

from pagecast_scheduler.core.kv_manager import KvManager
from pagecast_scheduler.core.prefix_cache import HashChain

SIZE = 4


def opened(kv, row, tokens):
    """A row that has computed these tokens and has not been asked to publish any."""
    kv.open_row(row, kv.lookup(HashChain(bytes(32), SIZE), tokens, len(tokens)))
    kv.grow(row, kv.blocks_for(len(tokens)) - int(kv.table.num_blocks[row]))


def ended(kv, row, tokens):
    kv.leave(kv.close_row(row), HashChain(bytes(32), SIZE), tokens, len(tokens) // SIZE)


def managers():
    return [KvManager(make_config(block_size=SIZE, num_blocks=16, max_num_seqs=3)) for _ in range(2)]


def test_ended_sequences_are_found_by_the_next_lookup():
    kv, _ = managers()
    tokens = np.arange(9, dtype=np.uint32)
    opened(kv, 0, tokens)
    ended(kv, 0, tokens)
    assert not kv.is_settled
    assert len(kv.lookup(HashChain(bytes(32), SIZE), tokens, 9)) == 2 and kv.is_settled


def test_their_blocks_are_free_for_whoever_asks():
    kv, _ = managers()
    free = kv.pool.num_free
    opened(kv, 0, np.arange(9, dtype=np.uint32))
    assert kv.pool.num_free == free - 3
    ended(kv, 0, np.arange(9, dtype=np.uint32))
    assert not kv.is_settled and kv.pool.num_free == free


def test_settling_takes_as_many_as_it_is_told():
    kv, _ = managers()
    for row in range(3):
        opened(kv, row, np.arange(row, row + 5, dtype=np.uint32))
    for row in range(3):
        ended(kv, row, np.arange(row, row + 5, dtype=np.uint32))
    kv.settle(2)
    assert not kv.is_settled
    kv.settle(2)
    assert kv.is_settled


def test_a_hold_that_ends_gives_back_behind_those_who_left_before():
    blocks = []
    for at_once, kv in zip((True, False), managers(), strict=True):
        for row in range(2):
            opened(kv, row, np.arange(10 * row, 10 * row + 3, dtype=np.uint32))
        kv.pool.hold(kv.table.row(1).copy(), 5)
        kv.pool.give_back(kv.close_row(1))
        ended(kv, 0, np.arange(3, dtype=np.uint32))
        if at_once:
            kv.settle()
        kv.applied(5)
        blocks.append(kv.grow(2, 3).tolist())
    assert blocks[0] == blocks[1]


def test_whoever_watches_the_cache_is_told_of_what_was_left():
    kv, _ = managers()
    kv.cache.changes = []
    tokens = np.arange(8, dtype=np.uint32)
    opened(kv, 0, tokens)
    ended(kv, 0, tokens)
    assert [piece for _, _, piece in kv.take_changes()] == [tokens[:4].tobytes(), tokens[4:].tobytes()]
    assert kv.take_changes() == []


def test_a_result_alone_files_nothing():
    kv, _ = managers()
    opened(kv, 0, np.arange(5, dtype=np.uint32))
    ended(kv, 0, np.arange(5, dtype=np.uint32))
    kv.applied(1)
    assert not kv.is_settled
