"""Which block holds which tokens: a SHA-256 chain over full blocks, seeded by the request's namespace.

The digest of a block covers its tokens, every token before it and the namespace, so equal digests mean equal KV. Token ids are compared
on every hit all the same: a collision, or a bug here, may cost a recompute but never a wrong answer. The cache owns no block; it says
what is in them.
"""

from functools import lru_cache
from hashlib import sha256

import numpy as np
from numpy.typing import NDArray

Change = tuple[bytes, bytes, bytes]
"""What happened to the cache, for those who watch it: (digest, parent digest, token bytes) of a block that became findable, (digest, b"",
b"") of one that is no longer, and CLEARED."""
CLEARED: Change = (b"", b"", b"")

STRIDE = 16
"""Blocks that a lookup hashes ahead: a miss costs at most so many."""


@lru_cache(maxsize=4096)
def _seed(namespace: bytes) -> bytes:
    """What the chains of a namespace begin with."""
    return sha256(b"pagecast-prefix\0" + namespace).digest()


class HashChain:
    """Digests of the full blocks of one growing token list, computed once and only as far as asked.

    digests[i] and pieces[i] are the digest and the token bytes of block i.
    """

    __slots__ = ("_block_size", "digests", "pieces", "seed")

    def __init__(self, namespace: bytes, block_size: int) -> None:
        self.seed = _seed(namespace)
        self._block_size = block_size
        self.digests: list[bytes] = []
        self.pieces: list[bytes] = []

    def extend(self, tokens: NDArray[np.uint32], num_blocks: int) -> None:
        """Cover the first `num_blocks` blocks of `tokens`, whose earlier part never changes between calls."""
        have = len(self.digests)
        if have >= num_blocks:
            return
        size = self._block_size
        data = tokens[have * size : num_blocks * size].astype("<u4", copy=False).tobytes()
        width = 4 * size
        digest = self.digests[-1] if have else self.seed
        for start in range(0, len(data), width):
            piece = data[start : start + width]
            digest = sha256(digest + piece).digest()
            self.digests.append(digest)
            self.pieces.append(piece)


class PrefixCache:
    """Digest → block. An entry is provisional from the plan that computes it until that step's result is applied."""

    def __init__(self) -> None:
        self._blocks: dict[bytes, int] = {}
        self._entries: dict[int, tuple[bytes, bytes]] = {}  # block -> (digest, token bytes)
        self._provisional: dict[int, list[int]] = {}  # step -> blocks
        self._step_of: dict[int, int] = {}  # provisional block -> step
        self._parents: dict[int, bytes] = {}  # block -> digest before it, or its namespace's seed
        self.changes: list[Change] | None = None  # since they were last taken; None while nobody watches
        self.num_changes = 0  # grows with every entry, so that a blocked request knows when another lookup is worth it

    def __len__(self) -> int:
        return len(self._blocks)

    def lookup(self, chain: HashChain, tokens: NDArray[np.uint32], max_blocks: int) -> list[int]:
        """Blocks of the longest cached prefix of `tokens`, at most `max_blocks` of them."""
        hits: list[int] = []
        for index in range(max_blocks):
            if index >= len(chain.digests):
                chain.extend(tokens, min(max_blocks, index + STRIDE))
            block = self._blocks.get(chain.digests[index])
            if block is None or self._entries[block][1] != chain.pieces[index]:
                break
            hits.append(block)
        return hits

    def register(self, chain: HashChain, indices: list[int], blocks: list[int], step: int) -> list[int]:
        """Remember what `blocks` hold: the chain's blocks of these indices; step > 0 makes them provisional until that step is applied.
        Returns those whose content was not cached already."""
        cached, entries, parents, digests, pieces = self._blocks, self._entries, self._parents, chain.digests, chain.pieces
        new = []
        for index, block in zip(indices, blocks, strict=True):
            digest = digests[index]
            if digest not in cached:
                cached[digest] = block
                entries[block] = digest, pieces[index]
                parents[block] = digests[index - 1] if index else chain.seed
                new.append(block)
        self.num_changes += len(new)
        if self.changes is not None:
            self.changes += [(entries[block][0], parents[block], entries[block][1]) for block in new]
        if step and new:
            self._provisional.setdefault(step, []).extend(new)
            self._step_of.update(dict.fromkeys(new, step))
        return new

    def confirm(self, step: int) -> None:
        """Step `step` was applied: what it computed is real."""
        for block in self._provisional.pop(step, ()):
            if self._step_of.get(block) == step:
                del self._step_of[block]

    def forget(self, block: int) -> None:
        """Drop the entry of a block that is evicted or whose content proved bad."""
        digest, _ = self._entries.pop(block)
        del self._blocks[digest]
        del self._parents[block]
        self._step_of.pop(block, None)
        if self.changes is not None:
            self.changes.append((digest, b"", b""))

    def cached(self) -> list[Change]:
        """Every findable block, as if it had become so just now."""
        return [(digest, self._parents[block], piece) for block, (digest, piece) in self._entries.items()]

    def planned_in(self, step: int) -> list[int]:
        """Blocks whose entries await the result of `step`."""
        return [block for block in self._provisional.get(step, ()) if self._step_of.get(block) == step]

    def is_provisional(self, block: int) -> bool:
        return block in self._step_of

    def entries(self) -> dict[int, tuple[bytes, bytes]]:
        """block -> (digest, token bytes), for the auditor."""
        return self._entries
