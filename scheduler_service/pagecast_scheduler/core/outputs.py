"""What front ends must learn, gathered in columns per front end slot until they are taken.

In the steady state a step is one segment per front end whose key, sequence and count columns are the same bytes as in the step before:
a `Cohort` keeps them for a set of rows.
"""

import numpy as np
from numpy.typing import NDArray

from pagecast_scheduler.core.rows import Index, Rows
from pagecast_wire.codec import pack_u32, pack_u64
from pagecast_wire.intake import Finished, FrontendBatch, Progress, PromptLogprobs, TokenLogprobs

Column = NDArray[np.uint32]


_ONE = (1).to_bytes(4, "little")


class Cohort:
    """A fixed set of sampling rows, ascending, with all of their columns that do not change from step to step.

    parts: per front end its slot, the positions of its rows within `rows` (None: all of them) and the packed key, sequence and
    all-ones count columns. tenants/tenant_rows: distinct tenants and how many of the rows each has. span: the rows as a
    slice if they are consecutive (slices are several times faster than index arrays), else the same as rows. flat_starts: where each
    row begins in Rows.flat_tokens. ones: one per row.
    """

    __slots__ = ("flat_starts", "generations", "ones", "parts", "rows", "span", "tenant_rows", "tenants")

    def __init__(self, state: Rows, rows: Index) -> None:
        self.rows = rows
        dense = len(rows) > 0 and int(rows[-1]) - int(rows[0]) + 1 == len(rows)
        self.span: Index | slice = slice(int(rows[0]), int(rows[-1]) + 1) if dense else rows
        self.ones = np.ones(len(rows), np.int64)
        self.flat_starts = rows * state.tokens.shape[1]
        self.generations = state.generation[self.span].copy()
        self.tenants, self.tenant_rows = _distinct(state.tenant[self.span])
        self.parts: list[tuple[int, Index | None, bytes, bytes, bytes]] = []
        slots = state.slot[self.span]
        distinct = _distinct(slots)[0].tolist()
        for slot in distinct:
            chosen = None if len(distinct) == 1 else np.flatnonzero(slots == slot)
            members = self.span if chosen is None else rows[chosen]
            keys, sequences = state.key[members].tobytes(), state.index[members].tobytes()
            self.parts.append((slot, chosen, keys, sequences, _ONE * (len(sequences) // 4)))


def _distinct(values: Index) -> tuple[Index, Index]:
    """Distinct values and how often each occurs; most often there is one, which needs no sort."""
    if len(values) and (values == values[0]).all():
        return values[:1].copy(), np.array([len(values)], np.int64)
    return np.unique(values, return_counts=True)


Segment = tuple[bytes, bytes, bytes, bytes, bytes]
"""Packed columns: keys, sequences, offsets, counts, tokens."""
_NO_TOKENS: Segment = (b"", b"", b"", b"", b"")


class _Pending:
    """What one front end has not been told yet."""

    __slots__ = ("finished", "logprobs", "loose", "progress", "prompt_logprobs", "segments")

    def __init__(self) -> None:
        self.segments: list[Segment] = []
        self.loose: list[tuple[int, int, int, int]] = []  # single tokens: (key, sequence, offset, token)
        self.finished: list[Finished] = []
        self.progress: dict[int, Progress] = {}  # by key: only the latest counts
        self.logprobs: list[TokenLogprobs] = []
        self.prompt_logprobs: list[PromptLogprobs] = []


class Outputs:
    """Pending output of every front end. num_steps: how many steps gave it, to be counted by who applies them: in one step no sequence
    gets more than one token."""

    def __init__(self) -> None:
        self._pending: dict[int, _Pending] = {}
        self.num_steps = 0

    def add_step(self, cohort: Cohort, offsets: Column, tokens: Column) -> None:
        """One new token for every row of the cohort; offsets: its output offset."""
        for slot, chosen, keys, sequences, counts in cohort.parts:
            at = offsets if chosen is None else offsets[chosen]
            new = tokens if chosen is None else tokens[chosen]
            self._of(slot).segments.append((keys, sequences, at.tobytes(), counts, new.tobytes()))

    def add_token(self, slot: int, key: int, sequence: int, offset: int, token: int) -> None:
        """A new token of one sequence."""
        self._of(slot).loose.append((key, sequence, offset, token))

    def add_forced(self, slot: int, key: int, sequence: int, offset: int, tokens: Column) -> None:
        """Tokens that one sequence takes in a step besides the one that it draws."""
        self._of(slot).loose += [(key, sequence, offset + at, token) for at, token in enumerate(tokens.tolist())]
        self.num_steps += 1  # as if drawn in a step before

    def add_finished(self, slot: int, finished: Finished) -> None:
        pending = self._of(slot)
        pending.finished.append(finished)

    def add_progress(self, slot: int, progress: Progress) -> None:
        self._of(slot).progress[progress.key] = progress

    def add_logprobs(self, slot: int, logprobs: TokenLogprobs) -> None:
        self._of(slot).logprobs.append(logprobs)

    def add_prompt_logprobs(self, slot: int, part: PromptLogprobs) -> None:
        self._of(slot).prompt_logprobs.append(part)

    def untold_logprobs(self, slot: int, key: int) -> tuple[list[TokenLogprobs], list[PromptLogprobs]]:
        """Records of one request, of output and of prompt tokens, that wait to be told."""
        pending = self._pending.get(slot)
        if pending is None:
            return [], []
        return [r for r in pending.logprobs if r.key == key], [part for part in pending.prompt_logprobs if part.key == key]

    def drop(self, slot: int) -> None:
        """The front end is gone: forget what it was to learn."""
        self._pending.pop(slot, None)

    def take(self, step: int) -> list[tuple[int, FrontendBatch]]:
        """Everything pending, one batch per front end."""
        taken, self._pending = self._pending, {}
        is_one_step, self.num_steps = self.num_steps == 1, 0
        return [(slot, _batch(step, pending, is_one_step)) for slot, pending in taken.items()]

    def _of(self, slot: int) -> _Pending:
        pending = self._pending.get(slot)
        if pending is None:
            pending = self._pending[slot] = _Pending()
        return pending


def _batch(step: int, pending: _Pending, is_one_step: bool) -> FrontendBatch:
    segments = [*pending.segments, _packed(pending.loose)] if pending.loose else pending.segments
    columns = segments[0] if len(segments) == 1 else _NO_TOKENS
    if len(segments) > 1:
        columns = _joined(segments) if is_one_step else _stacked(segments) or _merge(segments)
    elif pending.loose and not is_one_step:
        columns = _merge(segments)
    if not (pending.finished or pending.progress or pending.logprobs or pending.prompt_logprobs):
        return FrontendBatch(step, *columns)
    return FrontendBatch(
        step, *columns, finished=tuple(pending.finished), progress=tuple(pending.progress.values()), logprobs=tuple(pending.logprobs),
        prompt_logprobs=tuple(pending.prompt_logprobs),
    )  # fmt: skip


def _packed(loose: list[tuple[int, int, int, int]]) -> Segment:
    """Single tokens as a segment with an entry for each."""
    keys, sequences, offsets, tokens = zip(*loose, strict=True)
    return pack_u64(keys), pack_u32(sequences), pack_u32(offsets), _ONE * len(loose), pack_u32(tokens)


def _joined(segments: list[Segment]) -> Segment:
    """Segments one after the other."""
    keys, sequences, offsets, counts, tokens = (b"".join(column) for column in zip(*segments, strict=True))
    return keys, sequences, offsets, counts, tokens


def _stacked(segments: list[Segment]) -> Segment | None:
    """Steps of one and the same cohort as a segment; None if they are not."""
    keys, sequences, offsets, counts, _ = segments[0]
    if any(segment[0] != keys or segment[1] != sequences or segment[3] != counts for segment in segments):
        return None
    width, num_steps = len(sequences) // 4, len(segments)
    if counts != _ONE * width:
        return None
    tokens = np.frombuffer(b"".join(segment[4] for segment in segments), "<u4").reshape(num_steps, width)
    return keys, sequences, offsets, num_steps.to_bytes(4, "little") * width, tokens.T.tobytes()


def _merge(segments: list[Segment]) -> Segment:
    """Several segments as one in which every sequence has a single entry with all its tokens in order."""
    joined = _joined(segments)
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
