"""Which decoding rows begin with the same blocks, so that attention can read those once for all of them.

Known here without asking the device: rows that share a prefix were admitted with the same block ids at the front of their tables.
"""

from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from pagecast_worker.layers.attention import Attention
from pagecast_worker.models.decoder import Decoder
from pagecast_worker.row_book import Int, RowBook

WORTHWHILE_BYTES = 192 << 20
"""KV bytes of a layer that must be read less often for the second launch to pay (H200: about 50 us of reading)."""
MAX_PREFIXES = 4
LEAST_MEMBERS = 4
SMALLEST_BATCH = 32


def can_share(model: Decoder) -> bool:
    """Whether every layer's attention has the form for it: over all tokens, and not over scaled bytes."""
    return all(isinstance(a, Attention) and not a.window and not a.kv_scales for a in (layer.attention for layer in model.layers))


@dataclass(frozen=True, slots=True)
class Sharing:
    """skip[B]: tokens of each place's sequence that lie in its prefix. members[..]: places, those of an item next to each other.
    items[I, 4]: (first of its members, how many, tokens, a row whose table names the blocks)."""

    skip: Int
    members: Int
    items: Int


class PrefixSharing:
    """Finds prefixes worth sharing among the rows of a step. Remembers the last answer, as rows change seldom.

    item_members: sequences that one program takes. bytes_per_token: of one layer's K and V.
    """

    def __init__(self, item_members: int, bytes_per_token: int) -> None:
        self.item_members = item_members
        self._worthwhile = -(-WORTHWHILE_BYTES // bytes_per_token)
        self._asked: tuple[int, bytes] = (-1, b"")
        self._found: Sharing | None = None

    def max_items(self, batch: int) -> int:
        return -(-batch // self.item_members) + MAX_PREFIXES

    def of(self, book: RowBook, rows: Int) -> Sharing | None:
        """None where nothing is shared, or too little. rows: of all decoding rows, in the order of the batch."""
        if len(rows) < LEAST_MEMBERS:
            return None
        asked = (book.version, rows.tobytes())
        if asked != self._asked:
            self._asked, self._found = asked, self._find(book, rows)
        return self._found

    def _find(self, book: RowBook, rows: Int) -> Sharing | None:
        _, which, counts = np.unique(book.table[rows, 0], return_inverse=True, return_counts=True)
        groups: list[tuple[int, Int, int]] = []  # (KV tokens that are read less, places, prefix tokens)
        for group in np.flatnonzero(counts >= LEAST_MEMBERS).tolist():
            places = np.flatnonzero(which == group)
            tokens = self._common_tokens(book, rows[places])
            items = -(-len(places) // self.item_members)
            groups.append((tokens * (len(places) - items), places, tokens))
        groups = sorted(groups, key=lambda group: -group[0])[:MAX_PREFIXES]
        if sum(saved for saved, _, _ in groups) < self._worthwhile:
            return None
        skip = np.zeros(len(rows), dtype=np.int64)
        members: list[Int] = []
        items_found: list[tuple[int, int, int, int]] = []
        for saved, places, tokens in groups:
            if not saved:
                continue
            skip[places] = tokens
            begin = sum(map(len, members))
            members.append(places)
            for first in range(0, len(places), self.item_members):
                count = min(self.item_members, len(places) - first)
                items_found.append((begin + first, count, tokens, int(rows[places[0]])))
        return Sharing(skip, np.concatenate(members), np.array(items_found, dtype=np.int64))

    def _common_tokens(self, book: RowBook, rows: Int) -> int:
        """Tokens in the leading blocks that all of the rows' tables have alike. The last token of each row lies beyond them."""
        size = book.start.block_size
        most = int((book.num_known[rows] - 1).min()) // size
        tables = book.table[rows, :most]
        alike = (tables == tables[0]).all(0)
        return size * (most if alike.all() else int(alike.argmin()))

    def words(self, batch: int) -> int:
        return 2 * batch + 4 * self.max_items(batch)

    def pack(self, sharing: Sharing, batch: int) -> NDArray[np.int64]:
        """As words for `view`, filled up to a batch of so many places."""
        flat = np.zeros(self.words(batch), dtype=np.int64)
        flat[: len(sharing.skip)] = sharing.skip
        flat[batch : batch + len(sharing.members)] = sharing.members
        flat[2 * batch : 2 * batch + sharing.items.size] = sharing.items.reshape(-1)
        return flat

    def view(self, batch: int, buffer: Tensor) -> "SharedOnDevice":
        """buffer: int32 [at least words(batch)]."""
        skip, members, items = buffer[: self.words(batch)].split_with_sizes([batch, batch, 4 * self.max_items(batch)])
        return SharedOnDevice(skip, members, items.view(-1, 4))


@dataclass(frozen=True, slots=True)
class SharedOnDevice:
    """A Sharing as attention reads it (pagecast_kernels.shared_prefix.SharedPrefixes), filled up with places that are nobody's."""

    skip: Tensor
    members: Tensor
    items: Tensor


def sharing_for(model: Decoder, dtype: torch.dtype) -> PrefixSharing | None:
    """None for a model that cannot share."""
    if not can_share(model):
        return None
    from pagecast_kernels.shared_prefix import seqs_per_item

    attention = model.layers[0].attention
    per_item = seqs_per_item(attention.num_heads, model.num_kv_heads)
    heads, key, value = model.kv_shape
    return PrefixSharing(per_item, heads * (key + value) * dtype.itemsize)
