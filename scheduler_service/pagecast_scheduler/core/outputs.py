"""What front ends must learn, gathered in columns per front end slot until they are taken.

In the steady state a step is one segment per front end whose key, sequence and count columns are the same bytes as in the step before:
a `Cohort` keeps them for a set of rows.
"""

import numpy as np
from numpy.typing import NDArray

from pagecast_scheduler.core.rows import Index, Rows
from pagecast_wire.codec import pack_u32, pack_u64
from pagecast_wire.intake import Finished, FrontendBatch, Progress, TokenLogprobs

Column = NDArray[np.uint32]


class Cohort:
    """A fixed set of sampling rows, ascending, with all of their columns that do not change from step to step.

    parts: per front end its slot, the positions of its rows within `rows` (None: all of them) and the packed key, sequence and
    all-ones count columns. tenants/tenant_rows: distinct tenants and how many of the rows each has.
    """

    __slots__ = ("generations", "num_prompt", "parts", "rows", "tenant_rows", "tenants")

    def __init__(self, state: Rows, rows: Index) -> None:
        self.rows = rows
        self.generations = state.generation[rows]
        self.num_prompt = state.num_prompt[rows]
        self.tenants, self.tenant_rows = np.unique(state.tenant[rows], return_counts=True)
        self.parts: list[tuple[int, Index | None, bytes, bytes, bytes]] = []
        slots = state.slot[rows]
        distinct = np.unique(slots).tolist()
        for slot in distinct:
            chosen = None if len(distinct) == 1 else np.flatnonzero(slots == slot)
            members = rows if chosen is None else rows[chosen]
            ones = pack_u32(np.ones(len(members), np.uint32))
            self.parts.append((slot, chosen, pack_u64(state.key[members]), pack_u32(state.index[members]), ones))


class _Pending:
    """What one front end has not been told yet. segments: (keys, sequences, offsets, counts, tokens) as packed columns."""

    __slots__ = ("finished", "logprobs", "progress", "segments")

    def __init__(self) -> None:
        self.segments: list[tuple[bytes, bytes, bytes, bytes, bytes]] = []
        self.finished: list[Finished] = []
        self.progress: dict[int, Progress] = {}  # by key: only the latest counts
        self.logprobs: list[TokenLogprobs] = []


class Outputs:
    """Pending output of every front end."""

    def __init__(self) -> None:
        self._pending: dict[int, _Pending] = {}

    def add_step(self, cohort: Cohort, offsets: NDArray[np.int32], tokens: Column) -> None:
        """One new token for every row of the cohort; offsets: its output offset."""
        packed_offsets = offsets.astype("<u4", copy=False)
        for slot, chosen, keys, sequences, counts in cohort.parts:
            at = packed_offsets if chosen is None else packed_offsets[chosen]
            new = tokens if chosen is None else tokens[chosen]
            self._of(slot).segments.append((keys, sequences, at.tobytes(), counts, new.tobytes()))

    def add_tokens(self, slot: int, key: int, sequence: int, offset: int, tokens: Column) -> None:
        """New tokens of one sequence."""
        columns = (pack_u64([key]), pack_u32([sequence]), pack_u32([offset]), pack_u32([len(tokens)]), pack_u32(tokens))
        self._of(slot).segments.append(columns)

    def add_finished(self, slot: int, finished: Finished) -> None:
        pending = self._of(slot)
        pending.finished.append(finished)

    def add_progress(self, slot: int, progress: Progress) -> None:
        self._of(slot).progress[progress.key] = progress

    def add_logprobs(self, slot: int, logprobs: TokenLogprobs) -> None:
        self._of(slot).logprobs.append(logprobs)

    def drop(self, slot: int) -> None:
        """The front end is gone: forget what it was to learn."""
        self._pending.pop(slot, None)

    def take(self, step: int) -> list[tuple[int, FrontendBatch]]:
        """Everything pending, one batch per front end."""
        taken, self._pending = self._pending, {}
        return [(slot, _batch(step, pending)) for slot, pending in taken.items()]

    def _of(self, slot: int) -> _Pending:
        pending = self._pending.get(slot)
        if pending is None:
            pending = self._pending[slot] = _Pending()
        return pending


def _batch(step: int, pending: _Pending) -> FrontendBatch:
    keys = sequences = offsets = counts = tokens = b""
    if len(pending.segments) == 1:
        keys, sequences, offsets, counts, tokens = pending.segments[0]
    elif pending.segments:
        keys, sequences, offsets, counts, tokens = _merge(pending.segments)
    return FrontendBatch(
        step=step, keys=keys, sequences=sequences, offsets=offsets, counts=counts, tokens=tokens,
        finished=tuple(pending.finished), progress=tuple(pending.progress.values()), logprobs=tuple(pending.logprobs),
    )  # fmt: skip


def _merge(segments: list[tuple[bytes, bytes, bytes, bytes, bytes]]) -> tuple[bytes, bytes, bytes, bytes, bytes]:
    """Several segments as one in which every sequence has a single entry with all its tokens in order."""
    joined = [b"".join(column) for column in zip(*segments, strict=True)]
    keys = np.frombuffer(joined[0], "<u8")
    sequences, offsets, counts, tokens = (np.frombuffer(column, "<u4") for column in joined[1:])
    each_key, each_sequence = np.repeat(keys, counts), np.repeat(sequences, counts)
    starts = np.cumsum(counts) - counts
    each_offset = np.arange(len(tokens), dtype=np.int64) - np.repeat(starts, counts) + np.repeat(offsets, counts)
    order = np.lexsort((each_offset, each_sequence, each_key))
    each_key, each_sequence, each_offset = each_key[order], each_sequence[order], each_offset[order]
    first = np.ones(len(order), np.bool_)
    first[1:] = (each_key[1:] != each_key[:-1]) | (each_sequence[1:] != each_sequence[:-1])
    heads = np.flatnonzero(first)
    lengths = np.diff(np.append(heads, len(order)))
    return (
        pack_u64(each_key[heads]), pack_u32(each_sequence[heads]), pack_u32(each_offset[heads]), pack_u32(lengths), pack_u32(tokens[order])
    )  # fmt: skip
